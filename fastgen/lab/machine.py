"""The facts of this machine and this process that stand in the header of every run."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from fastgen.version import __version__, installed_version

_PACKAGES = ("torch", "triton", "transformers", "numpy")


@cache
def machine_facts() -> dict[str, Any]:
    """Returns processor, cores, kernel, versions and, in a git checkout, the commit of fastgen."""
    packages = {name: installed_version(name) for name in _PACKAGES}
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fastgen": __version__,
        "commit": _commit(),
        **{name: found for name, found in packages.items() if found is not None},
    }


def processor() -> str:
    """Returns the name of this machine's processor."""
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor()


def _commit() -> str | None:
    """Returns the commit of this checkout, with ``-dirty`` where files were changed since."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed; a repository around it would be another project's
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
