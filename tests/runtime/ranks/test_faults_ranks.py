"""A rank that ends or hangs ends the model within seconds, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import fastgen
from fastgen.compile.host import rank_memory
from fastgen.errors import InvalidArgumentError, RankError
from fastgen.runtime.llm import LLM
from tests.runtime.ranks.models import prompts, save_family

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


def run_until_lost(llm: LLM, fault: int) -> tuple[str, float]:
    """The error of a request during which the first other rank gets the signal ``fault``, and the seconds it took."""
    (process,) = followers(os.getpid())
    stream = llm.stream(prompts(1)[0], max_new_tokens=120, ignore_eos=True)
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


def test_ranks_end_with_their_leader(directory: Path) -> None:
    """Even if it is killed in the middle of a step."""
    code = f"""
        import fastgen
        llm = fastgen.load({str(directory)!r}, tensor_parallel=2)
        stream = llm.stream([5, 6, 7], max_new_tokens=150, ignore_eos=True)
        next(stream)
        print("running", flush=True)
        for _ in range(1000):
            for _ in llm.stream([5, 6, 7], max_new_tokens=150, ignore_eos=True): pass
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "running\n"
        (process,) = followers(leader.pid)
        leader.kill()
    deadline_s = time.monotonic() + BOUND_S
    while is_there(process) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_there(process)


def test_a_rank_that_cannot_load_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.runtime.arrangement.__version__", "0.0")
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*this rank is of version .*, and the leader of 0.0$"):
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
    with pytest.raises(RankError, match=r"^rank 1 of 2 \(process \d+\) was ended by signal SIGKILL$"):
        fastgen.load(directory, tensor_parallel=2, quantize="int8")
    killer.join()
    assert not followers(os.getpid())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3: 4 heads cannot be split evenly; .* over 1, 2, 4 devices"),
        ({"tensor_parallel": 1000}, "tensor_parallel=1000: this machine has .* cores"),
        ({"tensor_parallel": 2, "sealed": True}, "a sealed bundle has the kernels of one rank only"),
        ({"tensor_parallel": 0}, "tensor_parallel=0: expected an integer of at least 1"),
    ],
)
def test_bad_arrangements_are_refused_before_anything_is_loaded(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        fastgen.load(directory, **options)  # type: ignore[arg-type]
    assert not followers(os.getpid())
