"""`make pythons` and `make newest`: their commands and their last lines. Small shell scripts play the machines."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Writes down how it is called, and fails for the environments that the file "failing" lists.
MAKE = r"""#!/bin/sh
echo "$* newest=${NEWEST:-no} tests=${PYTEST_ADDOPTS:-all}" >>calls
for argument; do
    case "$argument" in VENV=*) place=${argument#VENV=} ;; esac
done
mkdir -p "$place/bin"
printf '#!/bin/sh\necho numpy 1.0 -\\> 2.0\n' >"$place/bin/python"
chmod +x "$place/bin/python"
echo "the output in $place"
! grep -qx "$place" failing
"""

UNSET = {"MAKE", "NEWEST", "PYENV_ROOT", "PYTEST_ADDOPTS"}


@dataclass(frozen=True)
class Machine:
    """A checkout, and a PATH with make and some Pythons."""

    project: Path
    commands: Path

    def command(self, name: str, script: str) -> None:
        path = self.commands / name
        path.write_text(script)
        path.chmod(0o755)

    def has(self, *versions: str) -> None:
        for version in versions:
            self.command(f"python{version}", f"#!/bin/sh\necho {version}\n")

    def fails_in(self, *places: str) -> None:
        (self.project / "failing").write_text("".join(f"{place}\n" for place in places))

    def run(self, *names: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in UNSET}
        return subprocess.run(
            [str(self.project / "tools" / "environments.sh"), *names],
            env={**clean, "PATH": f"{self.commands}:/usr/bin:/bin", "HOME": str(self.commands)},
            cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip

    def calls(self) -> list[str]:
        path = self.project / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "my own checkout", tmp_path / "bin")
    (made.project / "tools").mkdir(parents=True)
    made.commands.mkdir()
    for name in ("environments.sh", "pythons.sh"):
        shutil.copy(ROOT / "tools" / name, made.project / "tools")
    shutil.copy(ROOT / "pyproject.toml", made.project)
    made.command("make", MAKE)
    for version in ("3.11", "3.12", "3.13"):
        made.command(f"python{version}", "#!/bin/sh\nexit 127\n")  # shims that lead nowhere
    made.fails_in()
    return made


def in_python(version: str) -> str:
    return f"--no-print-directory VENV=.venvs/{version} PYTHON=python{version} demo test newest=no tests=all"


def test_every_tested_python_gets_an_environment_of_its_own(machine: Machine) -> None:
    machine.has("3.11", "3.12", "3.13", "3.14")
    done = machine.run("pythons")
    assert done.returncode == 0
    assert machine.calls() == [in_python(each) for each in ("3.11", "3.12", "3.13")]
    assert done.stdout.splitlines()[-3:] == [
        f"environments: Python {each}: passed" for each in ("3.11", "3.12", "3.13")
    ]
    assert "the output" not in done.stdout
    assert (machine.project / ".venvs" / "3.12.log").read_text() == "the output in .venvs/3.12\n"


def test_a_python_that_is_not_there_is_named_in_the_last_lines(machine: Machine) -> None:
    machine.has("3.11")
    done = machine.run("pythons")
    assert done.returncode == 0
    assert machine.calls() == [in_python("3.11")]
    assert done.stdout.splitlines()[-3:] == [
        "environments: Python 3.11: passed",
        "environments: Python 3.12: not run, there is no python3.12 here",
        "environments: Python 3.13: not run, there is no python3.13 here",
    ]


def test_one_that_fails_is_shown_and_the_others_still_run(machine: Machine) -> None:
    machine.has("3.12", "3.13")
    machine.fails_in(".venvs/3.12")
    done = machine.run("pythons")
    assert done.returncode == 1
    assert "the output in .venvs/3.12" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "environments: Python 3.12: FAILED, see .venvs/3.12.log",
        "environments: Python 3.13: passed",
    ]


def test_the_newest_packages_are_tried_from_nothing_with_the_newest_python(machine: Machine) -> None:
    machine.has("3.11", "3.12")
    left_behind = machine.project / ".venvs" / "newest" / "from last week"
    left_behind.mkdir(parents=True)
    done = machine.run("newest")
    assert done.returncode == 0
    assert not left_behind.exists()
    unpinned = "--deselect tests/project/test_lock.py::test_everything_that_set_up_installs_is_pinned"
    assert machine.calls() == [
        f"--no-print-directory VENV=.venvs/newest PYTHON=python3.12 demo test newest=yes tests={unpinned}"
    ]
    assert done.stdout.splitlines()[-2:] == [
        "environments: newest packages, Python 3.12: passed",
        "environments: other than locked: numpy 1.0 -> 2.0",
    ]


def test_newest_packages_that_fail_warn_and_break_nothing(machine: Machine) -> None:
    machine.has("3.13")
    machine.fails_in(".venvs/newest")
    done = machine.run("pythons", "newest")
    assert done.returncode == 0
    assert "the output in .venvs/newest" in done.stdout
    warning = "WARNING, they fail here, and soon where people install them. See .venvs/newest.log"
    assert done.stdout.splitlines()[-3:] == [
        "environments: Python 3.13: passed",
        f"environments: newest packages, Python 3.13: {warning}",
        "environments: other than locked: numpy 1.0 -> 2.0",
    ]


def test_without_any_python_nothing_is_run_and_that_is_said(machine: Machine) -> None:
    done = machine.run("newest")
    assert (done.returncode, machine.calls()) == (0, [])
    assert done.stdout == "environments: newest packages: not run, there is no Python of a tested version here\n"


def test_an_unknown_name_is_refused(machine: Machine) -> None:
    done = machine.run("pyhtons")
    assert done.returncode == 2
    assert "pyhtons: expected pythons or newest" in done.stderr


def test_the_deselected_test_exists() -> None:
    text = (ROOT / "tools" / "environments.sh").read_text()
    (name,) = [line.split("=")[1] for line in text.splitlines() if line.strip().startswith("unpinned=")]
    path, test = name.split("::")
    assert f"def {test}(" in (ROOT / path).read_text()
