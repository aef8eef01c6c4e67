"""The promise of every test here: when it ends, no engine holds a block or a slot, cancellations included."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fastgen.runtime.engine import Engine
from tests.runtime.held import assert_nothing_held

# By the running test, which may have let them go.
_made: list[Engine] = []
_shared: weakref.WeakSet[Engine] = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def _engines_are_known() -> Iterator[None]:
    make = Engine.__init__

    def make_known(engine: Engine, *arguments: Any, **options: Any) -> None:
        make(engine, *arguments, **options)
        _made.append(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", make_known)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_held(_engines_are_known: None) -> Iterator[None]:
    yield
    _shared.update(_made)
    _made.clear()
    for engine in list(_shared):
        assert_nothing_held(engine)
