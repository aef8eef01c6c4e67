"""The C modules by which Triton speaks to NVIDIA's driver and launches kernels: compiled ahead of time, for a bundle.

Where none is at hand, Triton compiles them itself when it first meets a GPU: one that loads binaries and, before Triton
3.7 or so, one more for each kind of argument list. Triton's own code compiles them here too, so they are the same; the
driver's library, which is not there, is stood in for while they are linked. They hold for one version of Triton, which
a bundle is bound to anyway, and one of Python, which stands in their file names.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import CacheManager, FileCacheManager

_DRIVER = "triton.backends.nvidia.driver"
_LIBRARY = "libcuda.so.1"
_EVERY_KERNEL = "all"
_log = logging.getLogger(__name__)


class _KeptError(Exception):
    """A module is written; it is not to be loaded, since the driver is not there."""


class _Keeper(CacheManager):  # type: ignore[misc]
    """Stands in for Triton's cache while modules are compiled: keeps them in ``directory``, for ``kernel``.

    Triton's own keys are of no use: they contain where the driver's library lies, and what the command `file` says.
    """

    directory: Path
    kernel: str

    def get_file(self, filename: str) -> str | None:
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        (self.directory / f"{self.kernel}-{filename}").write_bytes(data)
        raise _KeptError

    def get_group(self, filename: str) -> dict[str, str] | None:
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        raise AssertionError("a module is a single file")


class _Provider(CacheManager):  # type: ignore[misc]
    """Stands in for Triton's cache while ``kernel`` is loaded: gives it the modules of ``directory``, else its own."""

    directory: Path
    kernel: str

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        self._key = key

    def get_file(self, filename: str) -> str | None:
        for kernel in (self.kernel, _EVERY_KERNEL):
            if (found := self.directory / f"{kernel}-{filename}").exists():
                return str(found)
        _log.warning("%s has no %s, so Triton takes it from its own cache or compiles it", self.directory, filename)
        own: str | None = FileCacheManager(self._key).get_file(filename)
        return own

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return str(FileCacheManager(self._key).put(data, filename, binary))

    def get_group(self, filename: str) -> dict[str, str] | None:
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        raise AssertionError("a module is a single file")


def compile_modules(directory: Path, kernels: Iterable[tuple[str, Any]]) -> None:
    """Compiles into ``directory``, which must be there, all that Triton needs to load and launch ``kernels``: their
    digests, and what it compiled of each.

    For a process that does nothing else, since Triton's settings change. Raises ``RuntimeError`` without a C compiler,
    and ``subprocess.CalledProcessError``.
    """
    driver = importlib.import_module(_DRIVER)

    def keep(kernel: str) -> None:
        there = {"directory": directory, "kernel": kernel}
        triton.knobs.cache.manager_class = type("KeeperThere", (_Keeper,), there)

    with tempfile.TemporaryDirectory() as place:
        stand_in_for_driver(Path(place))
        triton.knobs.nvidia.libcuda_path = place
        keep(_EVERY_KERNEL)
        with suppress(_KeptError):
            driver.CudaUtils()
        if hasattr(driver, "make_launcher"):
            for digest, kernel in kernels:
                keep(digest)
                with suppress(_KeptError):
                    driver.CudaLauncher(kernel.src, kernel.metadata)


def stand_in_for_driver(place: Path) -> Path:
    """A library of the driver's name with its functions, which do nothing: enough to link against."""
    folder = Path(importlib.import_module(_DRIVER).__file__ or "").parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("driver.c", "driver.py"))
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", text)))
    source, library = place / "driver.c", place / _LIBRARY
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names), encoding="ascii")
    command = [*_c_compiler(), "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _c_compiler() -> list[str]:
    """The one that Triton would take."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("no C compiler (gcc, clang or $CC)")
    return [found]


@contextmanager
def modules_from(directory: Path | None, kernel: str) -> Iterator[None]:
    """Within the block Triton takes its modules for the kernel of that digest from there, where there are any."""
    if directory is None or not directory.is_dir():
        yield
        return
    there = {"directory": directory, "kernel": kernel}
    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = type("ProviderThere", (_Provider,), there)
        yield
