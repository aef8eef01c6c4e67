"""The C modules by which Triton calls NVIDIA's driver and launches kernels: compiled ahead of time, for a bundle.

Without them Triton compiles its own when it first uses a GPU: one that loads binaries and, before about Triton 3.7, one
more for each kind of argument list. Here Triton's own code compiles them too, so they are the same. The driver's
library is absent, so a stand-in is linked. The modules are valid for one version of Triton, to which a bundle is bound
anyway, and one version of Python, which is part of their file names.
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
    """A module is written. It must not be loaded, since there is no driver."""


class _Keeper(CacheManager):  # type: ignore[misc]
    """Replaces Triton's cache while modules are compiled: keeps them in ``directory``, for ``kernel``.

    Triton's own keys cannot be used: they contain the path of the driver's library, and the output of `file`.
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
    """Replaces Triton's cache while ``kernel`` is loaded: returns the modules of ``directory``, else Triton's own."""

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
    """Compiles into ``directory``, which must exist, everything that Triton needs to load and launch ``kernels``: their
    digests and compiled kernels.

    Call it in a process that does nothing else, since it changes Triton's settings. Raises ``RuntimeError`` without a C
    compiler, and ``subprocess.CalledProcessError``.
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
    """Makes a library with the driver's name and empty functions, to link against."""
    folder = Path(importlib.import_module(_DRIVER).__file__ or "").parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("driver.c", "driver.py"))
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", text)))
    source, library = place / "driver.c", place / _LIBRARY
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names), encoding="ascii")
    command = [*_c_compiler(), "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _c_compiler() -> list[str]:
    """Returns the C compiler that Triton would use."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("no C compiler (gcc, clang or $CC)")
    return [found]


@contextmanager
def modules_from(directory: Path | None, kernel: str) -> Iterator[None]:
    """Has Triton take its modules for the kernel of that digest from ``directory`` within the block, if that exists."""
    if directory is None or not directory.is_dir():
        yield
        return
    there = {"directory": directory, "kernel": kernel}
    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = type("ProviderThere", (_Provider,), there)
        yield
