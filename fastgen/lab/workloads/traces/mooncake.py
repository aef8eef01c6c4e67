"""Mooncake traces: JSON Lines with times, lengths and shared prefixes.

The format is that of the Mooncake paper's traces (Qin et al., FAST 2025; kvcache-ai/Mooncake on GitHub), with the
fields that NVIDIA's aiperf added (its documentation of trace replay, read in November 2026)::

    {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}
    {"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20}
    {"session_id": "b", "timestamp": 90, "text_input": "Hello", "output_length": 20}
    {"session_id": "c", "timestamp": 95, "messages": [{"role": "user", "content": "Hello"}], "output_length": 20}

Times and delays are milliseconds. A hash id stands for 512 tokens; the last block is cut where the prompt ends, and
tokens without an id are the prompt's own. As in aiperf, later lines of a session have what their turn adds to the
conversation; ``messages`` have all of it, unless ``message_mode`` is ``"delta"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastgen.lab.workloads.traces.rows import TraceFile, TraceRow


def mooncake_rows(file: TraceFile, encode: Callable[[str], Sequence[int]] | None) -> Iterator[TraceRow]:
    """Yields the rows of a Mooncake trace.

    :raises TraceError: for a line that is no such row, or has a text when there is no ``encode``.
    """
    sessions: set[str] = set()
    for line in file.objects():
        session = line.get("session_id")
        if session is not None and not isinstance(session, str | int):
            file.fail(f"session_id: expected text, not {session!r}")
        name = None if session is None else str(session)
        follows = name in sessions
        prompt_ids = _text_ids(file, line, encode)
        yield TraceRow(
            at_s=None if line.get("timestamp") is None else file.number_of(line["timestamp"], "timestamp") / 1e3,
            num_prompt_tokens=(
                file.count(line.get("input_length"), "input_length") if prompt_ids is None else len(prompt_ids)
            ),
            num_new_tokens=file.count(line.get("output_length"), "output_length"),
            prompt_ids=prompt_ids,
            hash_ids=_hash_ids(file, line),
            session=name,
            think_s=_think_s(file, line) if follows else 0.0,
            continues=follows and ("messages" not in line or line.get("message_mode") == "delta"),
        )
        if name is not None:
            sessions.add(name)


def _think_s(file: TraceFile, line: dict[str, Any]) -> float:
    delay_s = file.number_of(line.get("delay", 0), "delay") / 1e3
    if delay_s < 0:
        file.fail(f"delay: expected a number of at least 0, not {line['delay']!r}")
    return delay_s


def _hash_ids(file: TraceFile, line: dict[str, Any]) -> Sequence[int | str]:
    found = line.get("hash_ids") or []
    if not isinstance(found, list) or not all(type(one) in (int, str) for one in found):
        file.fail(f"hash_ids: expected a list of integers or texts, not {found!r:.80}")
    return found


def _text_ids(
    file: TraceFile, line: dict[str, Any], encode: Callable[[str], Sequence[int]] | None
) -> Sequence[int] | None:
    """Returns the tokens of the line's text; ``None`` if it has lengths only."""
    if line.get("text_input") is not None:
        text = line["text_input"]
    elif line.get("messages") is not None:
        text = _joined(file, line["messages"])
    else:
        return None
    if not isinstance(text, str):
        file.fail(f"text_input: expected text, not {text!r:.80}")
    if encode is None:
        file.fail("this line has a text: a tokenizer is needed")
    return encode(text)


def _joined(file: TraceFile, messages: object) -> str:
    """Returns the messages as one text, each after its role. The server applies its chat template itself."""
    lines = []
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            file.fail(f"messages: expected objects with a text as content, not {message!r:.80}")
        lines.append(f"{message.get('role', 'user')}: {message['content']}")
    return "\n".join(lines)
