"""The promise of every engine that has no more work."""

from __future__ import annotations

from fastgen.runtime.engine import Engine


def assert_nothing_held(engine: Engine | None) -> None:
    """Asserts that no sequence holds a block or a slot."""
    assert engine is not None
    engine.check_integrity()
    assert not engine.has_work
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.capacity
