"""The interface of what a load is put on: an engine, or an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastgen.errors import FastgenError
from fastgen.lab.workloads.request import PlannedRequest


class RequestFailedError(FastgenError):
    """A target refused a request, or did not answer all of it."""


@dataclass(slots=True)
class Answer:
    """The answer to one request so far. Times are those of ``time.perf_counter``."""

    token_times: list[float] = field(default_factory=list)
    # Its tokens, where the target gives them.
    token_ids: list[int] = field(default_factory=list)
    # Its text, where the target gives no tokens.
    text: str = ""
    # How its tokens were counted, in words; ``None`` where that is beyond doubt.
    counted_by: str | None = None
    # When it ended; ``None`` if the end is when ``Target.send`` returns.
    ended: float | None = None
    # Tokens of the prompt as the target counts them; ``None`` where it does not say.
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None

    def add(self, num_tokens: int, at: float) -> None:
        """Notes that ``num_tokens`` tokens arrived."""
        self.token_times += [at] * num_tokens


class Target(Protocol):
    """Answers requests. All methods but ``facts`` are called in the event loop of a run."""

    def facts(self) -> dict[str, Any]:
        """Returns as JSON what it is and how it is set."""
        ...

    async def open(self, requests: Sequence[PlannedRequest]) -> None:
        """Prepares for a run of these requests. Raises ``FastgenError`` if they cannot be answered as they are
        meant."""
        ...

    def prepare(self, request: PlannedRequest) -> Any:
        """Returns what ``send`` needs. It is called before the request is due, so that sending takes little time."""
        ...

    async def send(self, prepared: Any, answer: Answer) -> None:
        """Sends a request and fills ``answer`` until it has ended. Raises ``FastgenError`` if it fails."""
        ...

    def ids_of(self, answer: Answer) -> list[int]:
        """Returns the tokens of ``answer``, as the next turn of a conversation has them in its prompt."""
        ...

    async def close(self) -> None:
        """Ends what belongs to this run, such as connections. The target may be opened again."""
        ...
