"""The kernel cache under everything a disk and other processes do to it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fastgen import ownership
from fastgen.compile.build import cache as module
from fastgen.compile.build.cache import Entry, KernelCache, default_directory
from fastgen.errors import KernelError

KEY = {"suffix": ".cpp", "arch": "avx2", "source": "0123", "versions": {"compiler": "g++ 12"}}


class Maker:
    """Stands in for a compiler: writes a binary, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, directory: Path) -> dict[str, int]:
        self.count += 1
        assert (directory / "norm.cpp").read_text() == "source"
        (directory / "norm.so").write_bytes(b"binary" * 100)
        return {"registers": 40}


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(module, "_temporary_directory", lambda: tmp_path / "spare")
    return KernelCache(tmp_path / "kernels")


def build(cache: KernelCache, make: Callable[[Path], dict[str, int]], key=KEY, name="norm") -> Entry:
    return cache.build(name, key, "source", make)


def test_an_entry_is_built_once_and_found_again(cache, make) -> None:
    assert cache.find("norm", KEY) is None
    entry = build(cache, make)
    assert build(cache, make) == build(KernelCache(cache.directory), make) == cache.find("norm", KEY) == entry
    assert make.count == 1
    assert (entry.name, entry.arch, entry.report) == ("norm", "avx2", {"registers": 40})
    assert entry.directory.name.startswith("norm-avx2-")
    assert {path.name for path in entry.directory.iterdir()} == {"norm.cpp", "norm.so", "manifest.json"}
    assert entry.source.read_text() == "source"
    assert entry.size_bytes == sum(path.stat().st_size for path in entry.directory.iterdir())


@pytest.mark.parametrize(
    "changed", [{"source": "4567"}, {"arch": "portable"}, {"versions": {"compiler": "g++ 13"}}, {"suffix": ".cc"}]
)
def test_each_part_of_the_key_counts(cache, make, changed) -> None:
    build(cache, make)
    assert cache.find("norm", KEY | changed) is None
    assert cache.find("other", KEY) is None


def truncate_binary(place: Path) -> None:
    (place / "norm.so").write_bytes(b"binary")


def truncate_manifest(place: Path) -> None:
    (place / "manifest.json").write_text((place / "manifest.json").read_text()[:40])


def remove_binary(place: Path) -> None:
    (place / "norm.so").unlink()


def edit_source(place: Path) -> None:
    (place / "norm.cpp").write_text("sourcf")


def add_file(place: Path) -> None:
    (place / "norm.ptx").write_text("")


def come_from_another_version(place: Path) -> None:
    edit_manifest(place, lambda manifest: manifest["key"]["versions"].update(compiler="g++ 11"))


def come_from_another_format(place: Path) -> None:
    edit_manifest(place, lambda manifest: manifest.update(format=99))


def be_a_list(place: Path) -> None:
    (place / "manifest.json").write_text("[1]")


def nest_manifest_too_deep(place: Path) -> None:
    (place / "manifest.json").write_text("[" * 100_000)


def be_a_file(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("not a directory")


def be_empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def edit_manifest(place: Path, edit: Callable[[dict], None]) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    edit(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [
    *(truncate_binary, truncate_manifest, remove_binary, edit_source, add_file, come_from_another_version),
    *(come_from_another_format, be_a_list, nest_manifest_too_deep, be_a_file, be_empty),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_entry_is_built_again(cache, make, damage) -> None:
    entry = build(cache, make)
    damage(entry.directory)
    assert cache.find("norm", KEY) is None
    assert build(cache, make) == entry
    assert make.count == 2
    assert (entry.directory / "norm.so").read_bytes() == b"binary" * 100
    assert [path.name for path in cache.directory.iterdir() if path.name != ".locks"] == [entry.directory.name]


def test_a_failed_build_leaves_nothing(cache, make) -> None:
    def fail(directory: Path) -> dict[str, int]:
        (directory / "norm.so").write_bytes(b"half")
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        build(cache, fail)
    assert [path.name for path in cache.directory.iterdir()] == [".locks"]
    assert cache.find("norm", KEY) is None
    build(cache, make)
    assert make.count == 1


def test_a_process_killed_while_it_builds_leaves_no_entry_and_no_lock(cache, make) -> None:
    code = f"""
import sys, time
from pathlib import Path
from fastgen.compile.build.cache import KernelCache

def stall(directory):
    (directory / "norm.so").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(600)

KernelCache(Path({str(cache.directory)!r})).build("norm", {KEY!r}, "source", stall)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
    assert cache.find("norm", KEY) is None
    assert cache.entries() == []
    assert build(cache, make).source.read_text() == "source"
    assert make.count == 1
    assert [path.name for path in cache.directory.glob(".norm*")] == []


def test_several_threads_build_once(cache, make) -> None:
    def slowly(directory: Path) -> dict[str, int]:
        time.sleep(0.1)
        return make(directory)

    found: list[Entry] = []
    threads = [threading.Thread(target=lambda: found.append(build(cache, slowly))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.count == 1
    assert len(found) == 5
    assert all(entry == found[0] for entry in found)


def test_two_processes_that_start_at_once_on_an_empty_cache_build_once(cache, tmp_path) -> None:
    code = f"""
import time
from pathlib import Path
from fastgen.compile.build.cache import KernelCache

def make(directory):
    with open({str(tmp_path / "builds")!r}, "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    (directory / "norm.so").write_bytes(b"binary" * 100)
    return {{}}

Path({str(tmp_path)!r}, f"ready-{{__import__('os').getpid()}}").touch()
while len(list(Path({str(tmp_path)!r}).glob("ready-*"))) < 3:
    time.sleep(0.005)
for number in range(4):
    key = {KEY!r} | {{"source": str(number)}}
    entry = KernelCache(Path({str(cache.directory)!r})).build("norm", key, "source", make)
    assert (entry.directory / "norm.so").read_bytes() == b"binary" * 100
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    assert (tmp_path / "builds").read_text().count("built") == 4
    assert len(cache.entries()) == 4


def test_one_build_does_not_wait_for_another_kernels(cache, make) -> None:
    def make_the_first_within(directory: Path) -> dict[str, int]:
        build(cache, make)
        return {}

    cache.build("other", KEY, "source", make_the_first_within)
    assert len(cache.entries()) == 2


def test_a_file_system_without_locks_will_do(cache, make, monkeypatch) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", flock)

    def make_while_another_does(directory: Path) -> dict[str, int]:
        build(cache, make)
        return make(directory)

    build(cache, make_while_another_does)
    assert make.count == 2
    assert len(cache.entries()) == 1


def refuse(code: int, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Every directory made below ``root`` from now on fails: tests may run as root, whom permissions do not stop."""
    real = os.mkdir

    def mkdir(path, *arguments, **keywords) -> None:
        if Path(path).is_relative_to(root):
            raise OSError(code, os.strerror(code), str(path))
        real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "mkdir", mkdir)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_is_replaced_with_one_warning(cache, make, monkeypatch, code) -> None:
    kept = build(cache, make)
    refuse(code, monkeypatch, cache.directory)
    with pytest.warns(UserWarning, match="FASTGEN_CACHE names another directory") as warned:
        entries = [build(cache, make, KEY | {"source": str(number)}) for number in range(3)]
    (said,) = (str(each.message) for each in warned if each.category is UserWarning)
    assert str(cache.directory) in said
    assert os.strerror(code) in said
    assert not any(entry.directory.is_relative_to(cache.directory) for entry in entries)
    # What was there is still used, and what was built is found.
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert cache.find("norm", KEY) == kept
        assert [cache.find("norm", KEY | {"source": str(number)}) for number in range(3)] == entries
        assert build(cache, make, KEY | {"source": "2"}) == entries[2]
    assert make.count == 4


def test_a_disk_that_fills_up_while_a_kernel_is_built(cache, make) -> None:
    def run_out(directory: Path) -> dict[str, int]:
        if directory.is_relative_to(cache.directory):
            (directory / "norm.so").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(directory)

    with pytest.warns(UserWarning, match="No space left on device"):
        entry = build(cache, run_out)
    assert not entry.directory.is_relative_to(cache.directory)
    assert make.count == 1
    assert cache.entries() == []


def test_a_compiler_that_finds_no_room_is_not_taken_for_a_mistake_in_the_source(cache, make, monkeypatch) -> None:
    def fail(directory: Path) -> dict[str, int]:
        if directory.is_relative_to(cache.directory):
            raise ValueError("ld returned 1 exit status")
        return make(directory)

    with pytest.raises(ValueError, match="ld returned 1"):  # there is room, so it is one
        build(cache, fail)

    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        build(cache, fail)
    assert make.count == 1


def test_a_file_where_the_cache_should_be(cache, make) -> None:
    cache.directory.write_text("")
    with pytest.warns(UserWarning, match="kernels cannot be kept in"):
        build(cache, make)
    assert make.count == 1


@pytest.mark.parametrize("place", ["/proc/self/kernels", "long" * 100])
def test_a_place_that_cannot_be_made(place, tmp_path, cache, make) -> None:
    cache = KernelCache(tmp_path / place)
    assert (cache.find("norm", KEY), cache.entries(), cache.clean()) == (None, [], (0, 0))
    with pytest.warns(UserWarning, match=r"kernels cannot be kept in .*(/proc/\d+/kernels|longlong)"):
        entry = build(cache, make)
    assert cache.find("norm", KEY) == entry


def test_what_a_failure_leaves_outlives_the_process_where_the_cache_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code = "from fastgen.compile.build.cache import KernelCache; print(KernelCache().failed('norm'))"
    environment = {**os.environ, "FASTGEN_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir()


def test_another_os_error_is_not_taken_for_a_full_disk(cache) -> None:
    def fail(directory: Path) -> dict[str, int]:
        raise OSError(errno.ENOEXEC, "Exec format error")

    with pytest.raises(OSError, match="Exec format error"):
        build(cache, fail)


def test_clean_removes_all_that_is_the_caches_and_nothing_else(cache, make) -> None:
    entries = [build(cache, make, KEY | {"source": str(number)}) for number in range(3)]
    size = sum(entry.size_bytes for entry in entries[1:])
    (entries[0].directory / "norm.so").write_bytes(b"")
    cache.failed("norm")
    (cache.directory / "notes").mkdir()
    (cache.directory / "readme.txt").write_text("mine")
    assert cache.clean() == (2, size)
    assert {path.name for path in cache.directory.iterdir()} == {"notes", "readme.txt"}
    assert cache.clean() == (0, 0)
    assert build(cache, make) is not None


def test_clean_leaves_what_is_being_built(cache, make) -> None:
    def make_while_cleaned(directory: Path) -> dict[str, int]:
        (cache.directory / ".norm-left_behind.0a1b").mkdir()
        assert cache.clean() == (1, size)
        assert sorted(each.name for each in cache.directory.iterdir()) == sorted([".locks", directory.name])
        return make(directory)

    size = build(cache, make, KEY | {"source": "another"}).size_bytes
    entry = build(cache, make_while_cleaned)
    assert cache.find("norm", KEY) == entry
    assert entry.size_bytes > 0
    assert cache.clean()[0] == 1
    assert not list(cache.directory.iterdir())
    assert entry.size_bytes == 0


def test_an_entry_that_is_cleaned_as_soon_as_it_is_there_is_built_again(cache, make, monkeypatch) -> None:
    publish, read = module.publish, module._read

    def publish_to_be_cleaned(draft: Path, place: Path) -> None:
        publish(draft, place)
        if make.count == 1:
            assert cache.clean()[0] == 1

    def read_while_it_is_cleaned(place: Path, key: object) -> Entry | None:
        if make.count == 2 and place.exists():
            make.count += 1
            cache.clean()
        return read(place, key)

    monkeypatch.setattr(module, "publish", publish_to_be_cleaned)
    monkeypatch.setattr(module, "_read", read_while_it_is_cleaned)
    entry = build(cache, make)
    assert make.count == 4
    assert entry.size_bytes > 0


def test_a_lock_that_is_removed_while_one_waits_for_it_is_taken_anew(tmp_path: Path) -> None:
    path, found, waiting = tmp_path / "locks" / "norm", [], threading.Event()

    def wait() -> None:
        waiting.set()
        with module._lock(path) as is_held:
            found.append((is_held, path.exists()))

    with module._lock(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait()
        path.unlink()
    waiter.join()
    assert found == [(True, True)]


def test_clean_and_entries_of_a_cache_that_does_not_exist(cache) -> None:
    assert cache.clean() == (0, 0)
    assert cache.entries() == []


def test_a_cache_that_cannot_be_read_is_reported(cache, make, monkeypatch) -> None:
    build(cache, make)

    def refuse_to_list(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse_to_list)  # tests may run as root
    for ask in (cache.entries, cache.clean):
        with pytest.raises(
            KernelError, match=f"{cache.directory} cannot be read .Permission denied.; .* FASTGEN_CACHE"
        ):
            ask()


def test_clean_counts_what_it_could_remove(cache, make, monkeypatch) -> None:
    mine, theirs = (build(cache, make, KEY | {"source": name}) for name in ("mine", "theirs"))
    size, move_away = mine.size_bytes, module._move_away

    def refuse_theirs(place: Path) -> None:
        if place == theirs.directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        move_away(place)

    monkeypatch.setattr(module, "_move_away", refuse_theirs)
    assert cache.clean() == (1, size)
    assert cache.entries() == [theirs]


def test_entries_come_by_name(cache, make) -> None:
    (cache.directory / "failed").mkdir(parents=True)
    for name in ("norm", "attention"):
        cache.build(name, KEY, "source", lambda directory: {})
    assert [entry.name for entry in cache.entries()] == ["attention", "norm"]


def test_the_directory_is_the_users_unless_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "mine"))
    assert default_directory() == tmp_path / "mine"
    assert KernelCache().directory == tmp_path / "mine"
    monkeypatch.delenv("FASTGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "fastgen" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "fastgen" / "kernels"


def test_no_other_user_may_write_into_it(cache, make) -> None:
    build(cache, make)
    assert cache.directory.stat().st_mode & 0o022 == 0


def plant(entry: Entry) -> None:
    """Puts another binary into an entry, with a manifest that fits it."""
    (entry.directory / "norm.so").write_bytes(b"planted")
    manifest = json.loads((entry.directory / "manifest.json").read_text())
    manifest["files"]["norm.so"] = module.file_hash(entry.directory / "norm.so")
    (entry.directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_others_can_write_to_is_replaced_with_one_warning(cache, make, mode) -> None:
    place = cache.directory
    plant(build(cache, make))
    place.chmod(mode)
    shared = KernelCache(place)
    with pytest.warns(UserWarning, match="other users may write to it; `chmod go-w .*; .*FASTGEN_CACHE") as warned:
        assert shared.find("norm", KEY) is None
    with warnings.catch_warnings(action="error", category=UserWarning):
        entry = build(shared, make)
        assert shared.find("norm", KEY) == entry
    assert len([each for each in warned if each.category is UserWarning]) == 1
    assert not entry.directory.is_relative_to(place)
    assert (entry.directory / "norm.so").read_bytes() == b"binary" * 100


def test_a_directory_of_another_user_is_neither_read_nor_written(cache, make, monkeypatch) -> None:
    place = cache.directory
    build(cache, make)
    before = sorted(place.rglob("*"))
    somebody_else = frozenset((place.stat().st_uid + 1,))
    monkeypatch.setattr(ownership, "trusted_users", lambda: somebody_else)
    theirs = KernelCache(place)
    with pytest.warns(UserWarning, match="it belongs to another user"):
        assert (theirs.entries(), theirs.clean()) == ([], (0, 0))
    left = theirs.failed("norm")
    assert not left.is_relative_to(place)
    assert not left.is_relative_to(theirs.directory), "a failure's files outlive the process"
    left.rmdir()
    assert sorted(place.rglob("*")) == before


def test_a_directory_that_another_user_makes_first_is_replaced(cache, make, monkeypatch, tmp_path) -> None:
    """It appears between the look at its place and the build."""
    real = Path.mkdir

    def mkdir(path: Path, *arguments, **keywords) -> None:
        real(path, *arguments, **keywords)
        if path == tmp_path / "kernels":
            path.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.warns(UserWarning, match="other users may write to it"):
        entry = build(cache, make)
    assert not entry.directory.is_relative_to(tmp_path / "kernels")


def test_a_directory_below_one_that_all_can_write_to_is_replaced_unless_that_is_sticky(tmp_path, make) -> None:
    above = tmp_path / "above"
    build(KernelCache(above / "kernels"), make)
    above.chmod(0o1777)
    assert KernelCache(above / "kernels").directory == above / "kernels"
    above.chmod(0o777)
    with pytest.warns(UserWarning, match=f"since all may write to {above}"):
        assert KernelCache(above / "kernels").find("norm", KEY) is None


def test_a_link_is_followed_once(cache, make, tmp_path) -> None:
    entry = build(cache, make)
    (tmp_path / "link").symlink_to(cache.directory)
    linked = KernelCache(tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert linked.find("norm", KEY) == entry


def test_an_entry_that_another_user_left_is_built_again(cache, make, monkeypatch) -> None:
    """The directory was open to all once, and is private now."""
    entry = build(cache, make)
    plant(entry)
    planted = (entry.directory / "norm.so").stat().st_ino
    monkeypatch.setattr(module, "is_foreign", lambda facts: facts.st_ino == planted)
    assert cache.find("norm", KEY) is None
    assert cache.entries() == []
    rebuilt = build(cache, make)
    assert (rebuilt.directory / "norm.so").read_bytes() == b"binary" * 100
