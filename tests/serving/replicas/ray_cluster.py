"""A cluster of Ray on this machine, for tests: its own ports and directory, ended by its process id."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A head starts in 5 to 20 s on two cores that have other work.
_START_S = 120.0
_BIN = Path(sys.executable).parent


@dataclass
class RayCluster:
    """A head that runs. ``address`` is that of the cluster, ``dashboard`` the one that ``serve deploy`` speaks to."""

    process: subprocess.Popen[str]
    address: str
    dashboard: str
    # The environment of commands for this cluster, with its token.
    environment: dict[str, str] = field(repr=False)

    def serve(self, *arguments: str) -> str:
        """Runs Ray's command ``serve``, and returns its output."""
        command = [str(_BIN / "serve"), arguments[0], "--address", self.dashboard, *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def applications(self) -> dict[str, Any]:
        """Returns the state of what is deployed, by name."""
        applications: dict[str, Any] = self._asked("/api/serve/applications/")["applications"]
        return applications

    def machines(self) -> list[str]:
        """Returns the addresses of the machines in the cluster. One that has just joined may have none yet."""
        found = self._asked("/nodes?view=summary")["data"]["summary"]
        return [each["ip"] for each in found if each["raylet"].get("state") == "ALIVE" and "ip" in each]

    def _asked(self, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        with urllib.request.urlopen(urllib.request.Request(self.dashboard + path, headers=headers)) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextmanager
def ray_cluster(*, num_cpus: int = 2) -> Iterator[RayCluster]:
    """Runs the head of a cluster with so many CPUs; it ends when the block is left."""
    port, dashboard_port, agent_port, agent_grpc_port, runtime_env_port, metrics_port, client_port = free_ports(7)
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of its sockets must be short
    command = [
        *(str(_BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--num-cpus={num_cpus}", "--object-store-memory=80000000", f"--temp-dir={directory}"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard_port}"),
        *(f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={agent_grpc_port}"),
        *(f"--runtime-env-agent-port={runtime_env_port}", f"--metrics-export-port={metrics_port}"),
        *(f"--ray-client-server-port={client_port}", "--include-dashboard=true"),
    ]
    environment = _environment()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )
        cluster = RayCluster(process, f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", environment)
        try:
            try:
                _wait_until_it_answers(cluster)
            except AssertionError:
                output.seek(0)
                print(output.read())
                raise
            yield cluster
        finally:
            _end(process)
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def joined_machine(cluster: RayCluster, address: str, *, num_cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """Adds a machine to ``cluster``: a node of Ray here, with an ``address`` of its own such as ``127.0.0.2``."""
    agent_port, agent_grpc_port, runtime_env_port, metrics_port = free_ports(4)
    command = [
        *(str(_BIN / "ray"), "start", "--block", "--disable-usage-stats", f"--address={cluster.address}"),
        *(f"--num-cpus={num_cpus}", "--object-store-memory=80000000", f"--node-ip-address={address}"),
        *(f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={agent_grpc_port}"),
        *(f"--runtime-env-agent-port={runtime_env_port}", f"--metrics-export-port={metrics_port}"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=cluster.environment, start_new_session=True
    )
    try:
        until_s = time.monotonic() + _START_S
        while address not in cluster.machines():
            assert process.poll() is None, f"ray start ended with status {process.returncode}"
            assert time.monotonic() < until_s, "the machine does not join the cluster"
            time.sleep(0.2)
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends ``ray start --block``, which ends what it has started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_it_answers(cluster: RayCluster) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        assert cluster.process.poll() is None, f"ray start ended with status {cluster.process.returncode}"
        try:
            cluster.applications()
            return
        except OSError:
            assert time.monotonic() < until_s, "the head of the cluster does not answer"
            time.sleep(0.2)


def _environment() -> dict[str, str]:
    """Returns the environment of a cluster's processes, with a token of its own, without the address of another."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_AUTH"))}
    return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def free_ports(count: int) -> list[int]:
    """Returns different ports of this machine that are free."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
