"""The order in which requests may be sent: alone, or one after another in a session."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.lab.workloads.request import PlannedRequest

# Requests that are sent one after another, each with its number in the workload: a session, or one request.
Unit = list[tuple[int, PlannedRequest]]


def units(requests: Sequence[PlannedRequest]) -> list[Unit]:
    """Returns the sessions and the requests without one, in the order in which each first appears."""
    found: list[Unit] = []
    sessions: dict[str, Unit] = {}
    for numbered in enumerate(requests):
        session = numbered[1].session
        if session in sessions:
            sessions[session].append(numbered)
            continue
        found.append([numbered])
        if session is not None:
            sessions[session] = found[-1]
    return found
