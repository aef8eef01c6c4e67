"""An engine in this process as a target: tiny-llama under open and closed loops."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

import fastgen
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab.load.closed_loop import ClosedLoop
from fastgen.lab.load.engine_target import EngineTarget
from fastgen.lab.load.generator import LoadGenerator
from fastgen.lab.load.open_loop import OpenLoop
from fastgen.lab.load.recorder import INTERRUPTED
from fastgen.lab.load.target import Answer
from fastgen.lab.workloads.arrivals import Poisson, with_arrivals
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.synthetic import Chats, FixedLengths
from fastgen.runtime.answers.generation import Generation

LENGTHS = FixedLengths(num_prompt_tokens=40, num_new_tokens=12, num_requests=10)


@pytest.fixture(scope="module")
def target() -> Iterator[EngineTarget]:
    llm = fastgen.load("tiny-llama", max_num_seqs=4, num_threads=1)
    with EngineTarget(llm.release_engine(), {"model": "tiny-llama"}) as target:
        yield target


def requests(target: EngineTarget) -> list[PlannedRequest]:
    return LENGTHS.requests(vocab_size=target.engine.vocab_size, seed=0)


def test_open_and_closed_loops_answer_every_request_in_full(target: EngineTarget) -> None:
    arrivals = Poisson(50.0)
    runs = LoadGenerator(target)
    for run in (
        runs(with_arrivals(requests(target), arrivals, 0), OpenLoop(arrivals.facts()), LENGTHS.facts()),
        runs(requests(target), ClosedLoop(3), LENGTHS.facts()),
    ):
        assert len(run.complete) == 10
        for record in run.records:
            assert record.num_generated == 12
            assert record.finish_reason == "length"
            assert record.due_s <= record.sent_s < record.token_times_s[0]
            assert record.ended_s == record.token_times_s[-1]
        assert run.header.target["engine"]["max_num_seqs"] == 4
        assert run.header.target["model"] == "tiny-llama"
        assert run.header.workload["name"] == "fixed"
        assert run.header.duration_s == max(record.ended_s for record in run.records)


def test_turns_of_a_conversation_find_the_ones_before_in_the_prefix_cache(target: EngineTarget) -> None:
    chats = Chats(num_sessions=2, num_turns=3, num_prompt_tokens=32, num_new_tokens=16)
    planned = chats.requests(vocab_size=target.engine.vocab_size, seed=1)
    run = LoadGenerator(target)(planned, ClosedLoop(2, warms_up=False), chats.facts())
    assert [record.num_prompt_tokens for record in run.records] == [32, 80, 128] * 2
    assert [record.error for record in run.records] == [None] * 6
    # All of the prompt and the answer before, up to the last token, which was not computed, in whole blocks.
    assert [record.num_cached_tokens for record in run.records] == [0, 32, 80] * 2


def test_a_request_that_cannot_be_served_is_refused_before_the_run(target: EngineTarget) -> None:
    longest = target.engine.max_model_len
    too_long = [PlannedRequest(prompt_ids=(1,) * longest, num_new_tokens=5, due_s=0.0)]
    with pytest.raises(InvalidArgumentError, match="request 0 of the workload: "):
        LoadGenerator(target)(too_long, OpenLoop(), {})
    chats = Chats(num_sessions=1, num_turns=4, num_prompt_tokens=longest // 4, num_new_tokens=9)
    with pytest.raises(InvalidArgumentError, match="tokens at its end, and the engine takes"):
        LoadGenerator(target)(chats.requests(vocab_size=99, seed=0), ClosedLoop(1), {})


def test_cancelling_frees_the_engine(target: EngineTarget) -> None:
    num_tokens = target.engine.max_model_len - 20
    long = PlannedRequest(prompt_ids=(1,) * 20, num_new_tokens=num_tokens, due_s=0.0)

    async def run() -> None:
        async with asyncio.timeout(30):
            task = asyncio.create_task(target.send(target.prepare(long), answer := Answer()))
            while not target.engine.has_work:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(answer.token_times) < num_tokens
            await target.send(target.prepare(requests(target)[0]), Answer())

    asyncio.run(run())
    assert not target.engine.has_work


def test_an_interrupted_run_keeps_its_records_and_leaves_the_engine_ready(
    target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ended = 0
    main = threading.main_thread().ident
    assert main is not None

    def ended(generation: Generation) -> None:
        nonlocal num_ended
        num_ended += 1
        if num_ended == 3:
            signal.pthread_kill(main, signal.SIGINT)
        target._ended(generation)

    long = FixedLengths(num_prompt_tokens=40, num_new_tokens=100, num_requests=40)
    with monkeypatch.context() as patch:
        patch.setattr(target.engine.answers, "on_end", ended)
        planned = long.requests(vocab_size=target.engine.vocab_size, seed=0)
        run = LoadGenerator(target)(planned, ClosedLoop(8, stagger_s=0, warms_up=False), long.facts())
    assert run.header.interrupted
    assert 3 <= len(run.complete) < 40
    assert len(run.records) <= len(run.complete) + 8
    assert {record.error for record in run.records} == {None, INTERRUPTED}
    again = LoadGenerator(target)(requests(target), ClosedLoop(3), LENGTHS.facts())
    assert len(again.complete) == 10
    assert not target.engine.has_work


def test_an_engine_that_fails_ends_its_requests(target: EngineTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fastgen.load("tiny-llama", max_num_seqs=2, num_threads=1)
    with EngineTarget(llm.release_engine(), {}) as broken:

        def fail() -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(broken.engine, "step", fail)
        run = LoadGenerator(broken)(requests(broken), ClosedLoop(2, warms_up=False), {})
        assert {record.error for record in run.records} == {"the engine failed: ZeroDivisionError('oops')"}
        with pytest.raises(FastgenError, match="oops"):
            LoadGenerator(broken)(requests(broken), ClosedLoop(2), {})
