"""The memory of this machine, and the limits of its container. It needs no torch, as the server's process does not."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or as much as its container allows."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_cgroup("memory.max")
    return min(installed, int(limit)) if limit.isdigit() else installed


def read_cgroup(name: str) -> str:
    """Returns the text of a file of this process's control group; empty where there is none."""
    return read_text(_CGROUP / name)


def read_text(file: Path) -> str:
    """Returns the text of ``file`` without white space around it; empty where there is none."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
