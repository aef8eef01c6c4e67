"""``fastgen chat``: a conversation, on a terminal or piped; each line of piped stdin is a turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fastgen
from fastgen.cli import options
from fastgen.errors import FastgenError, GenerationError, RequestTooLargeError

if TYPE_CHECKING:
    from fastgen import LLM
    from fastgen.runtime.llm import Stream

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


# A conversation has one answer to each turn, and prints its text alone.
_SAMPLING = options.without(
    options.SAMPLING_ARGUMENTS,
    *("n", "logprobs", "prompt_logprobs", "beam_width", "length_penalty", "early_stopping"),
)


@options.with_flags(sampling=_SAMPLING, load=options.LOAD_ARGUMENTS)
def chat(
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    *,
    sampling: options.Given,
    load: options.Given,
) -> None:
    """Talk with a model.

    On a terminal, or piped: each line of piped stdin is a turn. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C
    stops an answer and keeps the conversation.
    """
    fields = options.sampling_fields(sampling)
    opening = [{"role": "system", "content": options.check_text(system)}] if system is not None else []
    on_terminal = options.stdin().isatty()
    with fastgen.load(model, **load) as llm:
        llm.check_can_chat()  # before the first turn is typed
        if on_terminal:
            print(_HELP)
        messages = list(opening)
        for turn in _read_turns(on_terminal):
            if turn in ("/exit", "/quit"):
                break
            if turn == "/reset":
                messages = list(opening)
            elif turn.startswith("/"):
                print(f"unknown command {turn.split()[0]}: {_HELP}", file=sys.stderr)
            else:
                asked = [*messages, {"role": "user", "content": turn}]
                try:
                    answer = _print_answer(llm, asked, fields)
                except FastgenError as error:
                    if not on_terminal:
                        raise
                    print(f"fastgen: {error}", file=sys.stderr)  # the turn is dropped, the conversation continues
                else:
                    messages = [*asked, {"role": "assistant", "content": answer}]


def _read_turns(on_terminal: bool) -> Iterator[str]:
    """Yields the lines that the user types, without blank lines."""
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() editing and history)
    while True:
        try:
            line = input("> ") if on_terminal else input()
        except EOFError:
            if on_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
            continue
        except UnicodeDecodeError:
            options.usage_error("stdin is not UTF-8 text")
        if line.strip():
            yield options.check_text(line.strip())


def _print_answer(llm: LLM, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
    """Prints the answer as it is generated and returns it; after Ctrl-C, the part that there is."""
    answer = ""
    stream = _start_answer(llm, messages, fields)
    try:
        with contextlib.closing(stream):
            for chunk in stream:
                answer += chunk.text
                print(chunk.text, end="", flush=True)
            if stream.output.error is not None:
                raise GenerationError(stream.output.error)
    except KeyboardInterrupt:
        pass
    finally:
        print()
    return answer


def _start_answer(llm: LLM, messages: list[dict[str, str]], fields: dict[str, Any]) -> Stream:
    """Returns the stream of the answer. Without ``max_new_tokens``, the answer is cut to the rest of the context."""
    try:
        return llm.stream_chat(messages, **fields)
    except RequestTooLargeError as error:
        if error.room < 1:
            raise RequestTooLargeError(
                "the conversation fills the context of the model; /reset starts over", room=error.room
            ) from error
        if "max_new_tokens" in fields:
            raise
        return llm.stream_chat(messages, **fields, max_new_tokens=error.room)
