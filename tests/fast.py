"""Which cases of a test the fast tests run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(of: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """Returns ``of`` as parameters of a test, those that are not ``fast`` for the slow tests alone. A tuple has a
    parameter for each name.
    """
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=[] if each in fast else pytest.mark.slow)
        for each in of
    ]
