"""The least fixed point that says which parts of a format have a finite text."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

_Part = TypeVar("_Part", bound=Hashable)


def derivable(ways: Mapping[_Part, Iterable[Iterable[_Part]]]) -> set[_Part]:
    """Returns the parts that can be completed: those with a way that needs only parts that can be.

    ``ways`` has for each part the ways to complete it, and for each way the parts that it needs. These are the
    productive symbols of a context-free grammar. The time is linear in the size of ``ways`` (Dowling and Gallier,
    "Linear-time algorithms for testing the satisfiability of propositional Horn formulae", 1984).
    """
    found: set[_Part] = set()
    # Each way by the part that it completes and the number of parts that it still needs; each part's users.
    open_ways: list[tuple[_Part, int]] = []
    users: dict[_Part, list[int]] = {}
    pending: list[_Part] = []
    for part, its_ways in ways.items():
        for way in its_ways:
            needs = set(way)
            if not needs:
                pending.append(part)
            for need in needs:
                users.setdefault(need, []).append(len(open_ways))
            open_ways.append((part, len(needs)))
    while pending:
        part = pending.pop()
        if part in found:
            continue
        found.add(part)
        for number in users.get(part, ()):
            user, num_needed = open_ways[number]
            open_ways[number] = user, num_needed - 1
            if num_needed == 1:
                pending.append(user)
    return found
