"""The simulated device: time passes as the cost model says, and a long prompt shows what policies do to others."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import DynamicBatching, Policy, choose_policy
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork
from tests.fast import cases

# Of a GPU's order: 10 ms for a small step, 90 ms for one of 2048 tokens.
COEFFICIENTS = {"step_s": 0.008, "token_s": 4e-5, "context_s": 5e-8, "pair_s": 1e-9}
COST = StepCost.linear(**COEFFICIENTS)


def server(policy: Policy | None = None, *, noise: float = 0.0, prefix_caching: bool = False) -> SimulatedServer:
    cost = StepCost.linear(**COEFFICIENTS, noise=noise)
    sizes = {"token_budget": 2048, "max_num_seqs": 32, "num_blocks": 8000}
    return SimulatedServer(cost, **sizes, policy=policy, prefix_caching=prefix_caching)


def test_time_passes_as_the_cost_model_says() -> None:
    device = server()
    prompts = [Arrival(0.0, [1] * 100, SamplingParams(max_new_tokens=3)), Arrival(0.01, [1] * 5, SamplingParams())]
    first, second = device.serve(prompts)
    metrics = first.output().metrics
    first_step_s = COST.seconds(StepWork(100, 100, 5050))
    second_step_s = COST.seconds(StepWork(1 + 5, 101 + 5, 15))
    assert metrics.ttft_s == pytest.approx(first_step_s)
    assert metrics.gaps_s[0] == pytest.approx(second_step_s)
    assert second.output().metrics.queue_s == pytest.approx(first_step_s - 0.01), "a step is not interrupted"
    assert len(second.output().token_ids) == 128


SMALL: dict[str, Any] = {"token_budget": 64, "max_num_seqs": 4, "num_blocks": 50}


@pytest.mark.parametrize(
    ("host_s", "runs_ahead", "gap_s"), [(0.004, False, 0.014), (0.004, True, 0.010), (0.016, True, 0.016)]
)
def test_the_part_of_the_host_passes_meanwhile_where_it_runs_ahead(
    host_s: float, runs_ahead: bool, gap_s: float
) -> None:
    device = SimulatedServer(StepCost(tokens=((1, 0.010),), host_s=host_s), **SMALL, runs_ahead=runs_ahead)
    (answered,) = device.serve([Arrival(0.0, [1, 2], SamplingParams(max_new_tokens=12))])
    assert answered.output().metrics.gaps_s[2:-2] == pytest.approx([gap_s] * 7)


def test_a_batch_that_is_not_the_last_one_a_token_further_takes_the_time_to_build_it() -> None:
    device = SimulatedServer(StepCost(tokens=((1, 0.010),), built_s=0.005), **SMALL)
    times_s, lengths = (0.0, 0.035, 0.100), (11, 3, 1)
    first, second, _ = device.serve(
        Arrival(at_s, [1, 2], SamplingParams(max_new_tokens=length))
        for at_s, length in zip(times_s, lengths, strict=True)
    )
    alone_s = [0.015, 0.010]
    # Beside the second one there are its prompt and two tokens; beside the third only the prompt.
    expected_s = [*alone_s, 0.015, 0.015, 0.010, *alone_s, 0.015, *alone_s]
    assert first.output().metrics.gaps_s == pytest.approx(expected_s)
    assert second.output().metrics.gaps_s == pytest.approx([0.015, 0.010])


def test_host_and_device_take_longer_by_the_same_factor() -> None:
    device = SimulatedServer(StepCost(tokens=((1, 1.0),), host_s=0.5, scatter=(2.0,)), **SMALL)
    (answered,) = device.serve([Arrival(0.0, [1, 2], SamplingParams(max_new_tokens=4))])
    assert answered.output().metrics.gaps_s == [3.0] * 3


@pytest.mark.parametrize("makes_tokens", [False, True])
def test_layers_with_a_window_read_no_more_than_it(makes_tokens: bool) -> None:
    """The prompt reads its 20 positions; a token reads the last 8."""
    cost = StepCost(tokens=((1, 0.0),), context_s=0.5, pair_s=0.25, sights=(Sight(8, 1.0, 1.0),))
    device = SimulatedServer(cost, **SMALL, makes_tokens=makes_tokens)
    (answered,) = device.serve([Arrival(0.0, [1] * 20, SamplingParams(max_new_tokens=3))])
    first_s = 10.0 + 0.25 * (36 + 12 * 8)
    assert answered.completions[0].token_times_s == [first_s, first_s + 4.0, first_s + 8.0]


@pytest.mark.parametrize(("windows", "expected"), [((None,), 49 * 16), ((None, 8), 24 * 16)])
def test_a_sequence_is_by_default_as_long_as_the_cache_allows(windows: tuple[int | None, ...], expected: int) -> None:
    device = SimulatedServer(COST, **SMALL, windows=windows)
    assert device.max_model_len == device.engine.max_model_len == expected
    assert SimulatedServer(COST, **SMALL, max_model_len=33).max_model_len == 33


def test_time_passes_while_a_batch_is_awaited() -> None:
    """A batch of two begins when the second comes, or half a second after the first."""
    device = SimulatedServer(StepCost(tokens=((1, 1.0),)), **SMALL, policy=DynamicBatching(2, 0.5))
    one = SamplingParams(max_new_tokens=1)
    answered = device.serve([Arrival(at_s, [1, 2], one) for at_s in (0.0, 10.0, 10.25, 20.0)])
    assert [each.completions[0].token_times_s for each in answered] == [[1.5], [11.25], [11.25], [21.5]]
    assert device.clock.now_s == 21.5


@pytest.mark.parametrize(("sizes", "num_padding"), [(captured_sizes(64), 3), ((), 0)])
def test_tokens_that_pad_a_step_are_counted_where_steps_are_padded(sizes: tuple[int, ...], num_padding: int) -> None:
    device = SimulatedServer(StepCost(tokens=((1, 0.010),), sizes=sizes), **SMALL)
    device.serve([Arrival(0.0, [1] * 5, SamplingParams(max_new_tokens=1))])
    assert device.engine.metrics.snapshot().padding_tokens_total == num_padding


def test_a_counted_answer_that_is_cancelled_has_the_times_of_its_tokens() -> None:
    device = SimulatedServer(COST, token_budget=64, max_num_seqs=8, num_blocks=50, makes_tokens=False)
    first, second = [device.engine.submit([1, 2, 3], SamplingParams(max_new_tokens=20)) for _ in range(2)]
    for _ in range(5):
        device.engine.step()
    device.engine.cancel(first)
    device.run()
    times_s = second.completions[0].token_times_s
    assert (len(times_s), second.completions[0].finish_reason) == (20, "length")
    assert first.completions[0].token_times_s == times_s[:5]


@pytest.mark.parametrize("seed", range(4))
def test_counted_answers_have_the_times_of_those_with_tokens(seed: int) -> None:
    """Also where sequences are preempted and requests are cancelled."""
    lived = []
    for makes_tokens in (True, False):
        draw, generations = random.Random(seed), list[Generation]()
        device = SimulatedServer(COST, token_budget=16, max_num_seqs=4, num_blocks=14, makes_tokens=makes_tokens)
        for _ in range(120):
            if draw.random() < 0.2:
                sampling = SamplingParams(max_new_tokens=draw.randint(1, 40), ignore_eos=True)
                generations.append(device.engine.submit([1] * draw.randint(1, 60), sampling))
            cancelled = draw.choice(generations) if generations and draw.random() < 0.05 else None
            if cancelled is not None and not cancelled.finished:
                device.engine.cancel(cancelled)
            device.engine.step()
        device.run()
        ended = [generation.completions[0] for generation in generations]
        lived.append([(each.finish_reason, each.token_times_s, each.sequence.num_preemptions) for each in ended])
    assert lived[0] == lived[1]
    assert {reason for reason, _, _ in lived[0]} == {"length", "cancelled"}
    assert any(num_preemptions for _, _, num_preemptions in lived[0])


def test_noise_follows_the_seed() -> None:
    arrivals = [Arrival(0.0, [1] * 10, SamplingParams(max_new_tokens=50))]
    gaps = [server(noise=noise).serve(arrivals)[0].output().metrics.gaps_s for noise in (0.1, 0.1, 0.0)]
    assert gaps[0] == gaps[1] != gaps[2]
    assert np.std(np.log(gaps[0])) == pytest.approx(0.1, rel=0.3)


STREAMS = [Arrival(0.0, [stream] * 50, SamplingParams(max_new_tokens=6_000)) for stream in range(16)]
# Comes when the streams have run for a while.
LONG = Arrival(2.0, [3] * 60_000, SamplingParams(max_new_tokens=1))


def gaps_beside_a_long_prompt(policy: Policy, noise: float) -> tuple[list[float], float]:
    """Every gap of 16 streams that lies at least partly in the time in which a prompt of 60,000 tokens is
    computed, and how long that time is.
    """
    device = server(policy, noise=noise)
    generations = device.serve([*STREAMS, LONG])
    *streams, long = generations
    begin_s, end_s = LONG.at_s, long.completions[0].token_times_s[0]
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(
            stream.completions[0].token_times_s, stream.completions[0].token_times_s[1:], strict=False
        )
        if later > begin_s and earlier < end_s
    ]
    assert min(stream.completions[0].token_times_s[-1] for stream in streams) > end_s, "they run all the time"
    return gaps, end_s - begin_s


@pytest.mark.parametrize(
    ("itl_target_ms", "noise"), cases([(25, 0.0), (25, 0.05), (50, 0.0), (50, 0.05)], fast=[(25, 0.0), (50, 0.05)])
)
def test_a_long_prompt_moves_the_gaps_of_streams_to_the_target_and_makes_progress(
    itl_target_ms: float, noise: float
) -> None:
    gaps, duration_s = gaps_beside_a_long_prompt(choose_policy("splitfuse", itl_target_ms), noise)
    assert float(np.quantile(gaps, 0.99)) < 1.1 * itl_target_ms / 1000
    # it takes no more than twice as long as if every step lasted exactly as long as it may
    least_s = sum_of_chunks_s(itl_target_ms / 1000)
    assert least_s < duration_s < 2 * least_s


def sum_of_chunks_s(itl_target_s: float) -> float:
    """Returns how long the prompt takes in steps of exactly ``itl_target_s`` beside 16 decodes of 400 tokens."""
    computed, steps = 0, 0
    while computed < len(LONG.prompt_ids):
        size = 1
        while size < 2032 and COST.seconds(StepWork(16, 16 * 400, 0).with_chunk(computed, size)) < itl_target_s:
            size += 1
        computed += size
        steps += 1
    return steps * itl_target_s


@pytest.mark.parametrize("name", cases(["splitfuse", "orca", "prefill_first"], fast=["splitfuse"]))
def test_without_a_target_the_gaps_are_as_long_as_the_budget_makes_them(name: str) -> None:
    gaps, _ = gaps_beside_a_long_prompt(choose_policy(name), 0.0)
    assert float(np.quantile(gaps, 0.99)) > 0.1


def test_a_long_prompt_that_is_cached_does_not_surprise_with_its_context() -> None:
    """The cached part of a prompt is known only when the prompt is admitted; its first chunk reads all of that part."""
    device = server(choose_policy("splitfuse", 20), prefix_caching=True)
    system = [3] * 60_000
    device.serve([Arrival(0.0, system, SamplingParams(max_new_tokens=1))])
    begin_s = device.clock.now_s
    streams = [stream._replace(at_s=begin_s) for stream in STREAMS]
    users = [
        Arrival(begin_s + 2 + user, [*system, *[5 + user] * 900], SamplingParams(max_new_tokens=1)) for user in range(5)
    ]
    generations = device.serve([*streams, *users])
    assert all(each.output().metrics.cached_tokens == len(system) for each in generations[len(streams) :])
    times_s = generations[0].completions[0].token_times_s
    gaps = [later - earlier for earlier, later in pairwise(times_s) if later > begin_s + 2]
    assert max(gaps) < 1.1 * 0.020


def test_where_decodes_alone_take_longer_than_the_target_a_prompt_still_makes_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = server(choose_policy("splitfuse", 5))  # a step takes 8 ms at least
    prompt = Arrival(1.0, [1] * 500, SamplingParams(max_new_tokens=1))
    streams = [stream._replace(sampling=SamplingParams(max_new_tokens=300)) for stream in STREAMS]
    first, *_, long = device.serve([*streams, prompt])
    end_s, times_s = long.completions[0].token_times_s[0], first.completions[0].token_times_s
    gaps = [later - earlier for earlier, later in pairwise(times_s) if 1.0 < later <= end_s]
    least_s = COST.seconds(StepWork(16, 16 * (50 + len(times_s)), 0).with_chunk(500, 1))
    assert max(gaps) < 1.2 * least_s, "not much longer than it must be"
    assert len(gaps) < 50, "and yet ten tokens of it and more in a step"
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged.startswith(
        "itl_target_ms=5 cannot be held: a step of 16 decodes and one token of a prompt at position 0"
    )
    metrics = device.engine.metrics.snapshot()
    assert metrics.itl_target_missed_total >= len(times_s) - 1


def test_a_target_that_is_held_is_not_said_to_be_missed(caplog: pytest.LogCaptureFixture) -> None:
    device = server(choose_policy("splitfuse", 50))
    device.serve([*(stream._replace(sampling=SamplingParams(max_new_tokens=300)) for stream in STREAMS), LONG])
    assert device.engine.metrics.snapshot().itl_target_missed_total == 0
    assert not caplog.records


def test_a_step_without_decodes_misses_no_target() -> None:
    device = server(choose_policy("splitfuse", 5))  # a step takes 8 ms at least
    device.serve([Arrival(0.0, [1] * 100, SamplingParams(max_new_tokens=1))])
    assert device.engine.metrics.snapshot().itl_target_missed_total == 0


@pytest.mark.parametrize(("itl_target_ms", "num_missed"), [(500, 0), (499, 9)])
def test_a_step_misses_the_target_where_it_takes_longer(itl_target_ms: float, num_missed: int) -> None:
    """Nine steps of exactly 500 ms have decodes, behind that of the prompt."""
    policy = choose_policy("splitfuse", itl_target_ms)
    device = SimulatedServer(StepCost(tokens=((1, 0.5),)), **SMALL, policy=policy)
    device.serve([Arrival(0.0, [1, 2], SamplingParams(max_new_tokens=10))])
    found = device.engine.metrics.snapshot()
    assert found.itl_target_missed_total == num_missed
    assert (found.queue_seconds.sum, found.ttft_seconds.sum, found.request_seconds.sum) == (0.0, 0.5, 5.0)
    assert (found.gap_seconds.sum, found.gap_seconds.count, found.ranks) == (4.5, 9, 1)


def test_drafts_keep_to_the_target_too() -> None:
    """A device on which each token counts: 16 decodes of 9 ms, and as many drafts as there is room for."""
    cost = StepCost.linear(step_s=0.001, token_s=5e-4)
    longest = []
    for policy in (choose_policy("splitfuse"), choose_policy("splitfuse", 20)):
        device = SimulatedServer(cost, token_budget=256, max_num_seqs=16, num_blocks=8000, policy=policy)
        device.engine.scheduler._propose_drafts = lambda seq, most: [-7] * min(most, 8)  # never right
        generations = device.serve([each._replace(sampling=SamplingParams(max_new_tokens=40)) for each in STREAMS])
        longest.append(max(max(each.output().metrics.gaps_s) for each in generations))
    assert longest[0] > 0.060 > 1.1 * 0.020 > longest[1]
