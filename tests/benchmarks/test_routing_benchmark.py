"""The comparison of routers: its loads are what it says, Ray's tree is asked as Ray asks it, the page is the result."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab import routing
from benchmarks.lab.ray_prefix import RayPrefix
from benchmarks.lab.routing_load import NUM_NEW, NUM_PROMPT, PREFIX, conversations, prefixes
from fastgen.runtime.routing import RoutedRequest, block_hashes

ROOT = Path(__file__).resolve().parents[2]
RAY = "pip install 'fastgen-llm[ray]'"


def test_conversations_grow_by_turns_and_may_share_their_beginning() -> None:
    requests = conversations(0.5, 2, 60.0, seed=1, num_shared=100)
    assert {each.num_new_tokens for each in requests} == {NUM_NEW}
    firsts = [each for each in requests if not each.continues]
    assert {len(each.prompt_ids) for each in firsts} == {100 + NUM_PROMPT}
    assert len({tuple(each.prompt_ids[:100]) for each in firsts}) == 1
    assert len(firsts) == pytest.approx(60, abs=25)
    assert max(Counter(each.session for each in requests).values()) == 4, "of 17 seconds, those within the 60"
    assert requests == conversations(0.5, 2, 60.0, seed=1, num_shared=100)


def test_prefixes_are_unevenly_frequent() -> None:
    requests = prefixes(4.0, 2, 100.0, seed=1)
    groups = Counter(tuple(each.prompt_ids[:PREFIX]) for each in requests)
    assert len(requests) == 800
    assert len(groups) == 16
    assert groups.most_common()[0][1] > 4 * groups.most_common()[-1][1]


def request(prompt: list[int]) -> RoutedRequest:
    return RoutedRequest(len(prompt), 10, block_hashes(prompt, 16))


def test_rays_tree_finds_the_replica_with_the_longest_match() -> None:
    pytest.importorskip("ray", reason=RAY)
    router = RayPrefix()
    long, short = request(list(range(320))), request(list(range(160)))
    router.rank(long, ["a", "b", "c"])
    router.sent(long, "b")
    assert router.rank(short, ["a", "b", "c"])[0] == "b"
    assert router.rank(request(list(range(5000, 5320))), ["a", "b", "c"])[0] in "ac", "the smallest trees"
    router.ended(long, "b")
    assert router.outstanding("b") == 0


def test_rays_rule_looks_at_queues_only_with_a_threshold() -> None:
    pytest.importorskip("ray", reason=RAY)
    prompt = list(range(320))
    for threshold, first in ((float("inf"), "b"), (5, "a")):
        router = RayPrefix(imbalanced_threshold=threshold)
        router.rank(request(prompt), ["a", "b"])
        for _ in range(6):
            router.sent(request(prompt), "b")
        assert router.rank(request(prompt), ["a", "b"])[0] == first


@pytest.mark.slow
def test_a_comparison_runs_at_small_size() -> None:
    pytest.importorskip("ray", reason=RAY)
    small = replace(
        routing.COMPARISONS["conversations"], rate=0.1, num_replicas=2, duration_s=40.0, warm_up_s=5.0, seeds=(1, 2)
    )
    found = routing.compare(small)
    assert list(found["routers"]) == list(small.routers)
    assert all(0 < run["goodput"] <= run["sent_per_s"] for runs in found["routers"].values() for run in runs)
    assert "| `prefix` |" in routing.tables({"conversations": found})


def test_the_page_has_the_tables_of_the_newest_result() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("lab_routing_*.json"))
    page, results = (ROOT / "docs" / "routing.md").read_text(), json.loads(newest.read_text())["results"]
    assert results.keys() <= routing.COMPARISONS.keys()
    assert routing.tables(results) in page, "paste what --tables prints"
    assert newest.name in page
