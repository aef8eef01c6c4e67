"""A rank that ends or hangs ends the model within seconds, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastgen
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host import rank_memory
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError, RankError
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.measure import ModelBuild
from fastgen.models.shard.shard import shard
from fastgen.models.spec import Rank
from fastgen.options import LoadOptions
from fastgen.runtime.arrangement import check_arrangement, start_team
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.model_source import ModelSource
from fastgen.runtime.ranks.setup import RankSetup, file_states
from fastgen.runtime.ranks.team import LOADED, Team
from tests.fast import cases
from tests.runtime.ranks.models import prompts, save_family

KILLED = r"^rank 1 of 2 \(process \d+\) was ended by signal SIGKILL$"
# The bound on how long a fault may stay unnoticed: a wait for a rank, and as much again for a loaded machine.
BOUND_S = 2 * rank_memory.TIMEOUT_S


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


def followers(parent: int) -> list[int]:
    """The processes of ranks that ``parent`` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdigit() else []
            command = (entry / "cmdline").read_bytes() if fields else b""
        except OSError:
            continue
        if fields and fields[1] == str(parent) and b"fastgen.runtime.ranks.follower" in command:
            found.append(int(entry.name))
    return sorted(found)


def is_there(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def run_until_lost(
    llm: LLM, fault: int, prompt: list[int] | None = None, max_new_tokens: int = 120
) -> tuple[str, float]:
    """The error of a request during which the first other rank gets the signal ``fault``, and the seconds it took."""
    (process,) = followers(os.getpid())
    stream = llm.stream(prompt or prompts(1)[0], max_new_tokens=max_new_tokens, ignore_eos=True)
    next(stream)
    os.kill(process, fault)
    began_s = time.monotonic()
    for _ in stream:
        pass
    output = stream.output
    assert output.finish_reason == "error"
    assert output.error is not None
    return output.error, time.monotonic() - began_s


@pytest.mark.parametrize("target", ["cpp", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_model(directory: Path, target: str, fault: signal.Signals) -> None:
    with fastgen.load(directory, tensor_parallel=2, target=target) as llm:
        (process,) = followers(os.getpid())
        error, took_s = run_until_lost(llm, fault)
        assert took_s < BOUND_S
        assert "rank 1 of 2" in error
        if fault == signal.SIGKILL:
            assert "was ended by signal SIGKILL" in error
        again = llm.generate([5, 6, 7], max_new_tokens=2)  # it says so at once, and does not wait again
        assert again.error is not None
        assert "the model has to be loaded again" in again.error
    assert not is_there(process)
    assert not followers(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_ten_lost_ranks_under_load(directory: Path, fault: signal.Signals) -> None:
    """Each of three other ranks, at any time of a step, while several requests run."""
    rng = random.Random(int(fault))
    for turn in range(10):
        with fastgen.load(directory, tensor_parallel=4, num_threads=4) as llm:
            processes = followers(os.getpid())
            assert len(processes) == 3
            streams = [llm.stream(prompt, max_new_tokens=100, ignore_eos=True) for prompt in prompts(4)]
            for _ in range(rng.randint(1, 20)):
                next(streams[0])
            os.kill(processes[turn % 3], fault)
            began_s = time.monotonic()
            for stream in streams:
                for _ in stream:
                    pass
                assert "the model has to be loaded again" in (stream.output.error or "")
            assert time.monotonic() - began_s < BOUND_S
        assert not any(is_there(process) for process in processes)


def test_closing_leaves_no_process_and_no_memory(directory: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with fastgen.load(directory, tensor_parallel=2) as llm:
        llm.generate([5, 6, 7], max_new_tokens=2)
        assert len(followers(os.getpid())) == 1
    assert not followers(os.getpid())
    assert set(os.listdir("/dev/shm")) <= before


@contextmanager
def leading(directory: Path, num_ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that leads ranks and answers requests without end, and its followers, the first token being there. It
    says with what an answer ended if not well."""
    code = f"""
        import fastgen
        llm = fastgen.load({str(directory)!r}, tensor_parallel={num_ranks}, num_threads={num_ranks})
        print("running", flush=True)
        while True:
            output = llm.generate([5, 6, 7], max_new_tokens=150, ignore_eos=True)
            if output.error: raise SystemExit(output.error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leader:
        try:
            assert leader.stdout is not None
            assert leader.stdout.readline() == "running\n"
            yield leader, followers(leader.pid)
        finally:
            leader.kill()


def wait_for_end(processes: list[int]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while any(map(is_there, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_there, processes))


@pytest.mark.parametrize(
    ("is_stopped", "num_turns"), cases(itertools.product([False, True], [1, 10]), fast=[(True, 1)])
)
def test_ranks_end_with_their_leader(directory: Path, is_stopped: bool, num_turns: int) -> None:
    """Even if it is killed in the middle of a step, and even those that are stopped and can do nothing themselves."""
    draw, num_ranks = random.Random(num_turns), 2 if num_turns == 1 else 4
    for _ in range(num_turns):
        with leading(directory, num_ranks) as (leader, processes):
            assert len(processes) == num_ranks - 1
            time.sleep(draw.uniform(0, 0.1))
            if is_stopped:
                os.kill(processes[0], signal.SIGSTOP)
            leader.kill()
            wait_for_end(processes)


@pytest.mark.slow
def test_ten_stopped_leaders_under_load(directory: Path) -> None:
    """Others that are in the middle of a step end when their wait for it does, and it says so when it continues. Others
    that wait for its next step continue with it."""
    draw = random.Random(3)
    for _ in range(10):
        with leading(directory, 4) as (leader, processes):
            time.sleep(draw.uniform(0, 0.1))
            os.kill(leader.pid, signal.SIGSTOP)
            time.sleep(rank_memory.TIMEOUT_S + 2)
            are_there = [is_there(process) for process in processes]
            if not all(are_there):
                wait_for_end(processes)
            os.kill(leader.pid, signal.SIGCONT)
            if not all(are_there):
                assert leader.wait(BOUND_S) == 1
                assert leader.stderr is not None
                assert "the model has to be loaded again" in leader.stderr.read()
            else:
                time.sleep(1)
                assert leader.poll() is None
        wait_for_end(processes)


@pytest.mark.slow
def test_ranks_wait_for_a_leader_that_is_stopped_between_requests(directory: Path) -> None:
    """They have nothing to do, and continue with it."""
    code = f"""
        import fastgen
        with fastgen.load({str(directory)!r}, tensor_parallel=2) as llm:
            for _ in range(2):
                print(llm.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True, temperature=0).token_ids, flush=True)
                input()
    """
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        first, processes = leader.stdout.readline(), followers(leader.pid)
        os.kill(leader.pid, signal.SIGSTOP)
        time.sleep(rank_memory.TIMEOUT_S + 2)
        assert all(map(is_there, processes))
        os.kill(leader.pid, signal.SIGCONT)
        leader.stdin.write("\n\n")
        leader.stdin.flush()
        assert leader.stdout.readline() == first
        assert leader.wait(BOUND_S) == 0
    assert not any(map(is_there, processes))


def test_a_rank_that_cannot_load_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.runtime.arrangement.__version__", "0.0")
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*this rank is of version .*, and the leader of 0.0$"):
        fastgen.load(directory, tensor_parallel=2)
    assert not followers(os.getpid())


def test_a_rank_that_finds_another_checkpoint_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before_a_change(checkpoint: Checkpoint) -> dict[Path, tuple[int, int]]:
        return {file: (size, changed_ns - 1) for file, (size, changed_ns) in file_states(checkpoint).items()}

    monkeypatch.setattr("fastgen.runtime.arrangement.file_states", before_a_change)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*model.safetensors has changed since the leader opened"):
        fastgen.load(directory, tensor_parallel=2)
    assert not followers(os.getpid())


def test_a_rank_that_is_lost_while_it_loads_ends_the_load(directory: Path) -> None:
    """Scales of int8 are agreed on by all ranks, so this process is in such a wait."""

    def kill() -> None:
        while not (there := followers(os.getpid())):
            time.sleep(0.01)
        os.kill(there[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError, match=KILLED):
        fastgen.load(directory, tensor_parallel=2, quantize="int8")
    killer.join()
    assert not followers(os.getpid())


@pytest.mark.slow
def test_a_rank_that_is_lost_before_it_is_told_what_to_load_ends_the_load(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.kill()
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    of_the_team = SimpleNamespace(**{**vars(subprocess), "Popen": Killed})  # others start processes that live
    monkeypatch.setattr("fastgen.runtime.ranks.team.subprocess", of_the_team)
    with pytest.raises(RankError, match=KILLED):
        fastgen.load(directory, tensor_parallel=2)
    assert not followers(os.getpid())


def test_a_rank_that_is_lost_before_it_is_told_to_continue_ends_the_load(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until = Team._wait_until

    def wait_and_kill(team: Team, message: str) -> None:
        wait_until(team, message)
        if message == LOADED:
            [rank] = followers(os.getpid())
            os.kill(rank, signal.SIGKILL)
            while followers(os.getpid()):
                time.sleep(0.01)

    monkeypatch.setattr(Team, "_wait_until", wait_and_kill)
    with pytest.raises(RankError, match=KILLED):
        fastgen.load(directory, tensor_parallel=2)
    assert not followers(os.getpid())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3: 4 heads cannot be split evenly; .* over 1, 2, 4 devices"),
        ({"tensor_parallel": 1000}, "tensor_parallel=1000: this machine has .* cores, .*; ask for at most"),
        ({"tensor_parallel": 2, "sealed": True}, "a sealed bundle has the kernels of one rank only"),
        ({"tensor_parallel": 0}, "tensor_parallel=0: expected an integer of at least 1"),
        ({"tensor_parallel": 4, "quantize": "int4"}, "tensor_parallel=4: a share of .* is no multiple of the 32"),
    ],
)
def test_bad_arrangements_are_refused_before_anything_is_loaded(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        fastgen.load(directory, **options)  # type: ignore[arg-type]
    assert not followers(os.getpid())


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Device]:
    """Has this machine show GPUs of these names."""
    shown = [Device("cuda", name, memory_bytes=1 << 34, index=index) for index, name in enumerate(names)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(shown))
    monkeypatch.setattr("fastgen.runtime.arrangement.current", lambda name: shown[int(name.removeprefix("cuda:"))])
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    return shown


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (0, 4, "tensor_parallel=4: each rank needs a GPU, and this machine has 3; ask for at most 3, or load with"),
        (2, 2, "tensor_parallel=2: each rank needs a GPU, and this machine has 1 from cuda:2 on; ask for at most 1"),
        (0, 3, "ranks need equal GPUs, and cuda:0 is H100 of .* bytes, cuda:2 L4 of .*; choose others by CUDA_VISIBLE"),
    ],
)
def test_gpus_that_cannot_share_a_model_are_refused(
    first: int, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = gpus(monkeypatch, "H100", "H100", "L4")
    with pytest.raises(InvalidArgumentError, match=message):
        check_arrangement(LoadOptions(model="tiny-llama", tensor_parallel=count), shown[first])


def test_equal_gpus_may_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, options = gpus(monkeypatch, "L4", "H100", "H100"), LoadOptions(model="tiny-llama", tensor_parallel=2)
    check_arrangement(options, shown[1])
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=r"this torch .* is built without NCCL"):
        check_arrangement(options, shown[1])


def test_ranks_have_neighbouring_gpus(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the GPU behind that of the rank before, and all ranks have the same place to meet."""
    setups: list[RankSetup] = []
    monkeypatch.setattr("fastgen.runtime.arrangement.Team", lambda given: setups.extend(given))
    options = LoadOptions(model=directory, tensor_parallel=4)
    device = Device("cuda", "a GPU", memory_bytes=1 << 34, index=2)
    source = ModelSource.open(options)
    described = ModelBuild(shard(source.spec, Rank(0, 4), None), source.dtype, TargetFacts())
    memory = MemoryModel(described, current("cpu"))
    config = resolve_engine_config(memory, options)
    start_team(source, described, config, device, 1, memory.ledger(config), is_timed=True)
    assert all(each.is_timed for each in setups)
    assert [str(each.device) for each in setups] == ["cuda:3", "cuda:4", "cuda:5"]
    (meeting,) = {each.meeting for each in setups}
    assert meeting is not None
    assert meeting.library == "nccl"
    assert not meeting.file.exists()
    meeting.file.parent.rmdir()
