"""Open and closed loops: when requests are sent, and that slow answers do not change it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.load.closed_loop import ClosedLoop
from fastgen.lab.load.endpoint import EndpointTarget
from fastgen.lab.load.generator import Load, LoadGenerator
from fastgen.lab.load.open_loop import OpenLoop
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.records import Run
from fastgen.lab.workloads.request import PlannedRequest
from tests.lab.load.fake_endpoint import fake_endpoint

PROMPT = tuple(range(9))


class Memory:
    """A target without a server: answers all tokens of a request at once, as soon as ``gather`` requests run."""

    def __init__(self, *, gather: int = 1, prepare_s: float = 0.0, blocks_s: float = 0.0, fails: bool = False):
        self._gather, self._prepare_s, self._blocks_s, self._fails = gather, prepare_s, blocks_s, fails
        self.prompts: list[Sequence[int]] = []
        self.running = self.most_running = 0

    def facts(self) -> dict[str, Any]:
        return {"kind": "memory"}

    async def open(self, requests: Sequence[PlannedRequest]) -> None:
        self._full = asyncio.Event()

    def prepare(self, request: PlannedRequest) -> PlannedRequest:
        time.sleep(self._prepare_s)
        return request

    async def send(self, prepared: PlannedRequest, answer: Answer) -> None:
        self.prompts.append(prepared.prompt_ids)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        if self.running >= self._gather:
            self._full.set()
        try:
            await self._full.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        time.sleep(self._blocks_s)
        if self._fails:
            raise RequestFailedError("no")
        answer.token_ids = [1] * prepared.num_new_tokens
        answer.add(prepared.num_new_tokens, time.perf_counter())

    def ids_of(self, answer: Answer) -> list[int]:
        return answer.token_ids

    async def close(self) -> None:
        pass


def planned(*due_s: float | None, **fields: Any) -> list[PlannedRequest]:
    return [PlannedRequest(prompt_ids=PROMPT, num_new_tokens=3, due_s=each, **fields) for each in due_s]


def measured(target: Any, requests: list[PlannedRequest], load: Load) -> Run:
    return LoadGenerator(target)(requests, load, {"name": "test"})


def test_an_open_loop_does_not_wait_for_slow_answers() -> None:
    # Coordinated omission: a generator that waited for an answer would wait for ever here.
    due_s = [number / 100 for number in range(12)]
    with fake_endpoint(gathers=12) as fake:
        run = measured(EndpointTarget(fake.url), planned(*due_s), OpenLoop(num_warm_ups=0))
    assert [record.error for record in run.records] == [None] * 12
    assert [record.due_s for record in run.records] == due_s
    assert all(record.sent_s >= record.due_s for record in run.records)
    assert min(record.ended_s for record in run.records) >= max(record.sent_s for record in run.records)
    assert fake.most_in_flight == 12


def test_requests_are_sent_in_order_of_their_time() -> None:
    run = measured(Memory(), planned(0.03, 0.0, 0.01), OpenLoop(num_warm_ups=0))
    assert [record.request for record in run.records] == [0, 1, 2]
    assert sorted(range(3), key=lambda number: run.records[number].sent_s) == [1, 2, 0]


def test_a_session_waits_for_its_answer_and_thinks() -> None:
    first, later = planned(0.0, 0.2, session="s")
    thinking = PlannedRequest(prompt_ids=(5,), num_new_tokens=3, session="s", think_s=0.05, continues=True)
    target = Memory()
    a, b, c = measured(target, [first, thinking, later], OpenLoop(num_warm_ups=0)).records
    assert b.due_s == pytest.approx(a.ended_s + 0.05)
    assert c.due_s == pytest.approx(0.2), "not before its own time"
    assert all(each.sent_s >= each.due_s for each in (a, b, c))
    assert target.prompts == [list(PROMPT), [*PROMPT, 1, 1, 1, 5], list(PROMPT)]
    assert b.num_prompt_tokens == len(PROMPT) + 4


def test_a_closed_loop_never_has_more_requests_in_flight_than_clients() -> None:
    with fake_endpoint(gathers=3) as fake:
        run = measured(EndpointTarget(fake.url), planned(*[None] * 20), ClosedLoop(3, stagger_s=0, warms_up=False))
    assert fake.most_in_flight == 3
    assert {record.client for record in run.records} == {0, 1, 2}
    assert [record.request for record in run.records] == list(range(20))
    for client in range(3):
        mine = [record for record in run.records if record.client == client]
        for before, after in pairwise(mine):
            assert after.due_s == before.ended_s, "it was free then"
            assert after.sent_s >= after.due_s


def test_clients_begin_one_after_another_as_in_the_paper() -> None:
    load = ClosedLoop(8, stagger_s=0.004, seed=3, warms_up=False)

    def begun() -> dict[Any, Any]:
        """Returns when each client began. No request is answered before all have."""
        records = measured(Memory(gather=8), planned(*[None] * 20), load).records
        return {record.client: record.due_s for record in records[::-1]}

    first = begun()
    assert first == begun(), "drawn with the seed"
    assert set(first) == set(range(8))
    assert all(0 <= start_s <= 8 * 0.004 for start_s in first.values())
    assert len(set(first.values())) == len(first)


def test_a_client_holds_a_whole_session() -> None:
    requests = planned(*[None] * 3, session="a") + planned(*[None] * 3, session="b")
    run = measured(Memory(gather=2), requests, ClosedLoop(2, stagger_s=0, warms_up=False))
    assert [record.client for record in run.records] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_warm_ups_are_outside_the_record_and_have_other_prompts() -> None:
    target = Memory()
    run = measured(target, planned(*[None] * 5), ClosedLoop(4, stagger_s=0))
    assert len(run.records) == 5
    assert [tuple(prompt) for prompt in target.prompts] == [PROMPT[::-1]] * 4 + [PROMPT] * 5
    assert run.header.load["warm_ups"] == 4
    with pytest.raises(RequestFailedError, match="no"):
        measured(Memory(fails=True), planned(0.0), OpenLoop())


def test_failures_are_records() -> None:
    run = measured(Memory(fails=True), planned(0.0, 0.0), OpenLoop(num_warm_ups=0))
    assert [record.error for record in run.records] == ["no", "no"]
    assert run.complete == ()


def test_a_generator_that_sends_late_marks_the_run_invalid() -> None:
    run = measured(Memory(prepare_s=0.03), planned(*[0.0] * 8), OpenLoop(num_warm_ups=0))
    assert run.header.lag_s["p99"] >= 7 * 0.03
    assert "the load generator sent requests up to" in str(run.header.invalid)
    assert "give it a core of its own" in str(run.header.invalid)


def test_a_generator_that_stalls_marks_the_run_invalid() -> None:
    run = measured(Memory(blocks_s=0.1), planned(None, None, None), ClosedLoop(1, stagger_s=0, warms_up=False))
    assert run.header.lag_s["loop_p99"] >= 0.05
    assert run.header.invalid is not None


def test_a_run_needs_requests_and_times() -> None:
    with pytest.raises(InvalidArgumentError, match="no requests"):
        measured(Memory(), [], OpenLoop())
    with pytest.raises(InvalidArgumentError, match="request 1 has no due time: an open loop needs arrivals"):
        measured(Memory(), planned(0.0, None), OpenLoop())
    with pytest.raises(InvalidArgumentError, match="0 clients"):
        ClosedLoop(0)
