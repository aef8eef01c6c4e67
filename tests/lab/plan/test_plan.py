"""Plans: the arrangement that answers a question, and what is said where none does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fastgen.errors import OutOfMemoryError
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.plan.capacity import Shape
from fastgen.lab.plan.plan import make_plan
from fastgen.lab.plan.text import as_json, as_text
from tests.lab.plan.questions import question


def test_the_chosen_arrangement_keeps_the_slo_in_the_simulation() -> None:
    slo = SLO(ttft_ms=2000, tpot_ms=80)
    asked = question("llama-2-13b", "A100-80", num_devices=2, prompt=1200, answer=60, slo=slo)
    said: list[str] = []
    plan = make_plan(asked, progress=said.append)
    assert plan.chosen is not None
    run = plan.chosen.simulated
    assert run is not None
    good = sum(slo.is_good(record) for record in run.run.records)
    assert good >= 0.99 * len(run.run.records)
    assert plan.chosen.requests_per_s == pytest.approx(good / run.run.header.duration_s)
    assert said == ["tensor_parallel=1, token_budget=512", "tensor_parallel=2, token_budget=512"]
    # It carries at least as much as the other.
    assert plan.chosen.copies * plan.chosen.requests_per_s == max(
        offer.copies * offer.requests_per_s for offer in plan.offers
    )


def test_a_rate_is_carried_by_the_fewest_devices() -> None:
    asked = question("llama-2-13b", "A100-80", num_devices=8, prompt=1200, answer=60, rate=10.0)
    plan = make_plan(asked, simulates=False)
    assert plan.chosen is not None
    assert plan.chosen.copies * plan.chosen.requests_per_s >= 10.0
    assert (plan.chosen.copies - 1) * plan.chosen.requests_per_s < 10.0
    assert plan.chosen.num_devices == min(offer.num_devices for offer in plan.offers if offer.copies)
    assert f"10 requests/s were asked for: {plan.chosen.num_devices} devices" in as_text(plan)


def test_a_rate_that_takes_more_devices_says_how_many() -> None:
    asked = question("llama-2-13b", "A100-80", num_devices=2, prompt=1200, answer=60, rate=100.0)
    plan = make_plan(asked, simulates=False)
    assert plan.chosen is None
    assert "tensor_parallel=1: 100 requests/s take 19 copies, 19 devices, and there are 2" in as_text(plan)


def test_an_slo_that_nothing_meets_says_by_how_much_and_why() -> None:
    slo = SLO(ttft_ms=40, tpot_ms=2)
    asked = question("llama-2-13b", "A100-80", num_devices=4, prompt=2600, answer=60, slo=slo)
    plan = make_plan(asked)
    assert plan.chosen is None
    first, later = plan.misses
    assert (first.name, later.name) == ("ttft_ms", "tpot_ms")
    # 2600 tokens of 26 GFLOP over 4 devices at 70 % of 312 TFLOPS take 75 ms at least.
    assert 75 < first.value < 150
    assert first.times == pytest.approx(first.value / 40)
    assert "matrix products" in first.limited_by
    # 26 GB over 4 devices at 86 % of 2039 GB/s take 3.7 ms.
    assert 3.7 < later.value < 7
    assert "reading the weights" in later.limited_by
    text = as_text(plan)
    assert "no arrangement keeps ttft_ms=40, tpot_ms=2:" in text
    assert "tpot_ms is at best" in text
    assert "tensor_parallel=4 and 1 client" in text


def test_an_slo_of_the_paper_that_nothing_meets() -> None:
    asked = question("llama-2-13b", "A10G", num_devices=2, prompt=100, answer=60, slo=SLO(paper_tokens_per_s=500))
    (miss,) = make_plan(asked).misses
    assert miss.name == "paper_tokens_per_s"
    assert miss.value == pytest.approx(500 / miss.times)


def test_the_first_token_of_the_papers_rule_is_a_limit_of_its_own() -> None:
    """Whatever the rate; with answers of one token there is no other."""
    asked = question("llama-2-13b", "A10G", num_devices=2, prompt=10, answer=1, slo=SLO(paper_tokens_per_s=2))
    plan = make_plan(asked)
    (miss,) = plan.misses
    assert (miss.name, miss.limit) == ("paper_first_token_ms", pytest.approx(1e3 * 10 / 512))
    assert miss.value == pytest.approx(miss.times * miss.limit)
    assert miss.times > 1
    json.dumps(as_json(plan), allow_nan=False)
    first, later = make_plan(replace(asked, shape=Shape(10, 60), slo=SLO(paper_tokens_per_s=500))).misses
    assert (first.name, later.name) == ("paper_first_token_ms", "paper_tokens_per_s")
    assert first.value == pytest.approx(miss.value)


def test_a_model_that_fits_nowhere_says_where_it_would() -> None:
    asked = question("llama-2-70b", "A100-80", num_devices=1, prompt=100, answer=60)
    with pytest.raises(OutOfMemoryError, match=r"llama-2-70b does not fit on 1 A100-80, but on 2: .*127\.50 GiB"):
        make_plan(asked)


def test_the_price_of_tokens() -> None:
    asked = question("llama-2-13b", "A100-80", prompt=1200, answer=60, price=3.6)
    plan = make_plan(asked, simulates=False)
    assert plan.chosen is not None
    # 0.1 cent a second.
    assert plan.dollars_per_million == pytest.approx(0.001 / (plan.chosen.requests_per_s * 60) * 1e6)
    assert "at 3.6 dollars an hour and device:" in as_text(plan)


def test_the_text_shows_the_arithmetic() -> None:
    """The post's figure: 1008 GB/s over 14 GB are 72 tokens/s."""
    asked = question("mistral-7b-v0.2", "RTX-4090", prompt=300, answer=300)
    text = as_text(make_plan(asked, simulates=False))
    for line in (
        "one answer: 1,008 GB/s over 14.2 GB = 71 tokens/s; 86% of the bandwidth is reached",
        "a token: 2 x 8 KV heads x 128 x 32 layers x 2 bytes = 0.125 MiB",
        "a block: 64 tokens x 0.125 MiB = 8 MiB",
        "a request: 300 + 300 = 600 tokens = 10 blocks",
        "means in closed form",
    ):
        assert line in text, line
    assert max(map(len, text.splitlines())) < 200


def test_long_contexts_read_at_most_the_window() -> None:
    shape = {"prompt": 12_000, "answer": 400}
    windowed, full = (
        make_plan(question(name, "A100-80", **shape, clients=8, token_budget=512), simulates=True)
        for name in ("mistral-7b-v0.1", "mistral-7b-v0.2")
    )
    text, other = as_text(windowed), as_text(full)
    assert "4,096 positions in 32 of 32 layers; so of 12,200 tokens on average 4,096 are read" in text
    assert "sliding window" not in other
    # 4,096 tokens of 128 KiB at 86 % of 2039 GB/s, in place of 12,200.
    assert " + 0.306 ms KV cache + " in text
    assert " + 0.912 ms KV cache + " in other
    first, second = (plan.chosen.simulated for plan in (windowed, full) if plan.chosen)
    assert first is not None
    assert second is not None
    for name in ("mean_tpot_ms", "mean_ttft_ms"):
        assert (first.summary[name].value or 0) < 0.9 * (second.summary[name].value or 0)


def test_the_json_has_everything() -> None:
    slo = SLO(tpot_ms=100)
    asked = question("llama-2-13b", "A100-80", prompt=1200, answer=60, slo=slo)
    plan = make_plan(asked)
    found = json.loads(json.dumps(as_json(plan)))
    chosen = found["chosen"]
    assert found["slo"] == {"tpot_ms": 100}
    assert chosen == found["offers"][0]
    assert chosen["memory"]["ledger"]["total_bytes"] == sum(
        row["size_bytes"] for row in chosen["memory"]["ledger"]["rows"]
    )
    assert chosen["memory"]["blocks"] // chosen["memory"]["blocks_of_request"] >= chosen["memory"]["concurrent"]
    assert chosen["simulated"]["good"] >= 0.99
    assert chosen["simulated"]["mean_tpot_ms"] <= 100
    assert chosen["arithmetic"][0].startswith("before a request")
    assert found["front"][0]["tokens_per_s_per_user"] == max(point["tokens_per_s_per_user"] for point in found["front"])
    assert (found["misses"], found["does_not_fit"]) == ([], [])
