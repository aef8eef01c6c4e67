"""Random requests of every kind, cancelled and timed out at random, over a KV cache that is too small for comfort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.soak import SCENARIOS, Scenario, run_scenario

# The scenario of the long soak in fp32 and in blocks of 4, for which other tests build the kernels.
TWO_GROUPS = Scenario("Gemma2", {"target": "cpp", "max_num_seqs": 16, "token_budget": 40, "block_size": 4})


def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENARIOS, "two groups", TWO_GROUPS)
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
    assert found["preemptions"] > 0
