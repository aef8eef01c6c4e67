"""The interface of routers, the request that they see, and the counts of outstanding tokens that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """A request as a router sees it. Requests with equal fields are still different requests."""

    num_prompt_tokens: int
    # Most tokens of the answer, all of its sequences together.
    num_new_tokens: int
    # Hashes of the prompt's full blocks (:func:`~fastgen.runtime.routing.block_hashes.block_hashes`).
    block_hashes: tuple[int, ...] = ()
    # Requests with the same name belong together, such as the turns of a conversation.
    session: str | None = None


class Router(Protocol):
    """Chooses among replicas, which are named by their ids. Its methods may be called from any thread."""

    def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        """Returns all of ``replicas``, the best one for ``request`` first. Changes no count."""
        ...

    def sent(self, request: RoutedRequest, replica: str) -> None:
        """Notes that ``request`` was sent to ``replica``: its tokens count there until it has ended."""
        ...

    def ended(self, request: RoutedRequest, replica: str) -> None:
        """Notes that ``request`` is answered, failed or cancelled at ``replica``. Does nothing if it is not counted
        there, such as after :meth:`forget`.
        """
        ...

    def forget(self, replica: str) -> None:
        """Drops everything noted about ``replica``, which is gone or has restarted with an empty KV cache."""
        ...

    def outstanding(self, replica: str) -> int:
        """Returns the tokens of the requests that were sent to ``replica`` and have not ended."""
        ...


@dataclass(slots=True)
class ReplicaLoad:
    """The open requests of a replica."""

    # Tokens of each open request, and their sum.
    tokens: dict[RoutedRequest, int] = field(default_factory=dict)
    outstanding: int = 0
    # Number of the last request that was sent to it; requests to all replicas are numbered in one order.
    last_sent: int = 0


class CountingRouter(ABC):
    """A :class:`Router` that counts the outstanding tokens of each replica. A subclass ranks the replicas.

    Methods that begin with an underscore are called while the lock is held.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._loads: dict[str, ReplicaLoad] = {}
        self._num_sent = 0

    def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        with self._lock:
            return self._rank(request, replicas)

    def sent(self, request: RoutedRequest, replica: str) -> None:
        with self._lock:
            load = self._loads.setdefault(replica, ReplicaLoad())
            self._num_sent += 1
            load.last_sent = self._num_sent
            tokens = self._num_tokens(request, replica)
            load.outstanding += tokens - load.tokens.get(request, 0)
            load.tokens[request] = tokens
            self._learn(request, replica)

    def ended(self, request: RoutedRequest, replica: str) -> None:
        with self._lock:
            load = self._loads.get(replica)
            if load is not None:
                load.outstanding -= load.tokens.pop(request, 0)

    def forget(self, replica: str) -> None:
        with self._lock:
            self._loads.pop(replica, None)
            self._forget(replica)

    def outstanding(self, replica: str) -> int:
        with self._lock:
            return self._outstanding(replica)

    @abstractmethod
    def _rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        """Returns what :meth:`rank` returns."""

    def _num_tokens(self, request: RoutedRequest, replica: str) -> int:
        """Returns the outstanding tokens that ``request`` adds to ``replica``."""
        return request.num_prompt_tokens + request.num_new_tokens

    def _learn(self, request: RoutedRequest, replica: str) -> None:  # noqa: B027 (few routers learn)
        """Notes what ``replica`` will hold when it has computed ``request``."""

    def _forget(self, replica: str) -> None:  # noqa: B027 (as above)
        """Drops what :meth:`_learn` noted of ``replica``."""

    def _outstanding(self, replica: str) -> int:
        load = self._loads.get(replica)
        return 0 if load is None else load.outstanding

    def _busyness(self, replica: str) -> float:
        """Returns the outstanding tokens plus a fraction below 1. The fraction breaks ties: it is lowest for the
        replica that has been sent no request for the longest time.
        """
        load = self._loads.get(replica)
        return 0.0 if load is None else load.outstanding + load.last_sent / (self._num_sent + 1)
