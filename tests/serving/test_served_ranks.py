"""A server whose model is shared by ranks: one that is lost ends the engine, and the server starts it again."""

from __future__ import annotations

import os
import signal
import time
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", ["leader", "follower"])
def test_a_lost_rank_is_replaced_with_its_engine(rank: str, fault: signal.Signals) -> None:
    with served("tiny-llama", *FLAGS) as server:
        text = answer(server).json()["choices"][0]["text"]
        before = descendants(server.process.pid)
        assert before.keys() == {"leader", "follower"}
        body = {"model": "tiny-llama", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        began_s = time.monotonic()
        with httpx2.stream("POST", f"{server.address}/v1/completions", json=body, timeout=BOUND_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(before[rank], fault)
            rest = list(lines)
        assert "[DONE]" not in rest[-2:] or any("error" in line for line in rest)
        while (found := answer(server)).status_code != 200:
            assert time.monotonic() - began_s < BOUND_S
            time.sleep(0.2)
        assert found.json()["choices"][0]["text"] == text
        after = descendants(server.process.pid)
        assert not set(before.values()) & set(after.values())
        assert not any(Path(f"/proc/{each}").exists() for each in before.values())
    assert not any(Path(f"/proc/{each}").exists() for each in after.values())
