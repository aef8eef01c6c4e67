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

# Plays python3, and in the environment it "makes" python with pip. It writes down what pip is asked for, and has the
# torch builds that the file "available" lists.
PYTHON = r"""#!/bin/sh
case "$*" in
  --version) echo "Python 3.12.0" ;;
  "-m venv .venv")
    echo venv >>calls
    mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip --disable-pip-version-check install"*)
    requirement=${*#*install }
    echo "$requirement" >>calls
    case "$requirement" in *torch==*)
        grep -qxF -e "$requirement" available && exit 0
        if [ -e broken ]; then echo "ERROR: No space left on device"; exit 1; fi
        echo "WARNING: Location 'x' is ignored: it is neither a file nor a directory."
        echo "ERROR: No matching distribution found for ${requirement##* }"
        exit 1 ;;
    esac ;;
  -c*version_info*) exit "${UNSUITABLE:-0}" ;;
  -c*metadata*) echo "torch==2.13.0+cpu" ;;
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

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        (self.project / "calls").write_text("")
        path = f"{self.commands}:/usr/bin:/bin"
        command = [str(self.project / "tools" / "setup.sh")]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        return subprocess.run(
            command, env={**clean, "PATH": path, **environment}, cwd="/", capture_output=True, text=True, check=False
        )

    def calls(self) -> list[str]:
        return (self.project / "calls").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "my own checkout", tmp_path / "bin")
    (made.project / "tools").mkdir(parents=True)
    made.commands.mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", made.project / "tools")
    shutil.copy(ROOT / "pyproject.toml", made.project)
    for python in ("python3", "python3.11", "python3.12", "python3.13", "python3.14", "python"):
        made.command(python, PYTHON)
    made.command("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    made.command("uname", "#!/bin/sh\necho Linux\n")
    return made


EDITABLE = "--constraint .venv/torch.txt --editable .[dev]"


def test_without_a_gpu_the_cpu_build_is_taken(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu", "torch==2.13.0")
    done = machine.set_up()
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls() == ["venv", "torch==2.13.0+cpu", EDITABLE]
    assert done.stdout.splitlines() == [
        "setup: making .venv with Python 3.12.0",
        "setup: installing torch 2.13.0, the CPU build, since there is no NVIDIA GPU here",
        "setup: installing fastgen and what its development needs",
        "setup: done",
    ]
    assert (machine.project / ".venv" / "torch.txt").read_text() == "torch==2.13.0+cpu\n"


def test_then_the_cpu_build_of_pytorchs_own_index(machine: Machine) -> None:
    wanted = f"--timeout 30 --retries 2 {CPU_INDEX} torch==2.13.0+cpu"
    machine.offers(wanted, "torch==2.13.0")
    assert machine.set_up().returncode == 0
    assert machine.calls() == ["venv", "torch==2.13.0+cpu", wanted, EDITABLE]


def test_then_the_ordinary_build_after_saying_how_large_it_is(machine: Machine) -> None:
    machine.offers("torch==2.13.0")
    done = machine.set_up()
    assert done.returncode == 0
    assert machine.calls()[-2:] == ["torch==2.13.0", EDITABLE]
    assert "several GB of CUDA libraries" in done.stdout


def test_with_a_gpu_the_ordinary_build_and_never_the_cpu_one(machine: Machine) -> None:
    machine.command("nvidia-smi", "#!/bin/sh\n[ \"$*\" = -L ] && echo 'GPU 0: Some GPU (UUID: GPU-1)'\n")
    machine.offers("torch==2.13.0,!=2.13.0+cpu", "torch==2.13.0+cpu")
    assert machine.set_up().returncode == 0
    assert machine.calls() == ["venv", "torch==2.13.0,!=2.13.0+cpu", EDITABLE]


def test_macos_has_but_one_build(machine: Machine) -> None:
    machine.command("uname", "#!/bin/sh\necho Darwin\n")
    machine.offers("torch==2.13.0,!=2.13.0+cpu")
    assert machine.set_up().returncode == 0
    assert machine.calls() == ["venv", "torch==2.13.0,!=2.13.0+cpu", EDITABLE]


def test_the_second_time_nothing_is_done(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    machine.set_up()
    done = machine.set_up()
    assert (done.returncode, done.stdout, machine.calls()) == (0, "", [])


@pytest.mark.parametrize("changed", ["pyproject.toml", "tools/setup.sh"])
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
    assert moved.calls()[0] == "venv"


def test_another_failure_is_shown_and_is_no_reason_for_another_build(machine: Machine) -> None:
    machine.offers("torch==2.13.0")
    (machine.project / "broken").touch()
    done = machine.set_up()
    assert done.returncode == 1
    assert machine.calls() == ["venv", "torch==2.13.0+cpu"]
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


def test_without_a_suitable_python_it_says_what_to_do(machine: Machine) -> None:
    done = machine.set_up(UNSUITABLE="1")
    assert done.returncode == 1
    assert "no Python of version 3.11 or newer" in done.stderr
    assert not (machine.project / ".venv").exists()


def test_a_python_that_was_asked_for_is_taken_or_refused(machine: Machine) -> None:
    machine.offers("torch==2.13.0+cpu")
    done = machine.set_up(PYTHON="no-such-python")
    assert done.returncode == 1
    assert "PYTHON=no-such-python is not a Python of version 3.11" in done.stderr
    for name in ("python3", "python"):
        (machine.commands / name).unlink()
    assert machine.set_up(PYTHON="python3.12").returncode == 0
    assert machine.calls()[0] == "venv"
