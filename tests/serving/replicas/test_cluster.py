"""The cluster of Ray that a command joins or starts; Ray itself is played."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.replicas import cluster

OF_A_STARTED_ONE = (
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
    "RAY_enable_metrics_collection",
)
OF_ALL = ("RAY_USAGE_STATS_ENABLED", "RAY_IGNORE_UNHANDLED_ERRORS")


@dataclass
class PlayedRay:
    """Ray with a head at ``address``, which accepts connections as long as ``listener`` is open."""

    listener: socket.socket
    given: list[dict[str, Any]] = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def init(self, **given: Any) -> None:
        if self.error is not None:
            raise self.error
        self.given.append(given)

    def shutdown(self) -> None:
        self.num_ended += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedRay]:
    for name in (*OF_A_STARTED_ONE, *OF_ALL):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        played = PlayedRay(listener)
        address = played.address
        monkeypatch.setattr("ray.init", played.init)
        monkeypatch.setattr("ray.shutdown", played.shutdown)
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        yield played


def test_a_cluster_of_this_machine_is_started_for_the_block_and_collects_nothing(ray: PlayedRay) -> None:
    with cluster.connected(None) as found:
        assert (found.head, found.is_alive, ray.num_ended) == (ray.address, True, 0)
        (given,) = ray.given
        assert (given["address"], given["namespace"], given["include_dashboard"]) == ("local", "serve", False)
        assert given["object_store_memory"] == 128 << 20, "Ray would take a third of the memory"
        assert given["configure_logging"]
        assert [os.environ[name] for name in OF_A_STARTED_ONE] == ["0.5", "5000", "0"]
        assert [os.environ[name] for name in OF_ALL] == ["0", "1"]
    assert ray.num_ended == 1


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_cluster_that_is_joined_keeps_its_settings_and_is_not_asked_once_it_is_gone(
    ray: PlayedRay, is_gone: bool
) -> None:
    with cluster.connected(ray.address) as found:
        (given,) = ray.given
        assert (given["address"], given["include_dashboard"], given["object_store_memory"]) == (ray.address, None, None)
        assert not any(name in os.environ for name in OF_A_STARTED_ONE)
        if is_gone:
            ray.listener.close()
            assert not found.is_alive
    assert ray.num_ended == (not is_gone), "a call of Ray would wait for a minute"


@pytest.mark.parametrize(
    ("address", "error", "kind", "sentence"),
    [
        ("auto", ConnectionError("no"), InvalidArgumentError, r"^address='auto': no cluster runs on this machine;"),
        ("auto", RuntimeError("another\n  version"), FastgenError, r"^address='auto': another version$"),
        (None, RuntimeError("no\n space"), FastgenError, r"^a cluster cannot be started on this machine: no space$"),
        (None, ConnectionError("no"), FastgenError, r"^a cluster cannot be started on this machine: no$"),
    ],
)
def test_why_there_is_no_cluster_is_said_in_a_sentence(
    ray: PlayedRay, address: str | None, error: Exception, kind: type[FastgenError], sentence: str
) -> None:
    ray.error = error
    with pytest.raises(FastgenError, match=sentence) as refused, cluster.connected(address):
        raise AssertionError
    assert type(refused.value) is kind


@pytest.mark.parametrize(
    "address", ["ray://10.0.0.1:6379", "10.0.0.1", ":6379", "10.0.0.1:", "10.0.0.1:head", "ray://10.0.0.1", "head"]
)
def test_an_address_of_another_form_is_refused_before_anything_is_asked(ray: PlayedRay, address: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=r"expected auto, or HOST:PORT of the cluster's head"),
        cluster.connected(address),
    ):
        raise AssertionError
    assert ray.given == []
