"""The printed file on a real cluster: deployed with Ray's own command, scaled by deploying it again, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving.replicas.ray_cluster import RayCluster, free_ports, ray_cluster

pytestmark = pytest.mark.slow
# A replica is ready after about 10 s on two cores that have other work.
READY_S = 180.0


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
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@contextmanager
def asking(port: int) -> Iterator[list[str]]:
    """Sends requests one after the other from several threads, until the block is left. Yields the answers, or what
    came in place of them. A connection that is refused or cut before an answer began is opened again, as clients do.
    """
    answers: list[str] = []
    has_ended = threading.Event()

    def ask() -> None:
        while not has_ended.is_set():
            try:
                answers.append(text_of(port, "Once upon a time"))
            except urllib.error.HTTPError as error:
                answers.append(f"{error.code} {error.read().decode()}")
            except OSError:
                time.sleep(0.05)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def until_more(answers: list[str], expected: str, number: int = 20) -> None:
    """Waits until more requests were answered as expected."""
    wanted, until_s = answers.count(expected) + number, time.monotonic() + READY_S
    while answers.count(expected) < wanted:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_replicas_come_go_and_are_replaced_under_load(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = printed("--replicas", "2", "--num-threads", "1", "--memory", "1GiB", "--port", str(port))
    (application,) = config["applications"]
    replicas, file = application["deployments"][0], tmp_path / "fastgen.yaml"
    with ray_cluster(num_cpus=3) as cluster:
        replicas["num_replicas"] = 1
        deploy(cluster, config, file)
        wait_for(cluster, lambda each: each["status"] == "RUNNING")
        expected = text_of(port, "Once upon a time")
        with asking(port) as answers:
            for number in (2, 1, 2):
                replicas["num_replicas"] = number
                deploy(cluster, config, file)
                wait_for(cluster, lambda each, n=number: each["status"] == "RUNNING" and num_running(each) == n)
                until_more(answers, expected)
            assert set(answers) == {expected}
            before = ids_of(wait_for(cluster, lambda each: num_running(each) == 2))
            application["args"]["max_num_seqs"] = 8  # a rolling update of replicas and server
            deploy(cluster, config, file)
            wait_for(cluster, lambda each: each["status"] == "RUNNING" and not before & ids_of(each))
            until_more(answers, expected)
        # An old replica may be gone a moment before the server knows the new one.
        assert {answer for answer in answers if not answer.startswith("503 ")} == {expected}


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
        with pytest.raises(OSError, match="refused"):
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
        with asking(port) as answers:
            wait_for(cluster, lambda each: num_running(each) == 2)
            until_more(answers, expected)
        wait_for(cluster, lambda each: num_running(each) == 1)
        assert set(answers) == {expected}
        assert text_of(port, "Once upon a time") == expected
