"""The workloads that are made, not read."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.workloads.arrivals import ARRIVALS, Constant, Gamma, Poisson, Ramp, make_arrivals, with_arrivals
from fastgen.lab.workloads.paper import Paper
from fastgen.lab.workloads.registry import WORKLOADS, described_workloads, make_workload
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.sessions import Conversations, longest_sequence

# The mean lengths of the paper's prompts and answers, and the length at which the scripts cut prompts.
SHAPES = [(prompt, answer, 2000 if prompt == 1900 else 4000) for prompt in (1200, 1900, 2600) for answer in (60, 128)]
MADE = [name for name in WORKLOADS if name != "trace"]


def requests(spec: str, *, seed: int = 0, vocab_size: int = 1000) -> list[PlannedRequest]:
    return make_workload(spec).requests(vocab_size=vocab_size, seed=seed)


@pytest.mark.parametrize("name", MADE)
def test_requests_follow_from_the_seed_and_are_valid(name: str) -> None:
    found = requests(name, seed=3, vocab_size=50)
    assert found == requests(name, seed=3, vocab_size=50)
    assert found != requests(name, seed=4, vocab_size=50)
    for request in found:
        assert len(request.prompt_ids) >= 1
        assert request.num_new_tokens >= 1
        assert 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < 50


@pytest.mark.parametrize("name", MADE)
def test_facts_are_json_and_make_the_same_workload_again(name: str) -> None:
    facts = json.loads(json.dumps(make_workload(name).facts()))
    again = ",".join(f"{key}={value}" for key, value in facts.items() if key != "name" and value is not None)
    assert make_workload(f"{facts['name']}:{again}").facts() == facts


def scripts_lengths(mean: int, answer: int, count: int) -> tuple[list[int], list[int]]:
    """Returns the lengths that the paper's published scripts draw, written as they draw them."""
    normal = np.random.RandomState(42).normal
    prompts = [min(int(normal(mean, 0.3 * mean)), 4000) for _ in range(count)]
    return prompts, [int(normal(answer, 0.3 * answer)) for _ in range(count)]


@pytest.mark.parametrize(("prompt", "answer"), [(2600, 60), (1200, 128)])
def test_the_papers_lengths_are_those_of_its_scripts_whatever_the_seed(prompt: int, answer: int) -> None:
    prompts, answers = scripts_lengths(prompt, answer, 512)
    for seed in (0, 9):
        found = requests(f"paper:prompt={prompt},answer={answer}", seed=seed)
        assert [len(request.prompt_ids) for request in found] == prompts
        assert [request.num_new_tokens for request in found] == answers


def test_the_papers_prompts_are_windows_of_one_text_shifted_by_one() -> None:
    found = requests("paper:n=20")
    for before, after in pairwise(found):
        shared = min(len(before.prompt_ids) - 1, len(after.prompt_ids))
        assert before.prompt_ids[1 : 1 + shared] == after.prompt_ids[:shared]


def test_no_shape_of_the_paper_draws_a_length_below_1_among_1024_requests() -> None:
    for prompt, answer, max_prompt in SHAPES:
        workload = Paper(
            mean_prompt_tokens=prompt, mean_new_tokens=answer, max_prompt_tokens=max_prompt, num_requests=1024
        )
        found = workload.requests(vocab_size=10, seed=0)
        assert max(len(request.prompt_ids) for request in found) <= max_prompt


def test_an_exact_length_below_1_is_an_error_and_a_clamped_one_is_1() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"request \d+ has a (prompt|answer) of -?\d+ tokens.*lengths=clamped"
    ):
        requests("paper:prompt=3,answer=3,deviation=1")
    found = requests("paper:prompt=3,answer=3,deviation=1,lengths=clamped")
    assert min(len(request.prompt_ids) for request in found) == min(request.num_new_tokens for request in found) == 1


def test_clamped_lengths_follow_the_seed_and_the_distribution() -> None:
    found = requests("paper:n=4000,lengths=clamped", seed=5)
    lengths = [request.num_new_tokens for request in found]
    assert statistics.fmean(lengths) == pytest.approx(60, rel=0.02)
    assert statistics.stdev(lengths) == pytest.approx(18, rel=0.05)
    assert lengths != [request.num_new_tokens for request in requests("paper:n=4000,lengths=clamped", seed=6)]


def test_the_papers_prompts_may_come_from_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(" ".join("abcde"[: 1 + number % 5] for number in range(5000)))
    workload = make_workload(f"paper:prompt=100,n=4,text={path}", encode=lambda text: [len(w) for w in text.split()])
    found = workload.requests(vocab_size=10, seed=0)
    assert list(found[1].prompt_ids[:5]) == [2, 3, 4, 5, 1]
    path.write_text("a b c")
    with pytest.raises(InvalidArgumentError, match=r"the text has 3 tokens; this workload needs \d+"):
        workload.requests(vocab_size=10, seed=0)
    with pytest.raises(InvalidArgumentError, match="the text cannot be read"):
        make_workload("paper:text=/nowhere", encode=list).requests(vocab_size=10, seed=0)


@pytest.mark.parametrize(("name", "prompt", "answer"), [("aws-32-128", 32, 128), ("aws-256-32", 256, 32)])
def test_awss_scenarios(name: str, prompt: int, answer: int) -> None:
    assert {(len(one.prompt_ids), one.num_new_tokens) for one in requests(name)} == {(prompt, answer)}


def test_random_lengths_lie_within_their_range() -> None:
    found = requests("random:prompt=100,answer=10,range_ratio=0.2,n=2000")
    assert {len(request.prompt_ids) for request in found} == set(range(80, 121))
    assert {request.num_new_tokens for request in found} == set(range(8, 13))


def test_groups_share_their_prefix_and_nothing_else() -> None:
    found = requests("prefixes:groups=3,prefix=40,prompt=20,n=30", vocab_size=10**6)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for request in found:
        groups.setdefault(tuple(request.prompt_ids[:40]), []).append(tuple(request.prompt_ids[40:]))
    assert sorted(len(group) for group in groups.values()) == [10, 10, 10]
    assert len({rest for group in groups.values() for rest in group}) == 30
    assert len({tuple(request.prompt_ids[:40]) for request in found[:3]}) < 3, "groups do not take turns"


def test_long_prompts_intrude_on_streams_at_even_times() -> None:
    found = requests("intruders:streams=2,long=3,every_s=1.5")
    assert [request.due_s for request in found] == [0, 0, 1.5, 3.0, 4.5]
    assert [len(request.prompt_ids) for request in found] == [64, 64, 2048, 2048, 2048]


def test_turns_of_chats_may_have_lengths_of_a_range() -> None:
    found = requests("chats:n=100,turns=10,prompt=100,answer=10,range_ratio=0.2")
    assert {len(request.prompt_ids) for request in found} == set(range(80, 121))
    assert {request.num_new_tokens for request in found} == set(range(8, 13))
    assert [request.continues for request in found[:11]] == [False, *[True] * 9, False]


def test_chats_continue_with_the_answers_that_came() -> None:
    found = requests("chats:n=2,turns=3,prompt=4,answer=5")
    assert [(request.session, request.continues) for request in found[:4]] == [
        ("chat 0", False),
        ("chat 0", True),
        ("chat 0", True),
        ("chat 1", False),
    ]
    conversations = Conversations()
    said: list[int] = []
    for number, request in enumerate(found[:3]):
        prompt = conversations.prompt(request)
        assert prompt == said + list(request.prompt_ids)
        assert conversations.message_ends(request) == (4, 9, 13, 18)[: 2 * number]
        answer = [1000 + number] * 5
        conversations.answered(request, prompt, answer)
        said = prompt + answer
    assert conversations.prompt(found[3]) == list(found[3].prompt_ids), "another session begins empty"
    assert conversations.message_ends(found[3]) == ()
    assert longest_sequence(found) == 3 * (4 + 5)


def test_the_default_chats_are_those_of_the_memory_arithmetic() -> None:
    found = requests("chats")
    assert len(found) == 12 * 10
    assert longest_sequence(found) == 10 * (150 + 350)


def test_a_conversation_continues_after_a_failure_with_what_came() -> None:
    first, second = requests("chats:n=1,turns=2,prompt=2,answer=5")
    conversations = Conversations()
    conversations.answered(first, conversations.prompt(first), [7])
    assert conversations.prompt(second) == [*first.prompt_ids, 7, *second.prompt_ids]


@pytest.mark.parametrize("spec", ["poisson:4", "constant:4", "gamma:rate=4,burstiness=0.5", "ramp:start=2,end=8"])
def test_arrivals_come_in_order_at_their_rate(spec: str) -> None:
    arrivals = make_arrivals(spec)
    times = arrivals.times_s(4000, 1)
    assert times == sorted(times)
    assert times == arrivals.times_s(4000, 1)
    expected = 4000 / 4 if "ramp" not in spec else 4000 / 6 * math.log(4)
    assert times[-1] == pytest.approx(expected, rel=0.1)


def variation(times: list[float]) -> float:
    """Returns the squared coefficient of variation of the times between."""
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.variance(gaps) / statistics.fmean(gaps) ** 2


def test_burstiness_is_the_shape_of_the_gamma_distribution() -> None:
    assert variation(Poisson(3).times_s(20000, 0)) == pytest.approx(1, rel=0.05)
    assert variation(Gamma(3, 0.25).times_s(20000, 0)) == pytest.approx(4, rel=0.1)
    assert variation(Gamma(3, 4).times_s(20000, 0)) == pytest.approx(0.25, rel=0.05)
    assert Constant(4).times_s(3, 0) == [0, 0.25, 0.5]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_a_ramp_changes_its_rate_from_the_first_request_to_the_last(shape: str, middle: float) -> None:
    ramp = Ramp(1, 10, shape, burstiness=1e9)
    gaps = np.diff([0.0, *ramp.times_s(101, 0)])
    assert 1 / gaps[0] == pytest.approx(1, rel=1e-3)
    assert 1 / gaps[50] == pytest.approx(middle, rel=1e-3)
    assert 1 / gaps[-1] == pytest.approx(10, rel=1e-3)


def test_arrivals_are_of_sessions() -> None:
    found = with_arrivals(requests("chats:n=2,turns=2"), Constant(2), seed=0)
    assert [request.due_s for request in found] == [0, None, 0.5, None]
    alone = with_arrivals(requests("fixed:n=3"), Constant(2), seed=0)
    assert [request.due_s for request in alone] == [0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("papre", r"'papre' is not known; did you mean 'paper'\? There are: paper, aws-32-128"),
        ("", "'' is not known; There are: paper"),
        ("paper:promt=3", r"paper has no 'promt'; did you mean 'prompt'\? There are: prompt, answer, n"),
        ("paper:n", "'n': expected PARAMETER=VALUE"),
        ("paper:n=many", "n='many': expected an integer"),
        ("paper:n=0", "n=0: expected an integer of at least 1"),
        ("paper:n=1,n=2", "n is given twice"),
        ("paper:lengths=about", "lengths='about': expected exact or clamped"),
        ("paper:text=a", "a text needs a tokenizer"),
        ("random:range_ratio=1", "expected a number of at least 0 and below 1"),
        ("trace", "trace needs file"),
    ],
)
def test_a_wrong_workload_says_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_workload(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poison:3", "did you mean 'poisson'"),
        ("poisson", "poisson needs rate"),
        ("poisson:rate=-1", "expected a number above 0"),
        ("ramp:start=1,end=2,shape=wave", "expected linear or exponential"),
    ],
)
def test_a_wrong_arrival_process_says_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_arrivals(spec)


def test_the_help_describes_every_workload_and_parameter() -> None:
    text = described_workloads()
    assert all(f"\n{name}: " in f"\n{text}" for name in WORKLOADS)
    assert "    max_prompt: Most tokens of a prompt. Default: 4000." in text
    assert "poisson" in ARRIVALS
