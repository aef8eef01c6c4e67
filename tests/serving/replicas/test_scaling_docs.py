"""docs/scaling.md is true: its commands exist, its files are valid, its numbers are those of the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import cli as ray_cli
from ray.serve._private.deployment_state import SLOW_STARTUP_WARNING_S
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli as serve_cli
from typer.testing import CliRunner

from fastgen.cli import app
from fastgen.runtime.routing import ROUTERS
from fastgen.serving.engine import remote_socket
from fastgen.serving.replicas import application, cluster, ingress, launch, membership, replica, replica_set, settings
from fastgen.serving.replicas.deploy_file import deploy_file
from fastgen.serving.replicas.placement import Machine, NoRoomError, needs_of
from tests.pages import DOCS, blocks, section

PAGE = DOCS / "scaling.md"


def commands(program: str) -> list[list[str]]:
    """Returns the arguments of the page's commands of ``program``."""
    lines = [line.removeprefix("$ ") for block in blocks(PAGE, "console") for line in block.splitlines()]
    split = [shlex.split(line.partition(">")[0], comments=True) for line in lines]
    return [arguments for name, *arguments in split if name == program]


def test_the_commands_of_fastgen_are_taken() -> None:
    found = commands("fastgen")
    assert len(found) == 3
    for arguments in found:
        done = CliRunner().invoke(app, [*arguments, "--print-config"])
        assert done.exit_code == 0, done.output
        ServeDeploySchema.model_validate(yaml.safe_load(done.stdout))


@pytest.mark.parametrize(("program", "cli", "count"), [("ray", ray_cli, 3), ("serve", serve_cli, 3)])
def test_the_commands_of_ray_exist(program: str, cli: Any, count: int) -> None:
    found = commands(program)
    assert len(found) == count
    for name, *arguments in found:
        known = {flag for parameter in cli.commands[name].params for flag in parameter.opts}
        flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
        assert flags <= known, f"{program} {name}"


def test_ray_takes_the_settings_of_autoscaling() -> None:
    (text,) = blocks(PAGE, "yaml")
    value = yaml.safe_load(deploy_file({"model": "tiny-llama", "replicas": 4}))
    value["applications"][0]["deployments"] = yaml.safe_load(text)["deployments"]
    (deployment,) = ServeDeploySchema.model_validate(value).applications[0].deployments
    assert deployment.is_autoscaling_configured()


def test_the_sentence_about_room_is_the_one_that_is_said() -> None:
    shown = " ".join(blocks(PAGE, "text")[1].split())
    with pytest.raises(NoRoomError) as refused:
        needs_of({"model": "m", "num_threads": 5}, 3, [Machine("laptop", 8, 0, 16 << 30)])
    assert shown == f"fastgen: {refused.value}".replace("num_threads", "--num-threads")


def test_every_router_is_described() -> None:
    rows = " ".join(
        line.split("|")[1] for line in section(PAGE, "Which replica gets a request").splitlines() if "|" in line
    )
    assert set(re.findall(r"`(\w+)`", rows)) == set(ROUTERS)


def test_the_bounds_are_those_of_the_code() -> None:
    lines = [line for line in section(PAGE, "Bounds").splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ")[1] for line in lines[1:]]
    assert rows == [
        f"every {replica.BEAT_S:g} s",
        f"{membership.SILENT_S:g} s",
        f"{membership.LOST_S:g} s",
        f"{membership._APART_S:g} s",
        f"{remote_socket._HEARTBEAT_MS / 1000:g} s; {remote_socket._SILENCE_MS / 1000:g} s",
        f"every {settings.HEALTH_PERIOD_S:g} s; {settings.HEALTH_TIMEOUT_S:g} s",
        f"{ingress._SILENCE_S:g} s",
        f"three times as long as loading took, at least {replica_set._MIN_WAIT_S:g} s",
        f"{replica_set.MAX_TRIES}, with pauses from {replica_set._FIRST_DELAY_S:g} s, doubled each time",
        f"{application._MAX_STARTS}",
        f"{settings.FINISH_S:g} s (`graceful_shutdown_timeout_s`)",
        f"{membership.KEEP_S:g} s",
        f"`--drain-timeout` and {settings.INGRESS_END_S:g} s more",
        f"{launch._DELETE_S:g} s",
        f"{SLOW_STARTUP_WARNING_S:g} s",
        f"{cluster._CONNECT_S:g} s",
    ]
    assert f"has `graceful_shutdown_timeout_s` ({settings.FINISH_S:g} s)" in PAGE.read_text()


@pytest.mark.slow
def test_the_python_of_the_page_runs() -> None:
    (code,) = blocks(PAGE, "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3
