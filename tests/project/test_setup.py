"""Which torch the set-up script installs, and when it works at all, on machines played by small shell scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"

# Plays a Python of the version that its second line says, and in the environment it "makes" python with pip. It writes
# down what pip is asked for, and has the torch builds that the file "available" lists.
PYTHON = r"""#!/bin/sh
minor=MINOR
case "$*" in
  --version) echo "Python 3.$minor.0" ;;
  "-m venv "*)
    echo "venv with 3.$minor" >>calls
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip --disable-pip-version-check index versions torch")
    echo "WARNING: pip index is currently an experimental command."
    echo "torch (2.99.1+cpu)"
    echo "Available versions: 2.99.1, 2.13.0" ;;
  *"pip --disable-pip-version-check install --no-compile "*)
    case "${PIP_CONSTRAINT-none}" in
      none) echo none ;;
      "$PIP_BUILD_CONSTRAINT")
        grep '^torch==' "$PIP_CONSTRAINT" ||
          echo "$(wc -l <"$PIP_CONSTRAINT")" "$(grep '^triton==' "$PIP_CONSTRAINT")" ;;
    esac >>constraints
    requirement=${*#*install --no-compile }
    echo "$requirement" >>calls
    case "$requirement" in *torch==*)
        grep -qxF -e "$requirement" available && exit 0
        if [ -e broken ]; then echo "ERROR: No space left on device"; exit 1; fi
        echo "WARNING: Location 'x' is ignored: it is neither a file nor a directory."
        echo "ERROR: No matching distribution found for ${requirement##* }"
        exit 1 ;;
    esac ;;
  -c*version_info*) echo "3.$minor" ;;
esac
"""


def test_the_readme_names_the_index_that_the_script_uses() -> None:
    named = re.findall(r"--index-url (\S+)", (ROOT / "README.md").read_text())
    assert [f"--extra-index-url {index}" for index in named] == [CPU_INDEX]


@dataclass(frozen=True)
class Machine:
    """A checkout in a folder whose name has spaces, and a PATH where python3, nvidia-smi and uname are played."""

    project: Path
    commands: Path

    def command(self, name: str, script: str) -> None:
        path = self.commands / name
        path.write_text(script)
        path.chmod(0o755)

    def offers(self, *requirements: str) -> None:
        (self.project / "available").write_text("".join(f"{line}\n" for line in requirements))

    def python(self, name: str, minor: int) -> None:
        self.command(name, PYTHON.replace("MINOR", str(minor)))

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        (self.project / "calls").write_text("")
        path = f"{self.commands}:/usr/bin:/bin"
        command = [str(self.project / "tools" / "setup.sh")]
        unset = {"PYTHON", "PYENV_ROOT", "VENV", "NEWEST", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"}
        clean = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.run(
            command,
            env={**clean, "PATH": path, "HOME": str(self.commands), **environment},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def constraints(self) -> list[str]:
        """Returns for each call of pip how many lines bind it, and the one that names Triton."""
        return [line.strip() for line in (self.project / "constraints").read_text().splitlines()]

    def calls(self) -> list[str]:
        return (self.project / "calls").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "my own checkout", tmp_path / "bin")
    (made.project / "tools").mkdir(parents=True)
    made.commands.mkdir()
    for name in ("setup.sh", "pythons.sh", "constraints.txt"):
        shutil.copy(ROOT / "tools" / name, made.project / "tools")
    shutil.copy(ROOT / "pyproject.toml", made.project)
    for name in ("python3", "python"):
        made.python(name, 12)
    for minor in (11, 12, 13, 14):
        made.python(f"python3.{minor}", minor)
    made.command("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    made.command("uname", "#!/bin/sh\necho Linux\n")
    return made


EDITABLE = "--editable .[dev]"
VENV = "venv with 3.12"


def test_without_a_gpu_the_cpu_build_is_taken(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu", "torch==2.13.0")
    done = machine.set_up()
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls() == [VENV, "torch==2.13.0+cpu", EDITABLE]
    assert done.stdout.splitlines() == [
        "setup: making .venv with Python 3.12.0",
        "setup: installing torch 2.13.0, the CPU build, since there is no NVIDIA GPU here",
        "setup: installing fastgen and what its development needs",
        "setup: done",
    ]


def test_the_locked_versions_are_installed_also_where_fastgen_is_built(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    assert machine.set_up().returncode == 0
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    (triton,) = [line for line in lines if line.startswith("triton==")]
    assert machine.constraints() == [f"{len(lines) - 1} {triton}"] * 2, "all but torch, whose version pip is asked for"


def test_the_newest_versions_are_those_of_the_indexes(machine: Machine) -> None:
    machine.offers("torch==2.99.1+cpu")
    done = machine.set_up(NEWEST="yes", VENV=".venvs/newest")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls() == [VENV, "torch==2.99.1+cpu", EDITABLE]
    assert set(machine.constraints()) == {"none"}
    assert (machine.project / ".venvs" / "newest" / "setup-done").exists()
    assert not (machine.project / ".venv").exists()


def test_then_the_cpu_build_of_pytorchs_own_index(machine: Machine) -> None:
    wanted = f"--timeout 30 --retries 2 {CPU_INDEX} torch==2.13.0+cpu"
    machine.offers(wanted, "torch==2.13.0")
    assert machine.set_up().returncode == 0
    assert machine.calls() == [VENV, "torch==2.13.0+cpu", wanted, EDITABLE]


def test_then_the_ordinary_build_after_saying_how_large_it_is(machine: Machine) -> None:
    machine.offers("torch==2.13.0")
    done = machine.set_up()
    assert done.returncode == 0
    assert machine.calls()[-2:] == ["torch==2.13.0", EDITABLE]
    assert "several GB of CUDA libraries" in done.stdout
    assert len(set(machine.constraints()[-2:]) & set(machine.constraints()[:-2])) == 0
    assert all("triton" not in each for each in machine.constraints()[-2:]), "that build names its own"


def test_with_a_gpu_the_ordinary_build_and_never_the_cpu_one(machine: Machine) -> None:
    machine.command("nvidia-smi", "#!/bin/sh\n[ \"$*\" = -L ] && echo 'GPU 0: Some GPU (UUID: GPU-1)'\n")
    machine.offers("torch==2.13.0,!=2.13.0+cpu", "torch==2.13.0+cpu")
    assert machine.set_up().returncode == 0
    assert machine.calls() == [VENV, "torch==2.13.0,!=2.13.0+cpu", EDITABLE]
    assert all("triton" not in each for each in machine.constraints())


def test_macos_has_but_one_build(machine: Machine) -> None:
    machine.command("uname", "#!/bin/sh\necho Darwin\n")
    machine.offers("torch==2.13.0,!=2.13.0+cpu")
    assert machine.set_up().returncode == 0
    assert machine.calls() == [VENV, "torch==2.13.0,!=2.13.0+cpu", EDITABLE]


def test_the_second_time_nothing_is_done(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    machine.set_up()
    done = machine.set_up()
    assert (done.returncode, done.stdout, machine.calls()) == (0, "", [])


@pytest.mark.parametrize("changed", ["pyproject.toml", "tools/setup.sh", "tools/pythons.sh", "tools/constraints.txt"])
def test_a_change_brings_it_up_to_date_without_starting_over(machine: Machine, changed: str) -> None:
    machine.offers("torch==2.13.0+cpu")
    machine.set_up()
    with (machine.project / changed).open("a") as file:
        file.write("# changed\n")
    assert machine.set_up().returncode == 0
    assert machine.calls() == ["torch==2.13.0+cpu", EDITABLE]


def test_a_moved_checkout_gets_a_new_environment(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    machine.set_up()
    moved = Machine(machine.project.rename(machine.project.with_name("elsewhere")), machine.commands)
    assert moved.set_up().returncode == 0
    assert moved.calls()[0] == VENV


def test_another_failure_is_shown_and_is_no_reason_for_another_build(machine: Machine) -> None:
    machine.offers("torch==2.13.0")
    (machine.project / "broken").touch()
    done = machine.set_up()
    assert done.returncode == 1
    assert machine.calls() == [VENV, "torch==2.13.0+cpu"]
    assert "No space left on device" in done.stderr
    (machine.project / "broken").unlink()
    machine.offers("torch==2.13.0+cpu")
    assert machine.set_up().returncode == 0  # what was left behind does not stand in the way


def test_what_no_index_has_is_told_without_pips_noise(machine: Machine) -> None:
    machine.offers()
    done = machine.set_up()
    assert done.returncode == 1
    assert "No matching distribution found for torch==2.13.0\n" in done.stderr
    assert "is ignored" not in done.stderr


def test_another_python_is_taken_where_python3_does_not_fit(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    for minor in (10, 14):
        machine.python("python3", minor)
        shutil.rmtree(machine.project / ".venv", ignore_errors=True)
        assert machine.set_up().returncode == 0
        assert machine.calls()[0] == "venv with 3.13", "the newest one that is tested"


def test_a_python_of_pyenv_is_found_though_its_name_leads_nowhere(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    for name in ("python3", "python", "python3.11", "python3.12", "python3.13"):
        machine.command(name, "#!/bin/sh\nexit 127\n")
    place = machine.commands / "versions" / "3.12.1" / "bin"
    place.mkdir(parents=True)
    machine.python("versions/3.12.1/bin/python", 12)
    assert machine.set_up(PYENV_ROOT=str(machine.commands)).returncode == 0
    assert machine.calls()[0] == VENV


def test_without_a_suitable_python_it_says_what_to_do(machine: Machine) -> None:
    for name in ("python", "python3.11", "python3.12", "python3.13"):
        machine.command(name, "#!/bin/sh\nexit 127\n")  # a shim that leads nowhere
    machine.python("python3", 14)
    done = machine.set_up()
    assert done.returncode == 1
    assert "found no Python of a tested version (3.11 3.12 3.13)" in done.stderr
    assert "here, python3 is Python 3.14.0. Install one, or name it" in done.stderr
    assert not (machine.project / ".venv").exists()


def test_a_python_that_was_asked_for_is_taken_or_refused(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    done = machine.set_up(PYTHON="no-such-python")
    assert done.returncode == 1
    assert "PYTHON=no-such-python is not a Python of version 3.11" in done.stderr
    machine.python("old", 10)
    assert "PYTHON=old is not a Python of version 3.11" in machine.set_up(PYTHON="old").stderr
    assert machine.set_up(PYTHON="python3.11").returncode == 0
    assert machine.calls()[0] == "venv with 3.11"


def test_a_newer_python_that_was_asked_for_is_taken_with_a_warning(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    done = machine.set_up(PYTHON="python3.14")
    assert done.returncode == 0
    assert done.stderr == "setup: Python 3.14.0 is newer than what is tested: 3.11 3.12 3.13\n"
    assert machine.calls()[0] == "venv with 3.14"
    assert machine.set_up().stdout == "", "the environment stays"
