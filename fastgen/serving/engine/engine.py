"""The interface between a service and its engine, which is one process or several replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import EngineFacts, Status
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.engine.supervisor import State

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReplicaView:
    """The state of a replica, as the page shows it."""

    id: str
    # The host name of its machine.
    host: str
    # ``silent``: it has sent nothing for some seconds.
    state: Literal["ready", "restarting", "silent"]
    # Sequences with a slot, and those that wait for one.
    num_running: int
    num_waiting: int
    # Tokens that the requests sent to it may still cost, as the router counts them.
    outstanding_tokens: int
    # How often its engine was restarted.
    num_restarts: int


class ServedEngine(Protocol):
    """The engine behind a service. All methods belong to one event loop."""

    @property
    def state(self) -> State:
        """Returns whether requests are accepted, or why not."""

    @property
    def facts(self) -> EngineFacts | None:
        """Returns the properties of the engine, once it is loaded."""

    @property
    def status(self) -> Status:
        """Returns the last reported load."""

    @property
    def num_restarts(self) -> int:
        """Returns how often an engine was restarted."""

    @property
    def num_open(self) -> int:
        """Returns the number of requests whose last message has not been taken."""

    def replica_views(self) -> list[ReplicaView]:
        """Returns the state of each replica; empty for a single engine."""

    async def start(self) -> EngineFacts:
        """Waits until the model is loaded. Raises ``FastgenError`` if that fails."""

    async def failed(self) -> str:
        """Waits until the engine is given up, since it cannot be restarted, and returns the reason."""

    def check_ready(self) -> None:
        """Raises ``UnavailableError`` if requests cannot be accepted now."""

    def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float,
        session: str | None = None,
    ) -> EngineRequest:
        """Sends a request that arrived at ``arrived_s`` of ``time.monotonic``. A refusal by the engine comes with the
        first news. Requests of one ``session`` are answered by one replica, as far as its load allows.
        """

    def cancel(self, request: EngineRequest) -> None:
        """Ends ``request``, whose result is no longer needed."""

    def finish(self, request: EngineRequest) -> None:
        """Forgets ``request`` after all its news were taken."""

    async def ask(self, what: str, kind: type[_T], *, replica: str | None = None) -> _T:
        """Returns the answer to ``what``, a key of ``engine.process.ANSWERS``, of one engine. Raises
        ``GenerationError`` if it cannot answer.
        """

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Returns the reason why such a request would be refused, or ``None``. Raises like :meth:`ask`."""

    async def count(self) -> None:
        """Passes the counters of each engine that answers to the watcher."""

    def place_of(self, number: int) -> tuple[str, int] | None:
        """Returns the replica that a request went to, and its number there. ``number`` is the one it had first. Returns
        ``None`` if the request is not remembered.
        """

    def fail_all(self, failure: Exception) -> None:
        """Ends all requests with ``failure``."""

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the engine, by force after ``timeout_s``. Its requests fail."""
