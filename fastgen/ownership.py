"""Says whether another user of this machine could change what a directory holds, or wrote a file.

Root is trusted, since root can change everything. So are links into such directories: they are followed first.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from pathlib import Path


def trusted_users() -> frozenset[int]:
    """Returns the ids of the users whose files are taken for this process's own."""
    return frozenset((0, os.geteuid()))


def is_foreign(facts: os.stat_result) -> bool:
    """Returns whether the file with these ``facts`` belongs to another user."""
    return facts.st_uid not in trusted_users()


def why_untrusted(directory: Path) -> str | None:
    """Returns why another user could change what ``directory`` holds, as a sentence about "it".

    The owner and the mode of the directory count, and of those above it whether everybody may write there. ``None`` if
    no other user could, or if the directory does not exist.
    """
    directory = Path(os.path.realpath(directory))
    try:
        facts = directory.stat()
        above = [(parent, parent.stat().st_mode) for parent in directory.parents]
    except OSError:
        return None
    if is_foreign(facts):
        return f"it belongs to another user, {_user_name(facts.st_uid)}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to it; `chmod go-w {shlex.quote(str(directory))}` forbids that"
    for parent, mode in above:
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # in a sticky directory nobody can replace it
            return f"other users may replace it, since all may write to {parent}"
    return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # the system has no name for it
        return str(uid)
