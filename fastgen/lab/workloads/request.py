"""The requests of a workload, before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request that a run will send.

    Requests of one ``session`` are sent one after another, in their order in the workload: each ``think_s`` seconds
    after the answer before it has ended, and not before its own ``due_s``.
    """

    # Where ``continues`` is set, only what the prompt adds to the conversation.
    prompt_ids: Sequence[int]
    # Tokens of the answer. It has exactly as many: the end of the text is ignored.
    num_new_tokens: int
    # When to send it, in seconds after the run begins; ``None`` if that is up to the load (closed loops).
    due_s: float | None = None
    # Requests with the same name share one conversation; ``None`` stands alone.
    session: str | None = None
    think_s: float = 0.0
    # Whether the prompt begins with the session's prompt before it and the answer to that one, which is not known
    # beforehand. :class:`~fastgen.lab.workloads.sessions.Conversations` puts the prompt together.
    continues: bool = False
    # Where in the whole prompt each message before the last one ends: a prompt, its answer, the next prompt, and so on.
    # It is set when the prompt is put together.
    message_ends: tuple[int, ...] = ()


class Workload(Protocol):
    """Makes the requests of a run."""

    @property
    def name(self) -> str:
        """Returns the name by which commands and results call it."""
        ...

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        """Returns the requests in the order in which they are sent. The same arguments give the same requests; token
        ids are below ``vocab_size``.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Returns all its parameters as JSON, so that a result says what was asked."""
        ...
