"""ShareGPT: one JSON file with the texts of conversations, as benchmarks of vLLM and SGLang use it.

It is a list of ``{"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}``, and
has no times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastgen.lab.workloads.traces.rows import TraceFile, TraceRow

# What the files call those who ask.
_ASKING = {"human", "user"}


def sharegpt_rows(file: TraceFile, encode: Callable[[str], Sequence[int]] | None, *, turns: bool) -> Iterator[TraceRow]:
    """Yields the rows of a ShareGPT file.

    Without ``turns``, each conversation is one request: its first text, and an answer as long as its second, as
    ``vllm bench`` reads the file. With ``turns`` it is a session: each question continues the conversation, and each
    answer has the length of the one in the file. Conversations that begin otherwise than with a question and an answer
    are left out.

    :raises TraceError: if the file is not such a list, or there is no ``encode``; the message names the entry.
    """
    if encode is None:
        file.fail("this trace has texts: a tokenizer is needed")
    for number, entry in enumerate(_entries(file)):
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            file.fail(f"entry {number}: expected an object with a list 'conversations'")
        pairs = _pairs(file, number, messages)
        for turn, (question, answer) in enumerate(pairs if turns else pairs[:1]):
            ids = encode(question)
            yield TraceRow(
                at_s=None,
                num_prompt_tokens=len(ids),
                num_new_tokens=len(encode(answer)),
                prompt_ids=ids,
                session=f"conversation {number}" if turns else None,
                continues=turn > 0,
            )


def _entries(file: TraceFile) -> list[Any]:
    try:
        found = json.loads(file.text)
    except json.JSONDecodeError as error:
        file.number = error.lineno
        file.fail(f"no JSON: {error.msg}")
    if not isinstance(found, list):
        file.fail("expected a list of conversations")
    return found


def _pairs(file: TraceFile, number: int, messages: list[Any]) -> list[tuple[str, str]]:
    """Returns the questions and their answers, as far as they alternate from the beginning."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            file.fail(f"entry {number}: expected messages with a text 'value', not {message!r:.80}")
        if not isinstance(message.get("from", ""), str):
            file.fail(f"entry {number}: expected a text in 'from', not {message['from']!r:.80}")
    found = []
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        if question.get("from") not in _ASKING or answer.get("from") in _ASKING:
            break
        found.append((question["value"], answer["value"]))
    return found
