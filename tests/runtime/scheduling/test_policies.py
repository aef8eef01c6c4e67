"""Each policy: what its steps look like, and that whatever comes, everything is answered, and the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import POLICIES, DynamicBatching, StaticBatching, choose_policy
from fastgen.runtime.scheduling.policies.policy import Policy, StepPlan, StepView
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step.step import Step
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.work import StepWork

Taken = list[tuple[int, int, int]]


class Steps:
    """A scheduler whose steps all succeed, a second each."""

    def __init__(self, policy: Policy, *, token_budget: int = 16, max_num_seqs: int = 4, num_blocks: int = 101):
        kv = KVCacheManager(num_blocks, 4)
        self.scheduler = Scheduler(kv, token_budget=token_budget, max_num_seqs=max_num_seqs, policy=policy)
        self.now_s = 0.0
        self.num_requests = 0

    def add(self, num_prompt: int, max_new: int = 3) -> Sequence:
        sampling = SamplingParams(max_new_tokens=max_new)
        request = Request(self.num_requests, [1] * num_prompt, sampling, arrival_s=self.now_s)
        self.num_requests += 1
        self.scheduler.add(request)
        return request.sequences[0]

    def step(self) -> Taken:
        """Run a step: ``(request, start, num_tokens)`` of each entry."""
        schedule = self.scheduler.schedule(self.now_s)
        self.scheduler.check_integrity()
        self.now_s += 1
        return [] if schedule is None else self.run(schedule)

    def run(self, schedule: Schedule) -> Taken:
        taken = [(entry.seq.key[0], entry.start, entry.num_tokens) for entry in schedule.entries]
        self.scheduler.commit(schedule)
        for entry in schedule.entries:
            if entry.samples:
                entry.seq.token_ids.append(7)
                if entry.seq.num_tokens == entry.seq.num_prompt_tokens + entry.seq.request.sampling.max_new_tokens:
                    self.scheduler.finish(entry.seq)
        return taken


def test_splitfuse_splits_and_fuses() -> None:
    steps = Steps(SplitFuse())
    steps.add(4)
    assert steps.step() == [(0, 0, 4)]
    steps.add(20)
    assert steps.step() == [(0, 4, 1), (1, 0, 15)]
    assert steps.step() == [(0, 5, 1), (1, 15, 5)]


class Asked(SplitFuse):
    """Knows how many decodes there were each time it was asked."""

    def __init__(self) -> None:
        self.num_decodes: list[int] = []

    def plan(self, view: StepView) -> StepPlan:
        self.num_decodes.append(len(view.decodes))
        return super().plan(view)


def test_no_policy_is_asked_where_only_decodes_run() -> None:
    steps = Steps(Asked())
    policy = steps.scheduler.policy
    assert isinstance(policy, Asked)
    steps.add(4)
    assert steps.step() == [(0, 0, 4)]
    policy.num_decodes.clear()
    assert steps.step() == [(0, 4, 1)]
    assert policy.num_decodes == []
    steps.add(3)
    assert steps.step() == [(0, 5, 1), (1, 0, 3)]
    assert policy.num_decodes == [1]
    assert [steps.step() for _ in range(3)] == [[(1, 3, 1)], [(1, 4, 1)], []]
    assert policy.num_decodes == [1]


def test_prefill_first_computes_whole_prompts_while_decodes_wait() -> None:
    steps = Steps(POLICIES["prefill_first"]())
    steps.add(4)
    assert steps.step() == [(0, 0, 4)]
    steps.add(10)
    steps.add(5)
    steps.add(4)
    assert steps.step() == [(1, 0, 10), (2, 0, 5)]
    assert steps.step() == [(3, 0, 4)]
    assert steps.step() == [(0, 4, 1), (1, 10, 1), (2, 5, 1), (3, 4, 1)]
    steps.add(40)  # longer than the budget: in steps that it fills
    assert steps.step() == [(0, 5, 1), (1, 11, 1), (2, 6, 1), (3, 5, 1)]  # no slot was free
    assert [steps.step() for _ in range(3)] == [[(4, 0, 16)], [(4, 16, 16)], [(4, 32, 8)]]


def test_prefill_first_lets_decodes_run_where_a_prompt_finds_no_blocks() -> None:
    steps = Steps(POLICIES["prefill_first"](), num_blocks=5)  # 4 blocks of 4
    steps.add(8, max_new=3)
    assert steps.step() == [(0, 0, 8)]
    steps.add(9, max_new=2)
    assert [steps.step() for _ in range(4)] == [[(0, 8, 1)], [(0, 9, 1)], [(1, 0, 9)], [(1, 9, 1)]]


def test_orca_adds_whole_prompts_to_the_decodes() -> None:
    steps = Steps(POLICIES["orca"]())
    steps.add(4, max_new=9)
    assert steps.step() == [(0, 0, 4)]
    steps.add(10)
    steps.add(6)
    assert steps.step() == [(0, 4, 1), (1, 0, 10)]  # 5 places are left, and the prompt of 6 is not split for them
    assert steps.step() == [(0, 5, 1), (1, 10, 1), (2, 0, 6)]
    steps.add(30)
    assert steps.step() == [(0, 6, 1), (1, 11, 1), (2, 6, 1), (3, 0, 13)]  # longer than any step: it fills them
    assert steps.step() == [(0, 7, 1), (2, 7, 1), (3, 13, 14)]
    assert steps.step() == [(0, 8, 1), (3, 27, 3)]


def test_dynamic_batches_wait_for_enough_and_run_to_their_end() -> None:
    steps = Steps(DynamicBatching(batch_size=2, max_delay_s=3.5))
    steps.add(4, max_new=2)
    assert [steps.step(), steps.step()] == [[], []]
    assert steps.scheduler.resumes_at_s == 3.5
    steps.add(4, max_new=4)
    assert steps.step() == [(0, 0, 4), (1, 0, 4)]
    assert steps.scheduler.resumes_at_s is None
    steps.add(4, max_new=1)
    assert [steps.step() for _ in range(3)] == [[(0, 4, 1), (1, 4, 1)], [(1, 5, 1)], [(1, 6, 1)]]
    assert [steps.step(), steps.step()] == [[], [(2, 0, 4)]]  # less than a batch, but it has waited long enough


def test_a_batch_that_takes_several_steps_of_prompts_computes_them_before_its_first_decode() -> None:
    steps = Steps(DynamicBatching(batch_size=3, max_delay_s=0.0))
    for num_prompt in (10, 10, 2, 2):
        steps.add(num_prompt, max_new=2)
    assert steps.step() == [(0, 0, 10)]
    assert steps.step() == [(1, 0, 10), (2, 0, 2)]
    assert steps.step() == [(0, 10, 1), (1, 10, 1), (2, 2, 1)]
    assert steps.step() == [(3, 0, 2)]


def test_static_batches_are_of_the_waiting_requests() -> None:
    steps = Steps(StaticBatching(batch_size=3))
    steps.add(4, max_new=2)
    assert steps.step() == [(0, 0, 4)]
    steps.add(4, max_new=1)
    assert steps.step() == [(0, 4, 1)]
    assert steps.step() == [(1, 0, 4)]


def test_a_member_of_a_batch_that_was_preempted_comes_back_into_it() -> None:
    steps = Steps(StaticBatching(batch_size=2), num_blocks=6)  # 5 blocks of 4
    steps.add(8, max_new=8)
    steps.add(8, max_new=8)
    steps.add(1, max_new=1)
    taken = [steps.step() for _ in range(30)]
    seen = [request_id for entries in taken for request_id, _, _ in entries]
    assert steps.scheduler.unfinished == []
    assert seen.index(2) > max(at for at, request_id in enumerate(seen) if request_id < 2)
    assert (1, 0, 8) in taken[0]
    assert sum(entry[:2] == (1, 0) for entries in taken for entry in entries) == 2, "it was computed again"


# Plans, worked out by hand

FREE_SLOTS, BUDGET = 4, 100


def some(num: int, *, first_runs_again: bool = False) -> list[Sequence]:
    """Returns sequences of requests that came at 20 s."""
    found = [Request(index, [1, 2], SamplingParams(), arrival_s=20.0).sequences[0] for index in range(num)]
    if first_runs_again:
        found[0].num_preemptions = 1
    return found


def view(
    num_decodes: int = 0,
    num_prompts: int = 0,
    waiting: list[Sequence] | None = None,
    *,
    num_opened: int = 0,
    now_s: float = 20.0,
) -> StepView:
    return StepView(
        decodes=some(num_decodes),
        prompts=some(num_prompts),
        waiting=waiting or [],
        num_waiting=len(waiting or []),
        num_free_slots=FREE_SLOTS,
        num_opened=num_opened,
        token_budget=BUDGET,
        sizes=(BUDGET,),
        now_s=now_s,
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # A batch runs: its prompts come first, and as many more as were opened.
        (view(num_decodes=2), StepPlan(True, 98, 0)),
        (view(num_prompts=1), StepPlan(False, 100, 0)),
        (view(num_decodes=2, num_prompts=1), StepPlan(False, 100, 0)),
        (view(num_decodes=2, num_opened=1), StepPlan(False, 100, 1)),
        (view(num_prompts=1, waiting=some(9)), StepPlan(False, 100, 0)),
        (view(num_decodes=2, waiting=some(9)), StepPlan(True, 98, 0)),
        (view(num_decodes=2, waiting=some(9, first_runs_again=True)), StepPlan(False, 100, 0)),
        (view(waiting=some(1, first_runs_again=True), num_opened=1), StepPlan(False, 100, 1)),
        # Nothing runs: three are a batch, or fewer when the first has waited for half a second.
        (view(waiting=some(3)), StepPlan(False, 100, 3)),
        (view(waiting=some(9)), StepPlan(False, 100, 3)),
        (view(waiting=some(2)), StepPlan(False, 0, 0, until_s=20.5)),
        (view(waiting=some(2), now_s=20.25), StepPlan(False, 0, 0, until_s=20.5)),
        (view(waiting=some(2), now_s=20.5), StepPlan(False, 100, 2)),
        (view(waiting=some(1), now_s=21.0), StepPlan(False, 100, 1)),
    ],
)
def test_plans_of_dynamic_batching(asked: StepView, expected: StepPlan) -> None:
    assert DynamicBatching(batch_size=3, max_delay_s=0.5).plan(asked) == expected


def test_a_batch_is_by_default_as_large_as_there_are_slots_and_waits_fifty_milliseconds() -> None:
    policy = DynamicBatching()
    assert policy.plan(view(waiting=some(3))) == StepPlan(False, 0, 0, until_s=20.05)
    assert policy.plan(view(waiting=some(4))) == policy.plan(view(waiting=some(9))) == StepPlan(False, 100, 4)
    assert StaticBatching().plan(view(waiting=some(3))) == StepPlan(False, 100, 3), "without a delay"
    policy.check(1)
    DynamicBatching(batch_size=4).check(4)
    assert DynamicBatching(batch_size=1, max_delay_s=0).plan(view(waiting=some(1))) == StepPlan(False, 100, 1)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("orca", view(num_decodes=3, num_prompts=1), StepPlan(True, 97, 4)),
        ("orca", view(), StepPlan(True, 100, 4)),
        ("prefill_first", view(num_decodes=3, num_prompts=1), StepPlan(False, 100, 4)),
        ("prefill_first", view(num_decodes=3, waiting=some(1)), StepPlan(False, 100, 4)),
        ("prefill_first", view(num_decodes=3), StepPlan(True, 0, 0)),
        # 2 tokens of each prompt are pending; the only size is the budget.
        ("splitfuse", view(num_decodes=3, num_prompts=2, waiting=some(3)), StepPlan(True, 10, 4)),
        ("splitfuse", view(num_decodes=3, num_prompts=90), StepPlan(True, 97, 4)),
    ],
)
def test_plans_of_the_others(name: str, asked: StepView, expected: StepPlan) -> None:
    assert POLICIES[name]().plan(asked) == expected


# Which policy


def test_policies_are_chosen_by_name_or_given() -> None:
    given = DynamicBatching(batch_size=2)
    assert choose_policy(given) is given
    assert {name: type(choose_policy(name)) for name in POLICIES} == dict(POLICIES)
    bounded = choose_policy("splitfuse", itl_target_ms=40)
    assert isinstance(bounded, TimeBudgetSplitFuse)
    assert bounded.itl_target_s == 0.04


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choose_policy("splitfused"), "policy='splitfused' is not known; did you mean 'splitfuse'"),
        (lambda: choose_policy("fifo"), "policy='fifo' is not known; expected 'splitfuse', 'prefill_first'"),
        (lambda: choose_policy(None), "policy=None is not known"),  # type: ignore[arg-type]
        (lambda: choose_policy("orca", 50), "itl_target_ms=50 goes with policy='splitfuse' only"),
        (lambda: choose_policy(SplitFuse(), 50), "itl_target_ms=50 goes with policy='splitfuse' only"),
        *[
            (lambda bad=bad: choose_policy("splitfuse", bad), "itl_target_ms=.*: expected a number of milliseconds")
            for bad in (0, -1, True, "50", float("nan"), float("inf"))
        ],
        *[
            (lambda bad=bad: StaticBatching(bad), "batch_size=.*: expected an integer of at least 1")
            for bad in (0, -1, True, 2.0, "2")
        ],
        *[
            (lambda bad=bad: DynamicBatching(2, bad), "max_delay_s=.*: expected a number of seconds of at least 0")
            for bad in (-1, True, "1", float("nan"), float("inf"), None)
        ],
        (lambda: Steps(StaticBatching(5)), "batch_size=5 is above max_num_seqs=4"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_policy_that_is_given_to_two_schedulers_is_two() -> None:
    policy = TimeBudgetSplitFuse(0.1)
    first, second = Steps(policy), Steps(policy)
    first.scheduler.policy.observe(StepWork(1, 1, 1), 1.0)
    assert first.scheduler.policy is not second.scheduler.policy
    assert policy.model.predict_s(StepWork(1, 1, 1)) == 0.0


# Random traffic


def random_policy(name: str, rng: random.Random, max_num_seqs: int) -> Policy:
    batch_size = rng.choice([None, rng.randint(1, max_num_seqs)])
    if name == "dynamic":
        return DynamicBatching(batch_size, rng.choice([0.0, 0.5, 20.0]))
    if name == "static":
        return StaticBatching(batch_size)
    return TimeBudgetSplitFuse(rng.choice([0.001, 0.5, 1.5, 50.0])) if name == "bounded" else choose_policy(name)


def random_arrivals(rng: random.Random, max_total: int) -> list[Arrival]:
    arrivals, at_s = [], 0.0
    for _ in range(rng.randint(1, 14)):
        at_s += rng.choice([0.0, 0.0, 1.0, 7.0, 60.0])
        total = rng.randint(2, max_total)
        num_prompt = rng.choice([1, total - 1, rng.randint(1, total - 1)])
        sampling = SamplingParams(
            max_new_tokens=total - num_prompt, n=rng.choice([1, 1, 1, 3]), priority=rng.choice([0, 0, 1, 7])
        )
        arrivals.append(Arrival(at_s, [rng.randrange(5) for _ in range(num_prompt)], sampling))
    return arrivals


def check_steps(name: str, server: SimulatedServer) -> None:
    """Every step that the engine of ``server`` makes is looked at when it is run."""
    engine, launch = server.engine, server.engine.runner.launch

    def checked(step: Step) -> None:
        schedule = step.schedule
        engine.check_integrity()
        if name in ("prefill_first", "dynamic", "static"):
            assert not (schedule.decodes and schedule.chunks), "decodes run by themselves"
        if name not in ("splitfuse", "bounded"):
            most = engine.scheduler.token_budget - len(schedule.decodes)
            for chunk in schedule.chunks:
                assert chunk.samples or schedule.num_tokens == engine.scheduler.token_budget or chunk.num_tokens == most
        if name in ("dynamic", "static"):
            started = {seq.key[0] for seq in engine.scheduler.running}
            size = getattr(engine.scheduler.policy, "batch_size", None)
            assert size is None or len(started) <= size
        launch(step)

    engine.runner.launch = checked  # type: ignore[method-assign]


@pytest.mark.parametrize("name", [*POLICIES, "bounded"])
def test_everything_is_answered_under_random_traffic(name: str) -> None:
    num_preemptions = 0
    for seed in range(40):
        rng = random.Random(seed)
        block_size, max_num_seqs = rng.choice([1, 2, 4, 16]), rng.randint(1, 6)
        max_total = rng.choice([6, 30, 80])
        needed = -(-max_total // block_size)
        server = SimulatedServer(
            StepCost.linear(1.0, 0.01, noise=rng.choice([0.0, 0.3])),
            token_budget=max_num_seqs + rng.choice([0, 3, 40]),
            max_num_seqs=max_num_seqs,
            num_blocks=1 + rng.choice([needed, needed + 2, 4 * needed]),
            block_size=block_size,
            policy=random_policy(name, rng, max_num_seqs),
            aging_s=rng.choice([3.0, 30.0]),
            prefix_caching=rng.random() < 0.5,
        )
        check_steps(name, server)
        arrivals = random_arrivals(rng, max_total)
        generations = server.serve(arrivals)
        server.engine.check_integrity()
        alone = SimulatedServer(StepCost.linear(1.0, 0.0), token_budget=64, max_num_seqs=8, num_blocks=500)
        for arrival, generation in zip(arrivals, generations, strict=True):
            (expected,) = alone.serve([arrival._replace(at_s=alone.clock.now_s)])
            for found, wanted in zip(generation.output().completions, expected.output().completions, strict=True):
                assert (found.token_ids, found.finish_reason) == (wanted.token_ids, "length"), f"seed {seed}"
                num_preemptions += found.metrics.preemptions
        assert server.engine.scheduler.kv.pool.num_free == server.engine.scheduler.kv.pool.capacity
    assert num_preemptions > 5
