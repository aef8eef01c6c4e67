"""Routers: which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from fastgen.errors import InvalidArgumentError
from fastgen.lab.simulation.replica import Replica

# Chooses the replica of the next request.
Router = Callable[[Sequence[Replica]], Replica]


def round_robin() -> Router:
    """Returns a router that takes the replicas in turn."""
    turns = count()
    return lambda replicas: replicas[next(turns) % len(replicas)]


def least_tokens() -> Router:
    """Returns a router that takes the replica whose open requests have the fewest tokens, prompts and answers; of equal
    ones the first.
    """
    return lambda replicas: min(replicas, key=lambda replica: replica.num_outstanding)


ROUTERS: dict[str, Callable[[], Router]] = {"round_robin": round_robin, "least_tokens": least_tokens}


def make_router(name: str) -> Router:
    """Returns a new router of this kind.

    :raises InvalidArgumentError: for an unknown name.
    """
    if name not in ROUTERS:
        raise InvalidArgumentError(f"router={name!r} is not known; expected {' or '.join(map(repr, ROUTERS))}")
    return ROUTERS[name]()
