"""Random requests of every kind, cancelled and timed out at random, over a KV cache that is too small for comfort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.soak import SCENARIOS, run_scenario


def test_a_short_soak(tmp_path: Path) -> None:
    found = run_scenario("two groups", tmp_path, num_requests=160, pool_size=32, seed=1, talk=False)
    print(found)
    assert found["requests"] == 160
    for what in ("preemptions", "cancelled", "cached_tokens", "finished"):
        assert found[what] > 0, f"nothing here tested {what}"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_long_soak(scenario: str, tmp_path: Path) -> None:
    num_requests = -(-20_000 // len(SCENARIOS))
    found = run_scenario(scenario, tmp_path, num_requests=num_requests, pool_size=300, seed=2, talk=True)
    print(found)
    assert found["requests"] == num_requests
