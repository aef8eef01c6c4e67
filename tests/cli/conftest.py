"""Runs the command line inside the test, on a stub of ``fastgen.load`` where the test asks for one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import fastgen
from fastgen.cli import main
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput, RequestMetrics

Run = Callable[..., "Finished"]


@dataclass(frozen=True)
class Finished:
    status: int | None
    out: str
    err: str


class FakeStream(io.TextIOWrapper):
    """A UTF-8 stream that pretends to be a terminal where ``terminal`` is set."""

    def __init__(self, content: bytes = b"", *, terminal: bool):
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def written(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("generate", …, stdin=…, terminal=…)`` is what the ``fastgen`` command would do with these arguments."""

    def run(*arguments: str, stdin: str | bytes | FakeStream = "", terminal: bool = False) -> Finished:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        source = FakeStream(content, terminal=terminal) if isinstance(content, bytes) else content
        out, err = FakeStream(terminal=terminal), FakeStream(terminal=terminal)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["fastgen", *arguments])
            patch.setattr(sys, "stdin", source)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as stop:
                main()
        return Finished(stop.value.code, out.written(), err.written())

    return run


@dataclass
class StubLLM:
    """Answers a prompt with ``answers[prompt]``, or else with the prompt backwards, and remembers what it was asked.

    An answer that is an exception is raised. A token of the stub is a word with the space after it.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    loaded: tuple[str, dict[str, Any]] | None = None
    num_streams_closed: int = 0
    closed: bool = False
    # What :meth:`check_can_chat` raises.
    cannot_chat: Exception | None = None

    def check_can_chat(self) -> None:
        if self.cannot_chat is not None:
            raise self.cannot_chat

    def __enter__(self) -> StubLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def generate(self, prompts: list[str], **fields: Any) -> list[GenerationOutput]:
        self.asked.append(prompts)
        self.fields = fields
        return [self._output(prompt, fields) for prompt in prompts]

    def stream(self, prompt: str, **fields: Any) -> StubStream:
        self.asked.append(prompt)
        self.fields = fields
        return StubStream(self, prompt)

    def stream_chat(self, messages: list[dict[str, str]], **fields: Any) -> StubStream:
        self.asked.append([dict(message) for message in messages])
        self.fields = fields
        return StubStream(self, messages[-1]["content"])

    @staticmethod
    def make_output(text: str, prompt: str = "", **given: Any) -> GenerationOutput:
        return GenerationOutput(
            request_id=0,
            **{
                "text": text,
                "token_ids": list(range(len(text.split()))),
                "finish_reason": "stop",
                "prompt_token_ids": list(range(len(prompt.split()))),
                "metrics": RequestMetrics(queue_s=0.25, ttft_s=0.5, gaps_s=[0.125]),
                **given,
            },
        )

    def answer(self, prompt: str) -> Any:
        answer = self.answers.get(prompt, prompt[::-1])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _output(self, prompt: str, fields: dict[str, Any]) -> GenerationOutput:
        answer = self.answer(prompt)
        if isinstance(answer, GenerationOutput):
            return answer
        count = fields.get("n", 1)
        first, *others = (self.make_output(f"{answer}{number or ''}", prompt) for number in range(count))
        return self.make_output(first.text, prompt, others=tuple(others))


class StubStream(Iterator[GenerationChunk]):
    """The words of an answer, one a chunk. An output in the place of an answer ends as that output did."""

    def __init__(self, llm: StubLLM, prompt: str):
        answer = llm.answer(prompt)
        self.output = answer if isinstance(answer, GenerationOutput) else llm.make_output("")
        self._llm = llm
        text = answer.text if isinstance(answer, GenerationOutput) else answer
        self._words = iter(text if isinstance(text, list) else text.split(" "))
        self._ended = False

    def __next__(self) -> GenerationChunk:
        word = next(self._words, None)
        if isinstance(word, BaseException):
            raise word
        if word is not None:
            return GenerationChunk(index=0, text=word, token_ids=[len(word)])
        if self._ended:
            raise StopIteration
        self._ended = True
        return GenerationChunk(index=0, text="", token_ids=[], finish_reason=self.output.finish_reason)

    def close(self) -> None:
        self._llm.num_streams_closed += 1


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubLLM:
    """Stands where ``fastgen.load`` would bring a model."""
    llm = StubLLM()

    def load(model: str, **arguments: Any) -> StubLLM:
        llm.loaded = (model, arguments)
        return llm

    monkeypatch.setitem(vars(fastgen), "load", load)  # not setattr, which would import the real one first
    return llm
