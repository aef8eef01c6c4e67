"""Runs in virtual time: who is sent when, what each request sees, and that nothing but the arguments decides it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.records import RequestRecord, Run
from fastgen.lab.simulation import ServerSettings, Simulation, simulate
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.routing import ROUTERS, RoutedRequest
from fastgen.runtime.routing.routers import LeastTokens
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost

COST = StepCost.linear(0.008, 4e-5, 5e-8, 1e-9)
SETTINGS = ServerSettings(num_blocks=2000, token_budget=256, max_num_seqs=32, prefix_caching=False)


def planned(num: int, *, seed: int = 0, rate: float | None = None) -> list[PlannedRequest]:
    draw, due_s, requests = random.Random(seed), 0.0, []
    for number in range(num):
        due_s += draw.expovariate(rate) if rate else 0.0
        prompt_ids = [number + 1] * draw.randint(1, 400)
        num_new = draw.randint(1, 60)
        requests.append(
            PlannedRequest(prompt_ids=prompt_ids, num_new_tokens=num_new, due_s=due_s if rate is not None else None)
        )
    return requests


def test_an_open_loop_sends_what_is_due_and_answers_in_full() -> None:
    requests = planned(100, rate=10)
    run = simulate(requests, SETTINGS, COST)
    assert [record.sent_s for record in run.records] == [request.due_s for request in requests]
    assert [record.num_generated for record in run.records] == [request.num_new_tokens for request in requests]
    assert run.header.duration_s == max(record.ended_s for record in run.records)
    assert all(record.error is None and record.finish_reason == "length" for record in run.records)


@pytest.mark.parametrize("policy", ["splitfuse", "prefill_first", "orca", "dynamic", "static"])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [2000, 60])
def test_counted_answers_have_the_times_of_answers_that_are_made(
    policy: str, runs_ahead: bool, num_blocks: int
) -> None:
    """Without tokens a step is cheap to simulate, and it decides the same, also where the cache forces preemptions."""
    settings = ServerSettings(
        num_blocks=num_blocks, token_budget=256, max_num_seqs=16, policy=policy, runs_ahead=runs_ahead
    )
    cost = StepCost(tokens=((1, 0.01), (64, 0.012), (256, 0.03)), host_s=0.001, context_s=1e-7, noise=0.1)
    requests = planned(80, rate=30)
    counted = simulate(requests, settings, cost)
    recorded = Simulation(requests, settings, cost, records_flight=True)
    assert counted == recorded.run()
    (flight,) = recorded.recordings("simulated")
    assert bool(flight.steps)
    assert any(step.preempted for step in flight.steps) == (num_blocks == 60)


def test_times_are_those_of_the_simulated_server() -> None:
    requests = planned(60, rate=20)
    server = SimulatedServer(COST, token_budget=256, max_num_seqs=32, num_blocks=2000)
    arrivals = [
        Arrival(each.due_s or 0.0, each.prompt_ids, SamplingParams(max_new_tokens=each.num_new_tokens))
        for each in requests
    ]
    times_s = [tuple(each.completions[0].token_times_s) for each in server.serve(arrivals)]
    assert [record.token_times_s for record in simulate(requests, SETTINGS, COST).records] == times_s


def test_a_closed_loop_keeps_its_clients_busy_one_request_each() -> None:
    run = simulate(planned(40), SETTINGS, COST, num_clients=4, stagger_s=0.01, seed=3)
    by_client = [[record for record in run.records if record.client == client] for client in range(4)]
    assert sum(map(len, by_client)) == 40
    for own in by_client:
        assert 0 <= own[0].sent_s <= 4 * 0.01
        assert all(later.sent_s == earlier.ended_s for earlier, later in pairwise(own))


def test_a_session_waits_for_its_answers_and_thinks() -> None:
    requests = [
        PlannedRequest(prompt_ids=[1] * 10, num_new_tokens=5, due_s=1.0, session="a"),
        PlannedRequest(prompt_ids=[2] * 10, num_new_tokens=5, due_s=1.0),
        PlannedRequest(prompt_ids=[1] * 20, num_new_tokens=5, session="a", think_s=0.5),
        PlannedRequest(prompt_ids=[1] * 30, num_new_tokens=5, due_s=9.0, session="a"),
    ]
    first, alone, second, third = simulate(requests, SETTINGS, COST).records
    assert (first.sent_s, alone.sent_s) == (1.0, 1.0)
    assert second.sent_s == pytest.approx(first.ended_s + 0.5)
    assert third.sent_s == 9.0
    closed = simulate(requests, SETTINGS, COST, num_clients=1).records
    assert [record.request for record in sorted(closed, key=sent_s)] == [0, 2, 3, 1], "a client serves a whole session"


def sent_s(record: RequestRecord) -> float:
    return record.sent_s


def test_equal_arguments_give_equal_runs() -> None:
    noisy = StepCost.linear(0.008, 4e-5, noise=0.2)

    def run(seed: int) -> Run:
        return simulate(planned(30), SETTINGS, noisy, num_clients=5, num_replicas=2, seed=seed)

    assert run(1) == run(1) != run(2)


def test_delays_of_the_server_are_added_on_both_ways() -> None:
    request = PlannedRequest(prompt_ids=[1] * 10, num_new_tokens=3, due_s=0.0)
    plain = simulate([request], SETTINGS, COST).records[0]
    settings = ServerSettings(num_blocks=2000, request_delay_s=0.25, token_delay_s=0.5)
    delayed = simulate([request], settings, COST).records[0]
    assert delayed.sent_s == 0.0
    assert delayed.token_times_s == pytest.approx([time_s + 0.75 for time_s in plain.token_times_s])
    assert delayed.ended_s == delayed.token_times_s[-1]


def test_a_request_that_cannot_be_served_is_a_record_and_no_error() -> None:
    requests = [
        PlannedRequest(prompt_ids=[1] * 40_000, num_new_tokens=3, due_s=0.0),
        PlannedRequest(prompt_ids=[1] * 10, num_new_tokens=3, due_s=0.0),
    ]
    refused, answered = simulate(requests, SETTINGS, COST).records
    assert refused.error is not None
    assert "max_model_len" in refused.error
    assert not refused.token_times_s
    assert answered.num_generated == 3


def test_a_conversation_goes_on_after_a_turn_that_is_refused_with_what_was_asked_there() -> None:
    """So it does where a server refuses the turn: what comes next is longer still."""
    turns = [(10, 3), (40_000, 3), (10, 3)]
    requests = [
        PlannedRequest(prompt_ids=[1] * num, num_new_tokens=new, due_s=0.0, session="a", continues=turn > 0)
        for turn, (num, new) in enumerate(turns)
    ]
    records = simulate(requests, SETTINGS, COST).records
    assert [record.num_prompt_tokens for record in records] == [10, 10 + 3 + 40_000, 10 + 3 + 40_000 + 10]
    assert [record.error is None for record in records] == [True, False, False]


def test_what_cannot_be_simulated_is_refused_in_words() -> None:
    with pytest.raises(InvalidArgumentError, match="request 0 has no due time"):
        simulate(planned(1), SETTINGS, COST)
    with pytest.raises(InvalidArgumentError, match="0 clients"):
        simulate(planned(1), SETTINGS, COST, num_clients=0)
    with pytest.raises(InvalidArgumentError, match="num_replicas=0"):
        simulate(planned(1), SETTINGS, COST, num_clients=1, num_replicas=0)
    with pytest.raises(InvalidArgumentError, match="router='fewest' is not known"):
        simulate(planned(1), SETTINGS, COST, num_clients=1, router="fewest")


@pytest.mark.parametrize("router", list(ROUTERS))
def test_replicas_share_the_load(router: str) -> None:
    requests = planned(200, rate=100)
    one = simulate(requests, SETTINGS, COST, router=router)
    four = simulate(requests, SETTINGS, COST, num_replicas=4, router=router)
    assert four.header.duration_s < 0.6 * one.header.duration_s
    assert sum(record.e2el_s for record in four.records) < 0.5 * sum(record.e2el_s for record in one.records)


def test_the_router_by_tokens_avoids_a_replica_with_a_long_prompt() -> None:
    long = PlannedRequest(prompt_ids=[1] * 3000, num_new_tokens=50, due_s=0.0)
    short = [PlannedRequest(prompt_ids=[2] * 10, num_new_tokens=5, due_s=0.001 * number) for number in range(1, 9)]
    settings = ServerSettings(num_blocks=2000, token_budget=256, max_num_seqs=1)

    def slowest_s(router: str) -> float:
        run = simulate([long, *short], settings, COST, num_replicas=2, router=router)
        return max(record.e2el_s for record in run.records[1:])

    assert slowest_s("least_tokens") < slowest_s("round_robin")


def test_a_conversation_continues_with_its_answers_and_finds_them_cached() -> None:
    turns = [
        PlannedRequest(prompt_ids=[turn + 1] * 48, num_new_tokens=17, session="a", due_s=0.0, continues=turn > 0)
        for turn in range(3)
    ]
    settings = ServerSettings(num_blocks=2000, token_budget=256)
    records = simulate(turns, settings, COST).records
    assert [record.num_prompt_tokens for record in records] == [48, 2 * 48 + 17, 3 * 48 + 2 * 17]
    assert [record.num_cached_tokens for record in records] == [0, 64, 128], "the last token of an answer has no block"


def test_a_gap_between_steps_delays_all_that_follow() -> None:
    request = PlannedRequest(prompt_ids=[1] * 10, num_new_tokens=3, due_s=0.0)
    plain = simulate([request], SETTINGS, COST).records[0].token_times_s
    gapped = simulate([request], ServerSettings(num_blocks=2000, step_gap_s=0.5), COST).records[0].token_times_s
    assert gapped == pytest.approx([time_s + 0.5 * place for place, time_s in enumerate(plain)])


def turns(seed: int) -> list[PlannedRequest]:
    """Returns conversations of six turns that begin at drawn times, each with tokens of its own."""
    draw, due_s, requests = random.Random(seed), 0.0, []
    for number in range(24):
        due_s += draw.expovariate(4)
        requests += [
            PlannedRequest(
                prompt_ids=[draw.randrange(30_000) for _ in range(60)],
                num_new_tokens=40,
                due_s=due_s,
                session=f"{number}",
                think_s=0.5 if turn else 0.0,
                continues=turn > 0,
            )
            for turn in range(6)
        ]
    return requests


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefix_affinity_finds_more_of_conversations_cached_than_other_routers(seed: int) -> None:
    settings = ServerSettings(num_blocks=800, token_budget=256, max_num_seqs=16)

    def num_cached(router: str) -> int:
        run = simulate(turns(seed), settings, COST, num_replicas=4, router=router, seed=seed)
        assert all(record.num_generated == 40 for record in run.records)
        return sum(record.num_cached_tokens for record in run.records)

    prefix = num_cached("prefix")
    held = 24 * sum(100 * turn // 16 * 16 - 16 for turn in range(1, 6))  # the last token of an answer has no place
    assert prefix > 0.95 * held, "nearly all turns go where the turn before went"
    for other in ("random", "least_tokens", "round_robin"):
        assert prefix > 1.3 * num_cached(other), other


def test_a_router_that_is_passed_in_learns_of_each_request() -> None:
    class Last(LeastTokens):
        def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
            return super().rank(request, replicas)[::-1]

    router = Last()
    run = simulate(planned(20, rate=50), SETTINGS, COST, num_replicas=3, router=router)
    assert run.header.target["router"] == "Last"
    assert [router.outstanding(str(number)) for number in range(3)] == [0, 0, 0]


def test_a_request_that_arrives_keeps_the_engine() -> None:
    requests = [
        PlannedRequest(prompt_ids=(1,) * 100, num_new_tokens=40, due_s=0.0),
        PlannedRequest(prompt_ids=(2,) * 100, num_new_tokens=1, due_s=0.1),
    ]
    sizes = {"num_blocks": 2000, "prefix_caching": False}
    plain, kept = (simulate(requests, ServerSettings(**sizes, arrival_s=each), COST).records for each in (0.0, 0.05))
    assert kept[0].token_times_s[0] == pytest.approx(plain[0].token_times_s[0] + 0.05)
    # The other one keeps it once more, while the first is answered.
    assert kept[0].ended_s == pytest.approx(plain[0].ended_s + 2 * 0.05)
    with pytest.raises(InvalidArgumentError, match="arrival_s=-1"):
        ServerSettings(num_blocks=10, arrival_s=-1)
