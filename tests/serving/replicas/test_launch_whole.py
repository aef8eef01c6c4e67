"""The command in the foreground from its start to its end, with Ray Serve played."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import FastgenError
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.replicas import application, launch
from tests.serving.replicas.test_ingress import DEPLOYMENT

GIVEN = {"model": "tiny-llama", "replicas": 1, "port": 0}


def look(status: str) -> Any:
    return SimpleNamespace(status=status, message=f"it is {status}", deployments={})


class PlayedServe:
    """Ray Serve, whose application is found in the states of ``looks``, one after the other, and is gone after them."""

    def __init__(self) -> None:
        self.looks: list[str | None] = []
        self.calls: list[str] = []
        self.log_level = ""
        self.on_run: Callable[[], object] = lambda: None

    def start(self, *, proxy_location: str, logging_config: dict[str, str]) -> None:
        self.calls.append(f"start {proxy_location}")
        self.log_level = logging_config["log_level"]

    def status(self) -> Any:
        found = self.looks.pop(0) if self.looks else None
        return SimpleNamespace(applications={} if found is None else {"fastgen": look(found)})

    def run_many(self, targets: list[Any], *, wait_for_applications_running: bool) -> None:
        assert not wait_for_applications_running, "Ctrl-C would wait for the model"
        self.calls += [f"run {target.target} as {target.name} at {target.route_prefix}" for target in targets]
        self.on_run()

    def get_deployment_handle(self, *names: str) -> Any:
        assert names == ("Ingress", "fastgen")

        def end(timeout_s: float) -> None:
            self.calls.append("end")

        return SimpleNamespace(
            deployment=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda: DEPLOYMENT)),
            end=SimpleNamespace(remote=lambda: SimpleNamespace(result=end)),
        )

    def delete(self, name: str, _blocking: bool) -> None:
        self.calls.append(f"delete {name}")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedServe]:
    played = PlayedServe()

    @contextmanager
    def connected(address: str | None) -> Iterator[Any]:
        yield SimpleNamespace(is_alive=True)

    monkeypatch.setattr(launch, "connected", connected)
    monkeypatch.setattr(launch, "machines_in_use", list)
    monkeypatch.setattr(application, "application", lambda given, **more: "the application")
    for name in ("start", "status", "run_many", "get_deployment_handle", "delete"):
        monkeypatch.setattr(f"ray.serve.{name}", getattr(played, name))
    for name in ("_START_POLL_S", "_POLL_S"):
        monkeypatch.setattr(launch, name, 0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield played
    for number, handler in handlers.items():
        signal.signal(number, handler)


STARTED = ["start Disabled", "run the application as fastgen at None"]


def test_a_server_that_a_signal_ends_is_ended_in_order_and_deleted(
    serve: PlayedServe, capfd: pytest.CaptureFixture[str]
) -> None:
    serve.looks = [None, "DEPLOYING", "DEPLOYING", "RUNNING", "RUNNING", "RUNNING"]
    ready: list[Deployment] = []

    def on_ready(deployment: Deployment) -> None:
        ready.append(deployment)
        serve.calls.append("ready")
        signal.raise_signal(signal.SIGTERM)

    launch.run_replicas(GIVEN, on_ready=on_ready)
    assert serve.calls == [*STARTED, "ready", "end", "delete fastgen"]
    assert [each.token for each in ready] == ["t"]
    assert "m is served at http://127.0.0.1:1" in capfd.readouterr().out


def test_a_server_that_a_client_has_ended_is_not_ended_again(serve: PlayedServe) -> None:
    serve.looks = [None, "RUNNING", "RUNNING", "RUNNING", None]
    launch.run_replicas(GIVEN)
    assert (serve.calls, serve.looks) == ([*STARTED, "delete fastgen"], [])


def test_a_server_that_a_signal_ends_before_it_is_ready_is_deleted(serve: PlayedServe) -> None:
    serve.looks = [None]
    serve.on_run = lambda: signal.raise_signal(signal.SIGINT)
    launch.run_replicas(GIVEN, on_ready=lambda deployment: serve.calls.append("ready"))
    assert serve.calls == [*STARTED, "delete fastgen"]


def test_an_application_that_the_cluster_has_already_is_left_alone(serve: PlayedServe) -> None:
    serve.looks = ["RUNNING"]
    with pytest.raises(FastgenError, match="serves an application named fastgen already; end it first"):
        launch.run_replicas(GIVEN)
    assert serve.calls == STARTED[:1]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (None, "the application was deleted before it ran"),
        ("DEPLOY_FAILED", "it is DEPLOY_FAILED"),
        ("UNHEALTHY", "it is UNHEALTHY"),
    ],
)
def test_an_application_that_cannot_run_is_an_error_and_is_deleted(
    serve: PlayedServe, state: str | None, sentence: str
) -> None:
    serve.looks = [None, "DEPLOYING", state, *["RUNNING"] * 20]
    with pytest.raises(FastgenError, match=sentence):
        launch.run_replicas(GIVEN, on_ready=lambda deployment: serve.calls.append("ready"))
    assert serve.calls == [*STARTED, "delete fastgen"]


def test_the_first_signal_ends_a_server_in_order_and_the_second_at_once(serve: PlayedServe) -> None:
    endings = launch._Endings()
    assert not endings.first.is_set()
    signal.raise_signal(signal.SIGINT)
    assert (endings.first.is_set(), endings.second.is_set()) == (True, False)
    signal.raise_signal(signal.SIGTERM)
    assert endings.second.is_set()


@pytest.mark.parametrize(("address", "level"), [(None, "CRITICAL"), ("auto", "WARNING")])
def test_only_a_cluster_of_this_command_alone_keeps_its_stack_traces(
    serve: PlayedServe, address: str | None, level: str
) -> None:
    serve.looks = [None, "RUNNING", "RUNNING", None]
    launch.run_replicas({**GIVEN, "address": address})
    assert serve.log_level == level


def test_a_server_has_its_time_to_end_and_30_s_more(serve: PlayedServe, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    monkeypatch.setattr(launch, "_end", lambda ingress, cluster, endings, timeout_s: found.append(timeout_s))
    serve.looks = [None, "RUNNING", "RUNNING", "RUNNING"]
    launch.run_replicas(
        {**GIVEN, "drain_timeout_s": 7.5}, on_ready=lambda deployment: signal.raise_signal(signal.SIGTERM)
    )
    assert found == [37.5]
