"""Without the extra ``serve``, one sentence says what to do, and ``import fastgen`` still works."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import fastgen
from fastgen.cli import main
from fastgen.errors import FastgenError
from fastgen.serving import extra


@pytest.fixture
def without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    found = extra.find_spec
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "msgspec" else found(name))


SENTENCE = r"serving needs the package msgspec: pip install 'fastgen-llm\[serve\]'"


def test_from_python(without_msgspec: None) -> None:
    with pytest.raises(FastgenError, match=SENTENCE):
        fastgen.serve("tiny-llama")
    with pytest.raises(FastgenError, match=SENTENCE):
        fastgen.client("http://127.0.0.1:1")


def test_from_the_shell(
    without_msgspec: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastgen", "serve", "tiny-llama"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == "fastgen: serving needs the package msgspec: pip install 'fastgen-llm[serve]'\n"


def test_every_package_of_the_extra_is_looked_for() -> None:
    extra.need_extra()
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    names = {name.partition(">")[0] for name in project["project"]["optional-dependencies"]["serve"]}
    modules = {"pyzmq": "zmq", "prometheus-client": "prometheus_client", "grpcio": "grpc"}
    modules |= {"grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection"}
    assert {modules.get(name, name) for name in names} == set(extra._PACKAGES)


def test_the_extra_serve_has_structured_output() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert set(extras["grammar"]) <= set(extras["serve"])
