"""Replicas on two machines of a cluster: nodes of Ray on this machine, with addresses of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import fastgen
from tests.serving.replicas.ray_cluster import RayCluster, joined_machine, ray_cluster
from tests.serving.server_process import ServerProcess, served
from tests.serving.started import started_by

SECOND = "127.0.0.2"
PROMPTS = [[10 + number, 11, 12, 13 + number] for number in range(40)]
NUM_NEW = 400
WAIT_S = 180.0


def machines_of_replicas(cluster: RayCluster) -> list[str]:
    """Returns the address of each running replica's machine."""
    replicas = cluster.applications()["fastgen"]["deployments"]["Replicas"]["replicas"]
    return sorted(each["node_ip"] for each in replicas if each["state"] == "RUNNING")


def answer(server: ServerProcess, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_new_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0}
    response = httpx2.post(f"{server.address}/generate", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["completions"][0]["token_ids"]
    return token_ids


def until_busy(server: ServerProcess, num_replicas: int) -> None:
    """Waits until so many replicas have requests."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        views = httpx2.get(f"{server.address}/live", timeout=WAIT_S).json()["replicas"]
        if sum(view["outstanding_tokens"] > 0 for view in views) == num_replicas:
            return
    raise AssertionError(f"no {num_replicas} replicas have requests")


@pytest.mark.slow
def test_a_machine_that_is_lost_loses_no_request_that_had_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with fastgen.load("tiny-llama") as llm:
        outputs = llm.generate(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True, temperature=0.0)
        expected = [list(output.token_ids) for output in outputs]
    with ray_cluster(num_cpus=1) as cluster, joined_machine(cluster, SECOND, num_cpus=1) as machine:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.setitem(os.environ, name, cluster.environment[name])
        flags = ("--replicas", "2", "--num-threads", "1", "--address", cluster.address)
        with served("tiny-llama", *flags) as server, ThreadPoolExecutor(len(PROMPTS)) as pool:
            machines = machines_of_replicas(cluster)
            assert len(set(machines)) == 2
            assert SECOND in machines
            asked = [pool.submit(answer, server, prompt) for prompt in PROMPTS]
            until_busy(server, 2)
            for process in started_by(machine.pid, ""):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            assert [one.result() for one in asked] == expected
            assert answer(server, PROMPTS[0]) == expected[0]
