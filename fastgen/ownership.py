"""Says whether another user of this machine could change what a directory holds, or wrote a file.

Root is trusted, since root can change everything. So are links into such directories: they are followed first.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def trusted_users() -> frozenset[int]:
    """Returns the ids of the users whose files are taken for this process's own."""
    return frozenset((0, os.geteuid()))


def is_foreign(facts: os.stat_result) -> bool:
    """Returns whether the file with these ``facts`` belongs to another user."""
    return facts.st_uid not in trusted_users()


def why_untrusted(directory: Path) -> str | None:
    """Returns why another user could change what ``directory`` holds, as a sentence about "it".

    It and every directory above it must belong to a trusted user, and no other may write there. A sticky directory
    above it may be open to all, since nobody can replace another's files there. A group may write above it if the owner
    is its only member. ``None`` if all that holds, or if the directory does not exist.
    """
    directory = Path(os.path.realpath(directory))
    try:
        facts = directory.stat()
        above = [(parent, parent.stat()) for parent in directory.parents]
    except OSError:
        return None
    if is_foreign(facts):
        return f"it belongs to another user, {_user_name(facts.st_uid)}"
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        return f"other users may write to it; {_how_to_forbid(directory)}"
    for parent, its_facts in above:
        if is_foreign(its_facts):  # the owner of a sticky directory may replace what is in it, too
            return f"another user, {_user_name(its_facts.st_uid)}, may replace it, since {parent} belongs to that user"
        writers = _writers(its_facts)
        if writers is not None and not its_facts.st_mode & stat.S_ISVTX:
            return f"other users may replace it, since {writers} may write to {parent}; {_how_to_forbid(parent)}"
    return None


def _writers(facts: os.stat_result) -> str | None:
    """Returns who may write to a file beside its owner."""
    if facts.st_mode & stat.S_IWOTH:
        return "all"
    return "a group" if facts.st_mode & stat.S_IWGRP and not _is_owners_group(facts) else None


def _is_owners_group(facts: os.stat_result) -> bool:
    """Returns whether the owner alone is in the file's group. Many systems make such a group for each user."""
    try:
        owner, group = pwd.getpwuid(facts.st_uid), grp.getgrgid(facts.st_gid)
    except KeyError:  # the system has no name for it
        return False
    name = owner.pw_name
    return (owner.pw_gid, name) == (group.gr_gid, group.gr_name) and set(group.gr_mem) <= {name}


def _how_to_forbid(directory: Path) -> str:
    return f"`chmod go-w {shlex.quote(str(directory))}` forbids that"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # the system has no name for it
        return str(uid)
