"""A server whose model is shared by ranks: one that is lost ends the engine, and the server starts it again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.serving.server_process import ServerProcess, served

# A wait for a rank takes 10 s at most; loading takes some seconds more, longer on a loaded machine.
BOUND_S = 120.0
FLAGS = ("--tensor-parallel", "2", "--num-threads", "2", "--engine-timeout", "20")


def descendants(process: int) -> dict[str, int]:
    """The engine's process and that of its follower, by what they are."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
                    commands[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
    found = {}
    for name, module in (
        ("leader", b"fastgen.serving.engine.process"),
        ("follower", b"fastgen.runtime.ranks.follower"),
    ):
        for each, command in commands.items():
            above = parents[each]
            if module in command and process in (above, parents.get(above)):
                found[name] = each
    return found


def answer(server: ServerProcess, num_tokens: int = 4) -> httpx2.Response:
    body = {"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": num_tokens, "temperature": 0}
    return httpx2.post(f"{server.address}/v1/completions", json=body, timeout=BOUND_S)


def stream_until_lost(server: ServerProcess, begun: threading.Barrier, prompt: str) -> list[str]:
    """The lines of a long answer, of which the first comes before ``begun`` is passed."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.address}/v1/completions", json=body, timeout=BOUND_S) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        begun.wait(BOUND_S)
        return [first, *lines]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("rank", "turns"), [("leader", 10), ("follower", 1)])
def test_a_lost_rank_is_replaced_with_its_engine(rank: str, turns: int, fault: signal.Signals) -> None:
    """Whatever part of a step it is in. Requests end with the reason, and nothing of the old ranks is left."""
    shared, draw, prompts = set(os.listdir("/dev/shm")), random.Random(int(fault)), ("Once", "One day", "The cat")
    with served("tiny-llama", *FLAGS) as server, ThreadPoolExecutor(len(prompts)) as pool:
        text = answer(server).json()["choices"][0]["text"]
        for _ in range(turns):
            before = descendants(server.process.pid)
            assert before.keys() == {"leader", "follower"}
            begun = threading.Barrier(1 + len(prompts))
            streams = [pool.submit(stream_until_lost, server, begun, prompt) for prompt in prompts]
            begun.wait(BOUND_S)
            time.sleep(draw.uniform(0, 0.05))
            began_s = time.monotonic()
            os.kill(before[rank], fault)
            for stream in streams:
                lines = stream.result(BOUND_S)
                assert any("error" in line for line in lines), lines[-3:]
            while (found := answer(server)).status_code != 200:
                assert time.monotonic() - began_s < BOUND_S
                time.sleep(0.2)
            assert found.json()["choices"][0]["text"] == text
            after = descendants(server.process.pid)
            assert not set(before.values()) & set(after.values())
            assert not any(Path(f"/proc/{each}").exists() for each in before.values())
    assert not any(Path(f"/proc/{each}").exists() for each in after.values())
    assert set(os.listdir("/dev/shm")) <= shared


def test_a_port_that_is_taken_is_refused_before_ranks_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "fastgen", "serve", "tiny-llama", *FLAGS[:2], "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in ended.stderr
    assert "choose another port" in ended.stderr
    assert "weights" not in ended.stdout + ended.stderr
