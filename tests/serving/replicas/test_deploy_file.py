"""The file for Ray's ``serve deploy``: valid for Ray, complete, and without secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from fastgen.errors import InvalidArgumentError
from fastgen.serving.options import ServeOptions
from fastgen.serving.replicas.deploy_file import deploy_file
from fastgen.serving.replicas.settings import check_ports, generation_of, settings_of


def read(text: str) -> tuple[ServeDeploySchema, dict[str, Any]]:
    """Returns a file as Ray reads it, and its application."""
    value = yaml.safe_load(text)
    (application,) = value["applications"]
    return ServeDeploySchema.model_validate(value), application


def test_ray_takes_the_file() -> None:
    schema, application = read(deploy_file({"model": "tiny-llama", "replicas": 3, "drain_timeout_s": 5.0}))
    assert schema.proxy_location == "Disabled"
    assert application["route_prefix"] is None
    replicas, ingress = schema.applications[0].deployments
    assert (replicas.name, replicas.num_replicas, replicas.graceful_shutdown_timeout_s) == ("Replicas", 3, 600.0)
    assert (replicas.health_check_period_s, replicas.health_check_timeout_s) == (2.0, 10.0)
    assert replicas.max_ongoing_requests >= 1024
    assert (ingress.name, ingress.num_replicas, ingress.max_surge_percent) == ("Ingress", 1, 100)
    assert ingress.graceful_shutdown_timeout_s == 35.0


def test_ray_takes_autoscaling_in_place_of_a_number() -> None:
    value = yaml.safe_load(deploy_file({"model": "tiny-llama", "replicas": 3}))
    replicas = value["applications"][0]["deployments"][0]
    del replicas["num_replicas"]
    replicas["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 32}
    assert ServeDeploySchema.model_validate(value).applications[0].deployments[0].is_autoscaling_configured()


def test_the_import_path_leads_to_the_builder() -> None:
    _, application = read(deploy_file({"model": "tiny-llama", "replicas": 1}))
    module, _, name = application["import_path"].partition(":")
    code = f"import {module} as module; print(callable(module.{name}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_arguments_are_json_and_only_those_that_were_given(tmp_path: Path) -> None:
    given = {
        "model": "tiny-llama",
        "replicas": 2,
        "memory": "2GiB",
        "allow_origins": ["https://example.org"],
        "address": "10.0.0.1:6379",  # the cluster that it is deployed on is not its affair
    }
    _, application = read(deploy_file(given))
    assert application["args"] == {
        "model": "tiny-llama",
        "replicas": 2,
        "memory": "2GiB",
        "allow_origins": ["https://example.org"],
        "wait_for_machines_s": 10.0,
    }
    assert json.loads(json.dumps(application)) == application


def test_paths_of_this_machine_are_absolute_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"model": "weights", "replicas": 1, "api_key_file": "/etc/fastgen/keys", "name": "weights"}
    _, application = read(deploy_file(given))
    arguments = application["args"]
    assert arguments["model"] == str(tmp_path / "weights")
    assert (arguments["api_key_file"], arguments["name"]) == ("/etc/fastgen/keys", "weights")


def test_no_key_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-the-file\n")
    monkeypatch.setenv("FASTGEN_API_KEY", "key-of-the-environment")
    text = deploy_file({"model": "tiny-llama", "replicas": 1, "api_key_file": keys})
    assert str(keys) in text
    assert "key-of" not in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"replicas": 1, "port": 0}, "port=0: replicas need a certain port"),
        ({"replicas": 1, "grpc_port": 0}, "grpc_port=0: replicas need a certain port"),
        ({}, "--print-config needs --replicas"),
        ({"replicas": 0}, "replicas=0: expected an integer of at least 1"),
        ({"replicas": 1, "router": "best"}, "router='best': expected one of 'round_robin'"),
        ({"replicas": 1, "token_budget": 0}, "token_budget=0"),
        ({"replicas": 1, "polisy": "orca"}, "'polisy' is neither"),
        ({"replicas": 1, "name": b"bytes"}, "an argument cannot be written to a file"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        deploy_file({"model": "tiny-llama", **given})


def test_the_command_writes_the_file_and_starts_nothing() -> None:
    command = [sys.executable, "-m", "fastgen", "serve", "tiny-llama", "--replicas", "2", "--port", "8123"]
    done = subprocess.run([*command, "--print-config"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == deploy_file({"port": 8123, "replicas": 2, "model": "tiny-llama"})


def test_the_settings_of_both_deployments_are_complete() -> None:
    health = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0}
    assert settings_of(ServeOptions(replicas=3, drain_timeout_s=7.5)) == {
        "Replicas": {
            "num_replicas": 3,
            "max_ongoing_requests": 1_048_576,
            **health,
            "graceful_shutdown_timeout_s": 600.0,
            "graceful_shutdown_wait_loop_s": 0.1,
        },
        "Ingress": {
            "num_replicas": 1,
            **health,
            "graceful_shutdown_timeout_s": 37.5,
            "graceful_shutdown_wait_loop_s": 0.1,
            "max_surge_percent": 100,
        },
    }
    assert settings_of(ServeOptions())["Replicas"]["num_replicas"] == 1


def test_replicas_need_certain_ports() -> None:
    for options, name in ((ServeOptions(port=0), "port"), (ServeOptions(grpc_port=0), "grpc_port")):
        with pytest.raises(InvalidArgumentError, match=f"^{name}=0: replicas need a certain port"):
            check_ports(options)
    check_ports(ServeOptions(replicas=1, port=1, grpc_port=None))
    check_ports(ServeOptions(replicas=1, port=65_535, grpc_port=1))


def test_a_generation_is_named_by_16_digits_of_its_arguments() -> None:
    # The beginning of the SHA-256 of {"memory": "1GiB", "model": "a/b"}
    assert generation_of({"model": Path("a/b"), "memory": "1GiB"}) == "f46d3e065a60f194"
