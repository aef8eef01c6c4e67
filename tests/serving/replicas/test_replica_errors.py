"""Replicas that cannot be served are refused in one sentence, within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.options import ServeOptions
from fastgen.serving.replicas import cluster
from tests.serving.replicas.ray_cluster import free_ports

# A sentence within 30 s is promised, where Ray takes 10 s to start; four times that on a machine with other work.
_BOUND_S = 120.0
# A model that cannot be loaded is noticed once Ray, a replica and its engine have started, three times.
_LOAD_BOUND_S = 600.0


def refusal(*flags: str, bound_s: float = _BOUND_S, model: str = "tiny-llama") -> str:
    """Returns what ``fastgen serve`` prints before it ends with status 1."""
    command = [sys.executable, "-m", "fastgen", "serve", model, "--port", str(free_ports(1)[0]), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert time.monotonic() - began_s < bound_s
    return done.stderr


def test_an_address_that_nothing_answers_at() -> None:
    assert refusal("--replicas", "1", "--address", "127.0.0.1:1") == (
        "fastgen: --address '127.0.0.1:1': no cluster answers there ([Errno 111] Connection refused); start one with "
        "`ray start --head`, and name the address that it prints\n"
    )


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "somewhere:port", ":6379"])
def test_an_address_that_is_none(address: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=r"expected auto, or HOST:PORT of the cluster's head"),
        cluster.connected(address),
    ):
        raise AssertionError


@pytest.mark.slow
def test_a_machine_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # another program's cluster on this machine is not found
    assert refusal("--replicas", "1", "--address", "auto") == (
        "fastgen: --address 'auto': no cluster runs on this machine; start one with `ray start --head`, and name the "
        "address that it prints\n"
    )


@pytest.mark.slow
def test_more_replicas_than_the_machine_has_cores() -> None:
    said = refusal("--replicas", "4096")
    assert "fastgen: 4096 replicas cannot be placed: each needs 1 CPU of one machine, and there is room for " in said
    assert said.endswith("or give each replica fewer threads (--num-threads)\n")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_model_that_is_not_there() -> None:
    said = refusal("--replicas", "1", model="/nowhere/at/all", bound_s=_LOAD_BOUND_S)
    assert said.splitlines()[-1].startswith("fastgen: '/nowhere/at/all' is not a directory on this machine")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_model_that_is_too_large() -> None:
    said = refusal("--replicas", "1", "--memory", "1MiB", bound_s=_LOAD_BOUND_S)
    assert said.splitlines()[-1].startswith("fastgen: embedding and head ")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replicas": 0}, r"replicas=0: expected an integer of at least 1"),
        ({"replicas": 1.5}, r"replicas=1\.5: expected an integer"),
        ({"address": "auto"}, r"address='auto': needs replicas; without them there is one engine"),
        ({"router": "random"}, r"router='random': needs replicas"),
        ({"replicas": 2, "router": "nearest"}, r"router='nearest': expected one of 'round_robin', 'random', "),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        ServeOptions(**options)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cluster, "version", missing)
    with pytest.raises(FastgenError, match=r"need the package ray with Ray Serve: pip install 'fastgen-llm\[ray\]'"):
        cluster.need_ray()


def test_ray_without_ray_serve_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(FastgenError, match="need the package ray with Ray Serve"):
        cluster.need_ray()


def test_another_release_of_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "version", lambda name: "2.61.0")
    with pytest.raises(FastgenError, match=r"replicas need Ray 2\.60, and Ray 2\.61\.0 is installed"):
        cluster.need_ray()


def test_the_release_that_is_needed_is_the_one_that_the_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())
    (line,) = [each for each in project["project"]["optional-dependencies"]["ray"] if each.startswith("ray")]
    assert line == f"ray[serve]>={cluster._RAY},<2.61"
    cluster.need_ray()
