"""An engine's process that dies, stops, or cannot start; and requests that are cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from fastgen.models.checkpoint import hub
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.packed_logprobs import PackedLogprobs
from fastgen.serving.engine.process import _Open
from fastgen.serving.refusals import BadRequestError, EngineDiedError, UnavailableError
from fastgen.serving.service import Running, Service
from tests.fast import cases
from tests.serving.server_process import is_running

# Longer than anything here takes.
WAIT_S = 120.0
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
T = TypeVar("T")


class Live:
    """A service and its event loop, which runs while something is awaited."""

    def __init__(self, runner: asyncio.Runner, model: str | Path, **options: Any):
        self._runner = runner
        self.service = Service({"model": str(model), "max_num_seqs": 4, "num_threads": 1}, **options)
        self.run(self.service.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, WAIT_S))

    def submit(self, sampling: SamplingParams = LONG, *, is_stream: bool = True, num_prompt_tokens: int = 5) -> Running:
        prompt_ids = list(range(5, 5 + num_prompt_tokens))
        return self.run(self.service.submit(prompt_ids, sampling, is_stream=is_stream))

    def metrics(self) -> Metrics:
        return self.run(self.service.engine.ask("metrics", Metrics))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.service.engine.pid
        assert pid is not None
        os.kill(pid, number)
        return pid

    def until_ready_again(self) -> None:
        async def wait() -> None:
            while self.service.state == "ready":
                await asyncio.sleep(0.01)
            while self.service.state != "ready":
                await asyncio.sleep(0.01)

        self.run(wait())


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def live(runner: asyncio.Runner) -> Iterator[Live]:
    live = Live(runner, "tiny-llama", engine_timeout_s=3.0)
    yield live
    live.run(live.service.stop())


async def first_update(running: Running) -> None:
    async for _ in running:
        return


def whole(output: GenerationOutput) -> tuple[str, list[int], str]:
    return output.text, output.token_ids, output.finish_reason


@pytest.mark.parametrize("is_stream", cases([True, False], fast=[True]))
def test_blocks_are_free_before_the_step_after_a_request_was_given_up(live: Live, is_stream: bool) -> None:
    running = [live.submit(is_stream=is_stream) for _ in range(6)]  # two of them wait

    async def until_all_run() -> None:
        while not all(each._request.has_started for each in running[:4]):
            await asyncio.sleep(0.005)

    live.run(until_all_run())
    before = live.metrics()
    assert (before.requests_running, before.requests_waiting) == (4, 2)

    async def cancel_all() -> None:
        for each in running:
            each.cancel()
            each.cancel()

    live.run(cancel_all())
    # What is asked is answered in the order in which it was said, so no step lies between.
    after = live.metrics()
    assert (after.kv_blocks_held, after.requests_running, after.requests_waiting) == (0, 0, 0)
    assert after.sequences_finished_total["cancelled"] - before.sequences_finished_total.get("cancelled", 0) == 6
    assert live.service.engine.num_open == 0


def test_what_cannot_be_served_is_refused_by_the_engine_and_nothing_is_left_of_it(live: Live) -> None:
    running = live.submit(SamplingParams(max_new_tokens=100_000))
    with pytest.raises(BadRequestError, match="max_model_len"):
        live.run(running.output())
    assert live.service.engine.num_open == 0


def test_a_signal_to_all_processes_of_a_terminal_or_a_service_does_not_end_the_engine(live: Live) -> None:
    """Its server gets the signal too, and decides when the engine ends."""
    pid = live.kill(signal.SIGINT)
    live.kill(signal.SIGTERM)
    assert live.run(live.submit(SamplingParams(max_new_tokens=3)).output()).finish_reason == "length"
    assert live.service.engine.pid == pid


@pytest.mark.slow  # test_storm kills one under load
def test_kill_fails_what_is_in_the_engine_and_another_gives_the_same_answers(live: Live) -> None:
    asked = SamplingParams(max_new_tokens=20, temperature=0.9, seed=3)
    expected = whole(live.run(live.submit(asked).output()))
    live.run(live.service.metrics_text())
    counted = live.service.metrics.engine()
    assert counted is not None
    streaming, waiting = live.submit(), live.submit(is_stream=False)
    live.run(first_update(streaming))
    old = live.kill()
    time.sleep(0.3)  # the process is gone, and this loop has not noticed yet
    with pytest.raises((UnavailableError, EngineDiedError)):
        live.run(live.submit().output())
    for running in (streaming, waiting):
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            live.run(running.output())
    with pytest.raises(UnavailableError) as refused:
        live.submit()
    assert refused.value.retry_after_s > 0
    live.until_ready_again()
    assert live.service.engine.pid != old
    answer = live.run(live.submit(asked).output())
    assert whole(answer) == expected
    text = live.run(live.service.metrics_text()).decode()
    assert "fastgen_engine_restarts_total 1.0" in text
    again = live.service.metrics.engine()
    assert again is not None
    assert again.generation_tokens_total >= counted.generation_tokens_total + len(answer.token_ids)


@pytest.mark.slow
def test_a_process_that_is_silent_is_ended_and_started_again(live: Live) -> None:
    running = live.submit()
    live.run(first_update(running))
    old = live.kill(signal.SIGSTOP)
    with pytest.raises(EngineDiedError, match="silent"):
        live.run(running.output())
    live.until_ready_again()
    assert not is_running(old)
    assert live.run(live.submit(SamplingParams(max_new_tokens=3)).output()).finish_reason == "length"


@pytest.mark.slow
def test_an_idle_engine_that_is_asked_nothing_is_not_taken_for_silent(live: Live) -> None:
    pid = live.service.engine.pid
    live.run(asyncio.sleep(4.0))
    time.sleep(3.5)  # nor is one that this loop had no time to listen to
    live.run(asyncio.sleep(1.0))
    live.kill(signal.SIGSTOP)
    time.sleep(3.5)  # nor one that stood still with this loop
    live.kill(signal.SIGCONT)
    live.run(asyncio.sleep(1.0))
    assert (live.service.engine.pid, live.service.state) == (pid, "ready")


@pytest.mark.slow
def test_an_engine_that_cannot_start_again_is_given_up_with_the_reason(runner: asyncio.Runner, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(hub.locate("tiny-llama"), model)
    live = Live(runner, model)
    try:
        (model / "config.json").unlink()
        live.kill()
        failure = live.service.engine.process.failure
        assert failure is not None
        assert "3 times in a row" in live.run(asyncio.wait_for(failure, WAIT_S))
        assert "config.json" in failure.result()
        assert live.service.state == "failed"
        with pytest.raises(UnavailableError):
            live.submit()
    finally:
        live.run(live.service.stop())


@pytest.mark.slow
def test_draining_takes_no_more_and_ends_what_is_left_when_its_time_is_over(runner: asyncio.Runner) -> None:
    live = Live(runner, "tiny-llama")
    pid = live.service.engine.pid
    assert pid is not None

    async def drain() -> GenerationOutput:
        short = await live.service.submit([5, 6], SamplingParams(max_new_tokens=2), is_stream=False)
        long = await live.service.submit([5, 6], LONG, is_stream=True)
        finishing, ending = asyncio.create_task(short.output()), asyncio.create_task(long.output())
        await finishing
        draining = asyncio.create_task(live.service.drain(0.01))
        await asyncio.sleep(0)
        assert live.service.state == "draining"
        with pytest.raises(UnavailableError, match="ending"):
            await live.service.submit([1], LONG, is_stream=True)
        await draining
        with pytest.raises(UnavailableError, match="ends"):
            await ending
        return await finishing

    try:
        assert live.run(drain()).finish_reason == "length"
    finally:
        live.run(live.service.stop())
    assert not is_running(pid)


def test_an_engine_that_lost_a_rank_ends_with_the_reason_and_an_error(tmp_path: Path) -> None:
    code = """
from fastgen.errors import RankError
from fastgen.serving.engine import process

def lose(loop):
    raise RankError("rank 1 of 2 has ended")

process.EngineLoop.run = lose
process.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, f"ipc://{tmp_path}/engine", str(os.getpid())],
        input=json.dumps({"model": "tiny-opt", "num_threads": 1}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the engine ends: rank 1 of 2 has ended" in done.stderr


def test_reported_log_probabilities_are_kept_no_longer() -> None:
    """A million of them take 50 ms to free, all at once, when the request is dropped."""
    request = Request(1, [5], SamplingParams(n=2, logprobs=1, max_new_tokens=9), 0.0)
    generation = Generation(request)
    connection: Any = SimpleNamespace(progress=[])
    opened = _Open(connection, 7, generation, request.sampling, is_stream=True)
    first, second = generation.completions
    found: list[list[list[dict[int, float]]]] = [[], []]
    for number in range(5):
        for completion in (first, second)[: 1 + number % 2]:
            logprobs = {number: -1.0, 9: -2.0}
            completion.append(SampledToken(number, logprobs), frozenset(), 0.0)
        opened.report(0.0)
        assert first.logprobs == second.logprobs == []
        for progress in connection.progress:
            packed: PackedLogprobs[dict[int, float]] = PackedLogprobs(progress.logprobs, len(progress.token_ids))
            found[progress.index].append([*packed])
            assert [next(iter(each)) for each in packed] == progress.token_ids
        connection.progress.clear()
    of_first, of_second = ([each for piece in pieces for each in piece] for pieces in found)
    assert of_first == [{number: -1.0, 9: -2.0} for number in range(5)]
    assert of_second == [{number: -1.0, 9: -2.0} for number in (1, 3)]
