"""The promise of every test here: when it ends, no engine holds a block or a slot, cancellations included."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from tests.runtime.held import assert_nothing_held

# Made by the running test or given a request, and perhaps let go since.
_used: set[Engine] = set()
_shared: weakref.WeakSet[Engine] = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def _engines_are_known() -> Iterator[None]:
    make, submit = Engine.__init__, Engine.submit

    def make_known(engine: Engine, *arguments: Any, **options: Any) -> None:
        make(engine, *arguments, **options)
        _used.add(engine)

    def submit_known(engine: Engine, *arguments: Any, **options: Any) -> Generation:
        _used.add(engine)
        return submit(engine, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", make_known)
        patch.setattr(Engine, "submit", submit_known)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_held(_engines_are_known: None) -> Iterator[None]:
    """Checks every engine that the test used, and that those of tests here before it stayed idle."""
    _used.clear()  # by tests of other folders, which need not end what they began
    yield
    used = list(_used)
    _shared.update(used)
    _used.clear()
    for engine in used:
        assert_nothing_held(engine)
    assert not any(engine.has_work for engine in _shared)
