"""Built kernels on disk. An entry is a directory with source, binaries and a manifest; it is complete or absent.

```
<cache>/rms_norm_h4096_bf16-sm_90-0a1b2c3d4e5f6071/
    rms_norm_h4096_bf16.py      the source that was compiled
    rms_norm_h4096_bf16.cubin … the binaries
    manifest.json               the key's parts, a hash of every file, the builder's report
```

The key is a hash of the rendered source and of everything else that decides the binaries (tool versions, flags, the
architecture), so an entry never changes: one that differs from its manifest is damaged and is built again.

Entries are code that runs. So a directory that another user of the machine could have written to is not used at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fastgen.errors import KernelError
from fastgen.ownership import is_foreign, why_untrusted

_MANIFEST = "manifest.json"
_LOCKS = ".locks"
_FAILED = "failed"
_FORMAT = 1
# Errors that mean that a directory cannot be written to, rather than that a build failed.
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}
_ROOM = 16 << 20  # bytes; a built kernel takes a tenth of it at most
_falling_back = threading.Lock()
# The directories, and the reasons, of which this process has warned.
_warned_of: set[tuple[Path, str]] = set()
Make = Callable[[Path], Mapping[str, Any]]
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def default_directory() -> Path:
    """Returns ``$FASTGEN_CACHE``, or ``fastgen/kernels`` in the user's cache directory."""
    if given := os.environ.get("FASTGEN_CACHE"):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "fastgen" / "kernels"


@dataclass(frozen=True)
class Entry:
    """A built kernel: its directory, its source file, and the builder's report."""

    name: str
    arch: str
    directory: Path
    source: Path
    report: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        try:
            return sum(file.stat().st_size for file in self.directory.iterdir())
        except FileNotFoundError:  # another process has just cleaned the cache
            return 0

    def files(self) -> list[Path]:
        """Returns the source and the binaries, without the manifest."""
        return sorted(file for file in self.directory.iterdir() if file.name != _MANIFEST)


class KernelCache:
    """Entries below one directory, shared by any number of processes of one user."""

    def __init__(self, directory: Path | None = None):
        # Without links, which another user may point elsewhere later.
        self._wanted = Path(os.path.realpath(directory or default_directory()))
        # A temporary directory in place of ``_wanted``, where another user could change what that holds.
        self._replacement: Path | None = None
        # A temporary directory for what cannot be written to ``directory``.
        self._fallback: Path | None = None

    @property
    def directory(self) -> Path:
        """Returns the directory of the entries.

        A temporary directory of this process takes its place, with a warning, if another user of the machine could
        change what it holds.
        """
        if self._replacement is None and (reason := why_untrusted(self._wanted)) is not None:
            with _falling_back:
                is_first = self._replacement is None
                self._replacement = _temporary_directory()
            if is_first:
                self._warn(reason)
        return self._replacement or self._wanted

    def find(self, name: str, key: Mapping[str, Any]) -> Entry | None:
        """Returns the entry of kernel ``name`` whose key has these parts, if it exists and is undamaged."""
        roots = (self.directory, self._fallback) if self._fallback is not None else (self.directory,)
        entries = (_read(root / _place_name(name, key), key) for root in roots)
        return next((entry for entry in entries if entry is not None), None)

    def build(self, name: str, key: Mapping[str, Any], source: str, make: Make) -> Entry:
        """Returns the entry, and builds it if it is missing: ``make(directory)`` adds binaries and returns a report.

        Of several processes one builds and the others wait. Where the cache cannot be made or written (read-only,
        full), a temporary directory of this process replaces it, with a warning.
        """
        if self._fallback is None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # looked at again once it exists
                return _build(self.directory, name, key, source, make)
            except OSError as error:
                if error.errno not in _UNWRITABLE and os.path.isdir(self.directory):
                    raise
                self._fall_back(error)
        assert self._fallback is not None
        return _build(self._fallback, name, key, source, make)

    def _fall_back(self, error: OSError) -> None:
        with _falling_back:
            if self._fallback is not None:
                return
            self._fallback = _temporary_directory()
        self._warn(str(error.strerror))

    def _warn(self, reason: str) -> None:
        """Warns that kernels cannot be kept. Of all caches in a directory the first one does."""
        if (self._wanted, reason) in _warned_of:
            return
        _warned_of.add((self._wanted, reason))
        warnings.warn(
            f"kernels cannot be kept in {self._wanted} ({reason}), so they are built for this process alone; the "
            "environment variable FASTGEN_CACHE names another directory",
            stacklevel=3,
        )

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds a lock of that name within the block, where the directory can be written and its file system has locks.

        Of several processes with this cache one is in such a block at a time.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                held.enter_context(_lock(self.directory / _LOCKS / name))
            yield

    def discard(self, entry: Entry) -> None:
        """Removes an entry that was found to be outdated, so that the next build makes it again."""
        self._discard(entry.directory)

    @staticmethod
    def _discard(place: Path) -> None:
        with contextlib.suppress(OSError):
            _move_away(place)

    def entries(self) -> list[Entry]:
        """Returns all undamaged entries, by name. Raises :class:`KernelError` for a directory that cannot be read."""
        if not os.path.isdir(self.directory):
            return []
        with self._explained("read"):
            places = [each for each in self.directory.iterdir() if not each.name.startswith(".") and each.is_dir()]
        found = [entry for place in sorted(places) if (entry := _read(place, None)) is not None]
        return sorted(found, key=lambda entry: entry.name)

    def clean(self) -> tuple[int, int]:
        """Removes everything but running builds: entries, damaged ones, locks, failed builds. Returns the number of
        removed entries, and their bytes. Raises :class:`KernelError` for a directory that cannot be read or written.
        """
        size_bytes = {entry.directory: entry.size_bytes for entry in self.entries()}
        with self._explained("cleaned"):
            self._remove_all()
        freed = [size_bytes[place] for place in size_bytes if not place.exists()]
        return len(freed), sum(freed)

    def _remove_all(self) -> None:
        locks = self.directory / _LOCKS
        if os.path.isdir(self.directory):
            for each in self.directory.iterdir():
                is_hidden, (place_name, _, _) = each.name.startswith("."), each.name[1:].rpartition(".")
                if is_hidden and place_name:  # a draft
                    with _lock(locks / place_name, waits=False) as is_held:
                        if is_held:  # else its process is still building
                            remove(each)
                elif each != locks and (is_hidden or each.name == _FAILED):
                    remove(each)
                elif (each / _MANIFEST).exists():
                    self._discard(each)
        if os.path.isdir(locks):
            for each in locks.iterdir():
                with _lock(each, waits=False) as is_held:
                    if is_held:
                        remove(each)
            with contextlib.suppress(OSError):
                locks.rmdir()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns the system's errors within the block into errors of the cache."""
        try:
            yield
        except OSError as error:
            raise KernelError(
                f"the kernel cache {self.directory} cannot be {what} ({error.strerror}); the environment variable "
                "FASTGEN_CACHE names another directory"
            ) from error

    def failed(self, name: str) -> Path:
        """Returns a new directory for the files of a failure, which outlives the process. Raises ``OSError``."""
        place = self.directory / _FAILED / f"{name}-{uuid.uuid4().hex[:8]}"
        if self._fallback is None and self._replacement is None:  # a temporary directory ends with the process
            with contextlib.suppress(OSError):
                place.mkdir(parents=True)
                return place
        return Path(tempfile.mkdtemp(prefix=f"fastgen-failed-{name}-"))


def cache_of(source: Path) -> KernelCache:
    """Returns the cache of a kernel's source; for a kernel of a bundle, which is never written to, the user's cache."""
    return KernelCache(source.parent.parent if (source.parent / _MANIFEST).exists() else None)


def _build(root: Path, name: str, key: Mapping[str, Any], source: str, make: Make) -> Entry:
    place = root / _place_name(name, key)
    with _lock(root / _LOCKS / place.name) as is_held:
        if (entry := _read(place, key)) is not None:  # another process was faster
            return entry
        if is_held:
            for left_behind in root.glob(f".{place.name}.*"):  # by a process that was killed
                remove(left_behind)
        draft = root / f".{place.name}.{uuid.uuid4().hex}"
        draft.mkdir(mode=0o700)
        try:
            (draft / f"{name}{key['suffix']}").write_text(source, encoding="utf-8")
            _seal(draft, name, key, make(draft))
            publish(draft, place)
        except Exception:
            _check_room(draft)  # without room a compiler fails as if the source were wrong
            raise
        finally:
            remove(draft)
        entry = _read(place, key)
    if entry is None and not place.exists():  # another process has just cleaned the cache
        return _build(root, name, key, source, make)
    if entry is None:
        raise KernelError(f"kernel {name}: what was just written to {place} reads back differently", kernel=name)
    return entry


def _check_room(directory: Path) -> None:
    """Raises ``OSError`` where a build may have failed for lack of room."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(_ROOM))


def _place_name(name: str, key: Mapping[str, Any]) -> str:
    return f"{name}-{key['arch']}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def _read(place: Path, key: Mapping[str, Any] | None) -> Entry | None:
    """Returns the entry at ``place``. Its files must be those of its manifest, and none another user's; its key must be
    ``key``, where that is given."""
    try:
        if any(is_foreign(each.lstat()) for each in (place, *place.iterdir())):
            return None
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        files, found = manifest["files"], manifest["key"]
        if manifest["format"] != _FORMAT or (key is not None and found != key):
            return None
        if {each.name for each in place.iterdir()} != {_MANIFEST, *files}:
            return None
        if any(file_hash(place / file) != expected for file, expected in files.items()):
            return None
        source = f"{manifest['name']}{found['suffix']}"
        return Entry(manifest["name"], found["arch"], place, place / source, manifest["report"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _seal(draft: Path, name: str, key: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Writes the manifest, and syncs the whole draft to disk."""
    files = sorted(draft.iterdir())
    manifest = {
        "format": _FORMAT,
        "name": name,
        "key": key,
        "report": report,
        "files": {file.name: file_hash(file) for file in files},
    }
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in (*files, draft / _MANIFEST, draft):
        sync(file)


def publish(draft: Path, place: Path) -> None:
    """Moves the draft to its place atomically; replaces a damaged entry there."""
    if place.exists():
        _move_away(place)
    os.replace(draft, place)
    sync(place.parent)


def _move_away(place: Path) -> None:
    """Removes an entry at once for others, and then file by file."""
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    os.replace(place, aside)
    remove(aside)


def remove(path: Path) -> None:
    """Removes a file or a directory with its contents, as far as possible."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync(path: Path) -> None:
    """Waits until a file, or a directory's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(file: Path) -> str:
    """Returns the SHA-256 of its bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def _lock(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Holds the lock file at ``path``. The file is not removed, since another process may already wait for it.

    Yields whether it is held: some network file systems have no locks. There each process builds, and the last result
    is kept. Without ``waits`` it is not held while another process holds it.
    """
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            file = open(path, "w")  # noqa: SIM115 (closed below)
        except FileNotFoundError:  # its directory was removed just now
            continue
        with file:
            is_held = _acquire(file, waits=waits)
            if not is_held or _lies_at(path, file):
                yield is_held
                return


def _lies_at(path: Path, file: IO[str]) -> bool:
    """Returns whether the open file is still the one at ``path``; after a removal others lock a new one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _acquire(file: IO[str], *, waits: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


_temporary: tempfile.TemporaryDirectory[str] | None = None


def _temporary_directory() -> Path:
    global _temporary
    if _temporary is None:
        _temporary = tempfile.TemporaryDirectory(prefix="fastgen-kernels-")
    return Path(_temporary.name)
