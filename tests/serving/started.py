"""The processes below a server, found by their names among those that it started."""

from __future__ import annotations

from pathlib import Path


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def started_by(pid: int, name: str = "") -> list[int]:
    """Returns the descendants of process ``pid`` whose command contains ``name``, whichever thread started them."""
    children, found, left = _children(), list[int](), [pid]
    while left:
        for child in children.get(left.pop(), ()):
            left.append(child)
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if name in command:
                found.append(child)
    return found
