"""Random requests of every kind, cancelled and timed out at random, over a KV cache that is too small for comfort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.soak import COURSES, run_course


def test_a_short_soak(tmp_path: Path) -> None:
    found = run_course("two groups", tmp_path, num_requests=160, pool_size=32, seed=1, talk=False)
    print(found)
    assert found["requests"] == 160
    for what in ("preemptions", "cancelled", "cached_tokens", "finished"):
        assert found[what] > 0, f"nothing here tested {what}"


@pytest.mark.slow
@pytest.mark.parametrize("course", COURSES)
def test_a_long_soak(course: str, tmp_path: Path) -> None:
    num_requests = -(-20_000 // len(COURSES))
    found = run_course(course, tmp_path, num_requests=num_requests, pool_size=300, seed=2, talk=True)
    print(found)
    assert found["requests"] == num_requests
