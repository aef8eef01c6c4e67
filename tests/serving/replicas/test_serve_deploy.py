"""The printed file on a real cluster: deployed with Ray's own command, scaled by deploying it again, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.serving.replicas.ray_cluster import RayCluster, free_ports, ray_cluster

pytestmark = pytest.mark.slow
# A replica is ready after about 10 s on two cores that have other work.
READY_S = 180.0
BODY = {"model": "tiny-llama", "max_tokens": 8, "temperature": 0}
NUM_THREADS = 4
# The pause after a failure for which the server names none.
RETRY_S = 0.05
# Most requests that may fail in a rolling update of replicas and server, three of each thread: one whose connection was
# in the queue of the old server when that stopped to listen, and two while no replica was known.
MOST_FAILURES = 3 * NUM_THREADS


def printed(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastgen", "serve", "tiny-llama", *flags, "--print-config"]
    value: dict[str, Any] = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return value


def deploy(cluster: RayCluster, config: dict[str, Any], file: Path) -> None:
    file.write_text(yaml.safe_dump(config))
    cluster.serve("deploy", str(file))


def wait_for(cluster: RayCluster, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the state of the application once it meets ``condition``."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        application = cluster.applications().get("fastgen")
        if application is not None and condition(application):
            return dict(application)
        time.sleep(0.25)
    raise AssertionError(json.dumps(cluster.applications(), indent=1))


def num_running(application: dict[str, Any]) -> int:
    replicas = application["deployments"].get("Replicas", {}).get("replicas", [])
    return sum(replica["state"] == "RUNNING" for replica in replicas)


def text_of(port: int, prompt: str) -> str:
    url = f"http://127.0.0.1:{port}/v1/completions"
    response = httpx2.post(url, json=BODY | {"prompt": prompt}, timeout=READY_S)
    return str(response.raise_for_status().json()["choices"][0]["text"])


@dataclass
class Asked:
    """The answers to requests, and what came in place of one: an error of the server, or of the connection."""

    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def asking(port: int) -> Iterator[Asked]:
    """Sends requests one after the other from several threads, until the block is left. Half of the threads open a
    connection for each request, the others keep theirs. After a failure a thread waits as long as the server says, as
    clients do.
    """
    asked, has_ended = Asked(), threading.Event()

    def ask(client: httpx2.Client) -> None:
        pause_s = RETRY_S
        try:
            response = client.post("/v1/completions", json=BODY | {"prompt": "Once upon a time"})
            if response.status_code == 200:
                asked.answers.append(response.json()["choices"][0]["text"])
                return
            asked.failures.append(f"{response.status_code} {response.text}")
            pause_s = float(response.headers.get("retry-after", RETRY_S))
        except Exception as error:  # all count, and none may end the thread
            asked.failures.append(repr(error))
        has_ended.wait(pause_s)

    def ask_on(keeps_connection: bool) -> None:
        limits = httpx2.Limits(max_keepalive_connections=int(keeps_connection))
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_S, limits=limits) as client:
            while not has_ended.is_set():
                ask(client)

    threads = [threading.Thread(target=ask_on, args=(number % 2 == 0,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def until_more(asked: Asked, number: int = 20) -> None:
    """Waits until more requests were answered."""
    wanted, until_s = len(asked.answers) + number, time.monotonic() + READY_S
    while len(asked.answers) < wanted:
        assert time.monotonic() < until_s, asked.failures[-5:]
        time.sleep(0.05)


def grpc_status(port: int) -> Any:
    """Returns what the standard health service answers on a new connection."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        return health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=READY_S).status


def test_replicas_come_go_and_are_replaced_under_load(tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    flags = ("--replicas", "2", "--num-threads", "1", "--memory", "1GiB")
    config = printed(*flags, "--port", str(port), "--grpc-port", str(grpc_port))
    (application,) = config["applications"]
    replicas, file = application["deployments"][0], tmp_path / "fastgen.yaml"
    with ray_cluster(num_cpus=3) as cluster:
        replicas["num_replicas"] = 1
        deploy(cluster, config, file)
        wait_for(cluster, lambda each: each["status"] == "RUNNING")
        expected = text_of(port, "Once upon a time")
        with asking(port) as asked:
            for number in (2, 1, 2):
                replicas["num_replicas"] = number
                deploy(cluster, config, file)
                wait_for(cluster, lambda each, n=number: each["status"] == "RUNNING" and num_running(each) == n)
                until_more(asked)
            assert asked.failures == []
            before = ids_of(wait_for(cluster, lambda each: num_running(each) == 2))
            application["args"]["max_num_seqs"] = 8  # a rolling update of replicas and server
            deploy(cluster, config, file)
            wait_for(cluster, lambda each: each["status"] == "RUNNING" and not before & ids_of(each))
            until_more(asked)
            num_during_update = len(asked.failures)
            until_more(asked, 4 * NUM_THREADS)
        assert set(asked.answers) == {expected}
        assert len(asked.failures) == num_during_update, "the update is over, and requests still fail"
        assert num_during_update <= MOST_FAILURES, asked.failures
        assert "the server is starting" not in " ".join(asked.failures), "a server got requests before it was ready"
        assert grpc_status(grpc_port) == health_pb2.HealthCheckResponse.SERVING


def ids_of(application: dict[str, Any]) -> set[str]:
    """Returns the ids of all replicas of both deployments."""
    return {
        replica["replica_id"]
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
    }


def test_the_printed_file_is_deployed_scaled_and_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = printed("--replicas", "1", "--num-threads", "1", "--memory", "1GiB", "--port", str(port))
    file = tmp_path / "fastgen.yaml"
    with ray_cluster(num_cpus=2) as cluster:
        deploy(cluster, config, file)
        application = wait_for(cluster, lambda each: each["status"] in ("RUNNING", "DEPLOY_FAILED"))
        assert (application["status"], num_running(application)) == ("RUNNING", 1), application["message"]
        answer = text_of(port, "Once upon a time")
        assert answer

        config["applications"][0]["deployments"][0]["num_replicas"] = 2
        before = application["deployments"]["Replicas"]["replicas"][0]["replica_id"]
        deploy(cluster, config, file)
        application = wait_for(cluster, lambda each: each["status"] == "RUNNING" and num_running(each) == 2)
        ids = [replica["replica_id"] for replica in application["deployments"]["Replicas"]["replicas"]]
        assert before in ids, "the first replica was started anew"
        assert text_of(port, "Once upon a time") == answer

        config["applications"][0]["args"] |= {"num_threads": 3, "wait_for_machines_s": 0}
        deploy(cluster, config, file)
        application = wait_for(cluster, lambda each: each["status"] in ("DEPLOY_FAILED", "UNHEALTHY"))
        assert (
            "it needs 3 CPUs and 1.00 GiB of memory of one machine, and there is room for 0" in application["message"]
        )
        assert text_of(port, "Once upon a time") == answer, "what ran before no longer answers"

        cluster.serve("shutdown", "-y")
        until_s = time.monotonic() + READY_S
        while cluster.applications():
            assert time.monotonic() < until_s
            time.sleep(0.25)
        with pytest.raises(httpx2.ConnectError, match="refused"):
            text_of(port, "Once upon a time")


def test_ray_serve_scales_by_the_requests_that_are_ongoing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = printed("--replicas", "2", "--num-threads", "1", "--memory", "1GiB", "--port", str(port))
    replicas, file = config["applications"][0]["deployments"][0], tmp_path / "fastgen.yaml"
    del replicas["num_replicas"]
    replicas["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 2.0,
    }
    with ray_cluster(num_cpus=3) as cluster:
        deploy(cluster, config, file)
        wait_for(cluster, lambda each: each["status"] == "RUNNING" and num_running(each) == 1)
        expected = text_of(port, "Once upon a time")
        with asking(port) as asked:
            wait_for(cluster, lambda each: num_running(each) == 2)
            until_more(asked)
        wait_for(cluster, lambda each: num_running(each) == 1)
        assert (set(asked.answers), asked.failures) == ({expected}, [])
        assert text_of(port, "Once upon a time") == expected
