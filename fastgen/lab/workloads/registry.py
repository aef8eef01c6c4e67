"""The workloads by name, as commands take them: ``paper:prompt=2600,answer=60,n=512`` or ``trace:FILE,n=100``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastgen.lab.workloads.named import described, make
from fastgen.lab.workloads.paper import Paper
from fastgen.lab.workloads.request import Workload
from fastgen.lab.workloads.synthetic import (
    AWSLongPrompts,
    AWSShortPrompts,
    Chats,
    FixedLengths,
    Intruders,
    RandomLengths,
    SharedPrefixes,
)
from fastgen.lab.workloads.traces.trace import Trace

_KINDS = (Paper, AWSShortPrompts, AWSLongPrompts, FixedLengths, RandomLengths, Chats, SharedPrefixes, Intruders, Trace)
WORKLOADS: dict[str, type] = {kind.name: kind for kind in _KINDS}


def make_workload(text: str, *, encode: Callable[[str], Sequence[int]] | None = None) -> Workload:
    """Returns the workload that ``text`` names: ``NAME`` or ``NAME:PARAMETER=VALUE,…``.

    ``encode`` returns the tokens of a text; workloads made of texts need it.

    :raises InvalidArgumentError: for an unknown name or parameter (the message lists those that exist), a value out of
        range, or a text without ``encode``.
    """
    workload: Workload = make(text, WORKLOADS, what="workload", first="file", encode=encode)
    return workload


def described_workloads() -> str:
    """Returns all workloads with their parameters, for ``--help``."""
    return described(WORKLOADS)
