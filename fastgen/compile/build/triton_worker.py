"""A process that compiles Triton kernels for one GPU architecture: ``python -m fastgen.compile.build.triton_worker
sm_90``.

It reads one question a line from standard input and answers each with one line; both are JSON. No GPU is needed: a
stand-in driver names the architecture, and the kernel is warmed up with stand-ins for tensors, which leads Triton to
the same specialisation and key as a launch on that GPU. It does not import torch, so it is ready within a second.
"""

from __future__ import annotations

import itertools
import json
import linecache
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import CacheManager
from triton.runtime.jit import MockTensor

from fastgen.compile.build.builder import OutdatedBuildError
from fastgen.compile.build.triton_modules import compile_modules
from fastgen.compile.build.triton_report import report
from fastgen.compile.spec import DTYPES

_TORCH_NAMES = {short: name for name, short in DTYPES.items()}
# Neither 1 nor a multiple of 16, since Triton would specialise on those.
_NUMBERS = {"i32": 2, "fp32": 0.5}


def parse_arch(arch: str) -> GPUTarget:
    """Parses ``sm_90`` or ``gfx942``. Raises ``ValueError`` for anything else."""
    if match := re.fullmatch(r"sm_(\d{2,3})", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
        return GPUTarget("hip", arch, 64)
    raise ValueError(f"architecture {arch!r}: expected such as sm_90 or gfx942")


class FlatCache(CacheManager):  # type: ignore[misc]
    """Replaces Triton's cache by the directory of one kernel, without the paths that Triton would store.

    ``is_built`` says whether it has the kernel's files, and ``expected`` is the key that Triton must compute for them,
    ``None`` for any.
    """

    directory: Path
    is_built: bool
    expected: str | None

    @classmethod
    def to_build(cls, directory: Path) -> type[FlatCache]:
        """Returns an empty cache, whose files are written to ``directory``."""
        return type("FlatCacheThere", (cls,), {"directory": directory, "is_built": False, "expected": None})

    @classmethod
    def of_built(cls, directory: Path, expected: str | None) -> type[FlatCache]:
        """Returns the cache with the files of ``directory``."""
        return type("FlatCacheThere", (cls,), {"directory": directory, "is_built": True, "expected": expected})

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        if self.expected not in (key, None):
            raise OutdatedBuildError(
                "Triton would build another binary than the one that was built: its settings differ"
            )
        self.key = key

    def get_file(self, filename: str) -> str | None:
        return str(self.directory / filename) if self.is_built else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        if not self.is_built:
            return None
        files = self.directory.glob(f"{filename.removesuffix('.json')}.*")
        return {file.name: str(file) for file in files if file.suffix != ".py"}

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        place = self.directory / filename
        place.write_bytes(data if isinstance(data, bytes) else str(data).encode())
        return str(place)

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        (self.directory / "triton_key").write_text(self.key, encoding="ascii")


class _Address(MockTensor):  # type: ignore[misc]
    """A tensor at an aligned address that may be longer than 2³¹ bytes."""

    @staticmethod
    def ptr_range() -> int:
        return 1 << 40


def stand_in(dtype: str, is_pointer: bool) -> Any:
    """Returns the argument for warming up a kernel: a stand-in for a tensor, or a number of its type."""
    return _Address(_TORCH_NAMES[dtype]) if is_pointer else _NUMBERS[dtype]


class StandInDriver:
    """Replaces a GPU's driver for compiling."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _build(question: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    source = Path(question["source"])
    start = time.perf_counter()
    triton.knobs.cache.manager_class = FlatCache.to_build(source.parent)
    function = _execute(source)[question["name"]]
    arguments = [stand_in(dtype, is_pointer) for dtype, is_pointer in question["arguments"]]
    compiled = function.warmup(*arguments, grid=(1,), **question["options"])
    build_s = round(time.perf_counter() - start, 3)
    key_file = source.with_name("triton_key")
    triton_key = key_file.read_text(encoding="ascii")
    key_file.unlink()
    return {"triton_key": triton_key, "build_s": build_s, **report(compiled.asm, compiled.metadata, target)}


def _compile_modules(question: dict[str, Any]) -> dict[str, Any]:
    """Compiles the modules by which Triton launches these kernels, which are built already."""

    def built(kernel: dict[str, Any]) -> tuple[str, Any]:
        source = Path(kernel["source"])
        triton.knobs.cache.manager_class = FlatCache.of_built(source.parent, kernel["triton_key"])
        arguments = [stand_in(dtype, is_pointer) for dtype, is_pointer in kernel["arguments"]]
        compiled = _execute(source)[kernel["name"]].warmup(*arguments, grid=(1,), **kernel["options"])
        return kernel["digest"], compiled

    compile_modules(Path(question["modules"]), map(built, question["kernels"]))
    return {}


def _execute(source: Path) -> dict[str, Any]:
    """Returns the source's names. It runs under its bare file name, so that binaries contain no path."""
    text = source.read_text(encoding="utf-8")
    linecache.cache[source.name] = (len(text), None, text.splitlines(keepends=True), source.name)
    names: dict[str, Any] = {"__name__": f"fastgen_kernels.{source.stem}"}
    exec(compile(text, source.name, "exec"), names)
    return names


def first_line(error: BaseException) -> str:
    """Returns the reason, and the source line that a Triton compile error marks with a caret."""
    lines = _lines(error)
    pointed_at = next((before for before, line in itertools.pairwise(lines) if line == "^"), None)
    while error.__cause__ is not None:
        error = error.__cause__
    # An assembler's error ends with a command to run it again.
    reason = next((line for line in reversed(_lines(error)) if not line.startswith("Repro command")), "")
    return f"{type(error).__name__}: {reason}" + (f", at: {pointed_at}" if pointed_at else "")


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def main() -> None:
    target = parse_arch(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers' output must not mix with the answers
    triton.runtime.driver.set_active(StandInDriver(target))
    for line in sys.stdin:
        try:
            question = json.loads(line)
            found = _compile_modules(question) if "modules" in question else _build(question, target)
            answer: dict[str, Any] = {"report": found}
        except Exception as error:
            answer = {"error": first_line(error), "log": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
