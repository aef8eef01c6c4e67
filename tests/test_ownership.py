"""Which directories another user of the machine could change."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgen import ownership
from fastgen.ownership import why_untrusted


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory below the home of a user, whose group has others too."""
    monkeypatch.setattr(ownership, "_is_owners_group", lambda facts: False)
    directory = tmp_path / "alice" / "cache"
    directory.mkdir(parents=True)
    return directory


def test_a_directory_of_this_user_below_others_of_root_and_this_user_is_trusted(directory: Path) -> None:
    for place in (directory, directory.parent, Path(tempfile.mkdtemp(dir=directory)), Path("/")):
        assert why_untrusted(place) is None
    assert why_untrusted(directory / "missing") is None


@pytest.mark.parametrize("mode", [0o700, 0o1700, 0o1777])
def test_the_owner_of_a_directory_above_could_replace_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Root may run with the home of another user, for example."""
    home = directory.parent
    home.chmod(mode)
    monkeypatch.setattr(ownership, "is_foreign", lambda facts: facts.st_ino == home.stat().st_ino)
    reason = why_untrusted(directory)
    assert reason is not None
    assert reason.startswith("another user, ")
    assert reason.endswith(f" may replace it, since {home} belongs to that user")


@pytest.mark.parametrize(
    ("mode", "writers"),
    [(0o770, "a group"), (0o777, "all"), (0o775, "a group"), (0o755, None), (0o1777, None), (0o1775, None)],
)
def test_who_may_write_to_a_directory_above_could_replace_it_unless_that_is_sticky(
    directory: Path, mode: int, writers: str | None
) -> None:
    home = directory.parent
    home.chmod(mode)
    expected = f"other users may replace it, since {writers} may write to {home}; `chmod go-w {home}` forbids that"
    assert why_untrusted(directory) == (expected if writers else None)


@pytest.mark.parametrize(
    ("group", "is_own"),
    [
        (("alice", 1000, []), True),
        (("alice", 1000, ["alice"]), True),
        (("alice", 1000, ["alice", "bob"]), False),
        (("users", 1000, []), False),
        (("alice", 1001, []), False),
        (None, False),
    ],
)
def test_a_group_that_only_the_owner_is_in_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: tuple[str, int, list[str]] | None, is_own: bool
) -> None:
    def found(gid: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(gid)
        return SimpleNamespace(gr_name=group[0], gr_gid=group[1], gr_mem=group[2])

    monkeypatch.setattr(ownership.grp, "getgrgid", found)
    owner = SimpleNamespace(pw_name="alice", pw_gid=1000)
    monkeypatch.setattr(ownership.pwd, "getpwuid", lambda uid: owner)
    home = tmp_path / "alice"
    (home / "cache").mkdir(parents=True, mode=0o700)
    home.chmod(0o775)
    assert (why_untrusted(home / "cache") is None) is is_own


def test_a_link_is_followed_before_its_owner_and_those_above_are_looked_at(directory: Path) -> None:
    directory.parent.chmod(0o770)
    link = directory.parent.parent / "link"
    os.symlink(directory, link)
    assert why_untrusted(link) == why_untrusted(directory) is not None
