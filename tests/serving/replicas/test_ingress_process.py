"""The process that leads the server in front of replicas: how it is started, and what it reports."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.refusals import UnauthorizedError
from fastgen.serving.replicas import ingress_process
from fastgen.serving.replicas.server_process import SIGN_OF_LIFE, TERMINATED
from fastgen.serving.replicas.settings import generation_of
from tests.serving.replicas.test_ingress import DEPLOYMENT

PARENT = 77
Run = Callable[[Callable[..., None]], "Process"]
REQUEST = {
    "given": {"model": "tiny-llama", "replicas": 2, "router": "least_tokens", "max_model_len": 64},
    "key_digests": ApiKeys(["secret"]).digests,
    "app": "fastgen",
    "deployment": "Replicas",
    "cluster": "10.0.0.1:6379",
}


@dataclass
class Process:
    """Holds what the process did: the parent it ends with, its cluster and replicas, and the lines of its pipe."""

    parents: list[int] = field(default_factory=list)
    joined: dict[str, Any] = field(default_factory=dict)
    replicas: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    options: Any = None
    load_arguments: Any = None
    status: int | None = 0
    was_inheritable: bool = True
    reported: bytes = b""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the process with a function in place of the server, and returns what it did."""

    def run(serve: Callable[..., None]) -> Process:
        process = Process()
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)

        def played(load_arguments: Any, options: Any, **calls: Any) -> None:
            process.load_arguments, process.options = load_arguments, options
            process.was_inheritable = os.get_inheritable(writing)
            serve(process, **calls)

        def replica_set(handle: Any, watcher: Any, **more: Any) -> str:
            process.replicas.append((handle, {"watcher": watcher, **more}))
            return "the replicas"

        monkeypatch.setattr(sys, "argv", ["ingress_process", str(writing), str(PARENT)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(REQUEST)))
        monkeypatch.setattr(ingress_process, "end_with", process.parents.append)
        monkeypatch.setattr(ingress_process, "ray", SimpleNamespace(init=process.joined.update))
        monkeypatch.setattr(
            ingress_process, "serve", SimpleNamespace(get_deployment_handle=lambda *names: f"handle of {names}")
        )
        monkeypatch.setattr(ingress_process, "RayHandle", lambda handle: handle)
        monkeypatch.setattr(ingress_process, "ReplicaSet", replica_set)
        monkeypatch.setattr(ingress_process, "run", played)
        try:
            ingress_process.main()
        except SystemExit as ended:
            process.status = ended.code  # type: ignore[assignment]
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            process.reported = pipe.read()
        return process

    return run


def test_it_serves_the_replicas_that_it_was_told_of(run: Run) -> None:
    def serve(process: Process, make_engine: Callable[[str], object], **more: Any) -> None:
        assert make_engine("watcher") == "the replicas"

    process = run(serve)
    assert (process.parents, process.was_inheritable, process.status) == ([PARENT], False, 0)
    assert (process.joined["address"], process.joined["namespace"]) == ("10.0.0.1:6379", "serve")
    assert not process.joined["log_to_driver"], "replicas have a log of their own"
    assert process.load_arguments == {"model": "tiny-llama", "max_model_len": 64}
    ((handle, given),) = process.replicas
    assert handle == "handle of ('Replicas', 'fastgen')"
    assert (given["watcher"], given["router"]) == ("watcher", "least_tokens")
    assert given["generation"] == generation_of(process.load_arguments)
    process.options.api_keys.check("secret")
    with pytest.raises(UnauthorizedError):
        process.options.api_keys.check("another")


def test_it_gives_signs_of_life_from_when_it_is_ready_and_says_that_a_client_ends_it(run: Run) -> None:
    def serve(
        process: Process,
        make_engine: Callable[[str], object],
        on_ready: Callable[[Deployment], None],
        on_terminate: Callable[[], None],
    ) -> None:
        make_engine("watcher")
        ((_, given),) = process.replicas
        given["on_beat"]()
        on_terminate()
        on_ready(Deployment(**DEPLOYMENT))  # type: ignore[arg-type]
        given["on_beat"]()
        on_terminate()

    line, _, signs = run(serve).reported.partition(b"\n")
    assert json.loads(line) == {"deployment": DEPLOYMENT}
    assert signs == SIGN_OF_LIFE + TERMINATED


def test_it_reports_why_it_cannot_serve(run: Run) -> None:
    def serve(process: Process, **calls: Any) -> None:
        raise FastgenError("the port is in use")

    process = run(serve)
    assert (process.status, json.loads(process.reported)) == (1, {"error": "the port is in use"})
