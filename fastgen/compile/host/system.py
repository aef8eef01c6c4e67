"""The memory of this machine, and the limits of its container. It needs no torch, as the server's process does not."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# What the first version of control groups has in place of the files of the second. Without a limit it has a number that
# is larger than any memory, and a time of -1.
_FIRST_VERSION = {
    "memory.max": ("memory/memory.limit_in_bytes",),
    "memory.current": ("memory/memory.usage_in_bytes",),
    "memory.stat": ("memory/memory.stat",),
    "cpu.max": ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
}


def memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or as much as its container allows."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_cgroup("memory.max")
    return min(installed, int(limit)) if limit.isdigit() else installed


def read_cgroup(name: str) -> str:
    """Returns the text of a file of this process's control group, by its name in the second version of these groups;
    empty where there is none.
    """
    return read_text(_CGROUP / name) or " ".join(read_text(_CGROUP / each) for each in _FIRST_VERSION[name]).strip()


def read_text(file: Path) -> str:
    """Returns the text of ``file`` without white space around it; empty where there is none."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
