"""The files, processes, sockets and shared memory that a server holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Describes what a server holds when all clients have gone."""

    num_files: float
    # The commands of the processes below it, without the numbers and directories in them.
    processes: tuple[str, ...]
    # The sockets between it and its engine.
    num_sockets: int

    @classmethod
    def of(cls, num_files: float, pids: list[int]) -> Held:
        """Returns what a server holds that has ``num_files`` open files, and below it the processes ``pids``."""
        commands = [command for pid in pids if (command := _command(pid))]
        sockets = [Path(word.removeprefix("ipc://")) for words in commands for word in words if word.startswith("ipc:")]
        return cls(
            num_files,
            tuple(sorted(re.sub(r"\d+", "N", " ".join(Path(word).name for word in words)) for words in commands)),
            sum(len(list(socket.parent.iterdir())) for socket in sockets),
        )

    def beyond(self, before: Held) -> list[str]:
        """Returns in words what is held now and was not ``before``."""
        found = []
        if self.num_files > before.num_files:
            found.append(f"{self.num_files - before.num_files:g} more files are open than before")
        if self.processes != before.processes:
            found.append(f"there are other processes than before: {self.processes} in place of {before.processes}")
        if self.num_sockets != before.num_sockets:
            found.append(f"there are {self.num_sockets} sockets in place of {before.num_sockets}")
        return found


def _command(pid: int) -> list[str]:
    """Returns the words of a process's command; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def shared_memory(pid: int) -> set[str]:
    """Returns the files in shared memory that a process has mapped, and its System V segments as ``SYSV id``."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/dev/shm/"):
            found.add(name[0])
        elif name and name[0].startswith("/SYSV"):
            found.add(f"SYSV {inode}")
    return found


def still_there(names: set[str]) -> set[str]:
    """Returns which of these pieces of shared memory exist."""
    table = Path("/proc/sysvipc/shm")
    rows = table.read_text().splitlines()[1:] if table.exists() else []
    segments = {f"SYSV {row.split()[1]}" for row in rows}
    return {name for name in names if name in segments or (name.startswith("/") and Path(name).exists())}
