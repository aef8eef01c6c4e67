"""The file of results: everything measured, in order, written after every sample."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.engines.protocol import versions
from fastgen.compile.host import device


def commit() -> str:
    """Returns the commit that is measured, with ``-dirty`` where files were changed since. In a copy of the repository
    without git it is what ``FASTGEN_COMMIT`` in the environment says, or ``""``."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        found = ""
    else:
        found = done.stdout.strip()
    return found or os.environ.get("FASTGEN_COMMIT", "")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def about_this_run(**facts: Any) -> dict[str, Any]:
    """Returns when, on what and of which build something is measured, and the ``facts``."""
    here = device.current("cpu")
    about = {"date": now(), "commit": commit(), "machine": here.name, "cores": here.num_cores}
    return {**about, "kernel": platform.release(), **facts}


class Results:
    """A file of measurements. A file that exists is continued.

    It holds ``about`` (the machine and the run), ``engines`` (by row: set-up, versions, what the gate found, or why
    there is nothing), ``samples`` of workloads, ``turns`` of fastgen and another engine, and ``steps`` of decoding.

    Raises:
        ValueError: The file is of another machine or another number of threads.
    """

    def __init__(self, path: Path, num_threads: int):
        self._path = path
        self._commit = commit()
        here = device.current("cpu")
        about = {"machine": here.name, "cores": here.num_cores, "threads": num_threads, "memory": here.memory_bytes}
        self.data: dict[str, Any] = {
            "about": about | {"date": now(), "kernel": platform.release(), "versions": versions("fastgen", "torch")},
            "engines": {},
            "samples": [],
            "turns": [],
            "steps": [],
        }
        if path.exists():
            self.data |= json.loads(path.read_text())
            others = {name for name, value in about.items() if self.data["about"][name] != value}
            if others:
                raise ValueError(f"{path} was measured with another {', '.join(sorted(others))}; give another --json")

    def has_sample(self, **fields: Any) -> bool:
        return any(fields.items() <= each.items() for each in self.data["samples"])

    def has_steps(self, **fields: Any) -> bool:
        return any(fields.items() <= each.items() for each in self.data["steps"])

    def num_turns(self, **fields: Any) -> int:
        return sum(fields.items() <= each.items() for each in self.data["turns"])

    def turns_of_build(self, **fields: Any) -> list[dict[str, Any]]:
        """Returns the turns with these fields that were measured with the commit that is measured now."""
        wanted = {"commit": self._commit, **fields}
        return [each for each in self.data["turns"] if wanted.items() <= each.items()]

    def add(self, kind: str, **fields: Any) -> None:
        """Adds a measurement and writes the file. ``kind`` is ``"samples"``, ``"turns"`` or ``"steps"``."""
        self.data[kind].append({"date": now(), "commit": self._commit, **fields})
        self.write()

    def note_engine(self, row: str, **fields: Any) -> None:
        self.data["engines"].setdefault(row, {}).update(fields)
        self.write()

    def write(self) -> None:
        """Writes the whole file, or leaves the old one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(_compact(self.data) + "\n")
        os.replace(unfinished, self._path)


def _compact(data: dict[str, Any]) -> str:
    """Writes one line for each sample, so that differences can be read."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(each) for each in value)
            parts.append(f'"{name}": [\n  {lines}\n ]' if value else f'"{name}": []')
        else:
            parts.append(f'"{name}": {json.dumps(value, indent=2)}')
    return "{\n " + ",\n ".join(parts) + "\n}"
