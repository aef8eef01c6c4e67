"""Hooks, workflows and CONTRIBUTING.md call the Makefile, so that every place runs the same checks."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def made_by(command: str) -> set[str]:
    """Returns the targets of a call of make."""
    program, *arguments = shlex.split(re.sub(r"\$\{\{.*?\}\}", "value", command))
    assert program == "make", command
    return {each for each in arguments if "=" not in each}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_hooks_call_targets_that_check_together_what_make_check_does() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}, "a hook would download something"
    assert {hook["language"] for hook in hooks} == {"system"}
    (parts,) = re.findall(r"^checks := ([a-z ]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set().union(*(made_by(hook["entry"]) for hook in hooks)) == set(parts.split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_nothing_but_make(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        assert made_by(command) <= targets(), command
    for step in steps(workflow):
        assert "run" in step or step["uses"].startswith("actions/"), step


def test_the_workflows_cover_both_sizes_of_the_tests() -> None:
    commands = [step.get("run", "") for path in WORKFLOWS for step in steps(yaml.safe_load(path.read_text()))]
    assert {"check", "test", "test-all"} <= set().union(*(made_by(each) for each in commands if each))


def test_the_workflows_run_every_python_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {found[1] for each in project["classifiers"] if (found := re.fullmatch(r".* :: (3\.\d+)", each))}
    matrices = [
        set(job["strategy"]["matrix"]["python"])
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        if "strategy" in job
    ]
    assert tested == {"3.11", "3.12", "3.13"}
    assert matrices == [tested]
    (setting_up,) = [
        step["with"]["python-version"]
        for step in steps(yaml.safe_load((ROOT / ".github" / "workflows" / "test-all.yml").read_text()))
        if "python-version" in step.get("with", {})
    ]
    assert set(setting_up.split()) == tested


def test_every_target_that_contributing_names_exists() -> None:
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"test", "test-all", "check", "format"} <= named
    assert named <= targets()


def test_every_phony_target_exists_and_is_listed_by_help() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) == targets()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE)) == targets()
