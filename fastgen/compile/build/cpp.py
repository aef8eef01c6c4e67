"""The ``cpp`` target: a plain shared object with a C ABI, built by the system's compiler and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.builder import BuildFailure, BuiltKernel
from fastgen.compile.build.cache import Entry
from fastgen.compile.build.reproduce import launch_error, made_up, script
from fastgen.compile.host.device import AMX, Device
from fastgen.compile.spec import KernelSpec, Target, torch_dtype
from fastgen.errors import CompilerNotFoundError, InvalidArgumentError, KernelError

_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp-simd", "-fno-exceptions", "-fno-rtti", "-Werror=vla"),
    # errno and floating-point traps are not used; both would keep loops from being vectorised.
    *("-fno-math-errno", "-fno-trapping-math"),
    # Products are fused with sums only where the source says so, so that every variant rounds in the same way.
    "-ffp-contract=off",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_ARCH_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
_EMULATION = "-DFASTGEN_EMULATE_AMX"
_BF16 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}
_ARCH_NEEDS = {
    "amx": {*_BF16, *AMX},
    "avx512bf16": _BF16,
    "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
CPP_ARCHES = tuple(_ARCH_FLAGS)
_SCALARS = {"fp32": ctypes.c_float, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


def cpp_arch(device: Device) -> str:
    """Returns the best of :data:`CPP_ARCHES` that a CPU can run, or the one that ``$FASTGEN_CPP_ARCH`` names.

    Raises :class:`InvalidArgumentError` where that is none of them, or the CPU lacks its instructions. With
    ``$FASTGEN_EMULATE_AMX`` it may be ``amx`` on every CPU that can run ``avx512bf16``.
    """
    possible = runnable_arches(device)
    given = os.environ.get("FASTGEN_CPP_ARCH")
    if not given:
        return possible[0]
    if given not in CPP_ARCHES:
        raise InvalidArgumentError(f"FASTGEN_CPP_ARCH={given!r}: expected one of {', '.join(CPP_ARCHES)}")
    if given not in possible:
        lacking = ", ".join(sorted(_ARCH_NEEDS[given] - set(device.instruction_sets)))
        reason = f" ({device.amx_refusal})" if given == "amx" and device.amx_refusal else ""
        raise InvalidArgumentError(
            f"FASTGEN_CPP_ARCH={given!r}: this CPU lacks {lacking}{reason}; it can run {', '.join(possible)}"
        )
    return given


def runnable_arches(device: Device) -> list[str]:
    """Returns those of :data:`CPP_ARCHES` whose kernels a CPU can run, the best first and one that is emulated last."""
    native = [arch for arch in CPP_ARCHES if _ARCH_NEEDS[arch] <= set(device.instruction_sets)]
    is_emulated = "amx" not in native and "avx512bf16" in native and emulates_amx()
    return [*native, *(["amx"] if is_emulated else [])]


def emulates_amx() -> bool:
    """Returns whether kernels for ``amx`` are built with their tile instructions emulated: ``$FASTGEN_EMULATE_AMX`` is
    set. They compute the same bits, slowly."""
    return os.environ.get("FASTGEN_EMULATE_AMX", "0") not in ("", "0")


@cache
def find_compiler() -> str:
    """Returns the C++ compiler: ``$CXX`` where it is set, else the first of g++, clang++ and c++ that is installed.

    Raises :class:`CompilerNotFoundError`.
    """
    given = os.environ.get("CXX")
    for name in (given,) if given else _COMPILERS:
        if found := shutil.which(name):
            return found
    if given:
        raise CompilerNotFoundError(
            f"CXX={given!r} names no program, so kernels of the cpp target cannot be built. Set it to the name or the "
            f"path of a C++ compiler, without options, or unset it"
        )
    raise CompilerNotFoundError(
        f"no C++ compiler ({', '.join(_COMPILERS)}): kernels of the cpp target cannot be built. Install g++ or clang++"
    )


class CppBuilder:
    """Builds for ``arch``, one of :data:`CPP_ARCHES`, with ``compiler``, or the one that is found here.

    Loading needs no compiler, so then ``compiler`` may be any name. Raises :class:`CompilerNotFoundError`.
    """

    target: Target = "cpp"
    launches_natively = True
    is_for_gpu = False

    def __init__(self, arch: str, compiler: str = ""):
        self.arch = arch
        self.modules: Path | None = None
        self.compiler = compiler or find_compiler()
        emulation = (_EMULATION,) if arch == "amx" and emulates_amx() else ()
        self.flags = (*_FLAGS, *_ARCH_FLAGS[arch], *emulation)

    def versions(self) -> Mapping[str, str]:
        return {"compiler": _version(self.compiler), "flags": " ".join(self.flags), "machine": platform.machine()}

    def built_by(self) -> Mapping[str, str]:
        return self.versions()

    def mismatch(self, versions: Mapping[str, str]) -> str | None:
        if versions.get("machine") != platform.machine():
            return f"it was built for {versions.get('machine')} machines, and this is {platform.machine()}"
        was_emulated, is_emulated = (_EMULATION in flags for flags in (versions.get("flags", ""), self.flags))
        if was_emulated != is_emulated:
            emulates = "an emulated" if was_emulated else "a real"
            return f"it was built for {emulates} matrix unit, and FASTGEN_EMULATE_AMX says otherwise here"
        return None

    def build(self, spec: KernelSpec, source: Path) -> Mapping[str, Any]:
        library = source.with_suffix(".so")
        command = self._command(source)
        start = time.perf_counter()
        done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            log = f"{shlex.join(command)}\n{done.stderr}"
            text = script("build_cpp", spec, source, command=repr(command))
            raise BuildFailure(_first_error(done.stderr, done.returncode), log, text)
        report = {"build_s": round(time.perf_counter() - start, 3), "binary_bytes": library.stat().st_size}
        return report | ({"matrix_unit": "AMX"} if spec.parameters.get("tiles") else {})

    def end_builds(self) -> None:
        """Does nothing: a build leaves no resources behind."""

    def accompany(self, built: Sequence[tuple[KernelSpec, Entry]], directory: Path) -> None:
        """Does nothing: a shared object needs no other files."""

    def load(self, spec: KernelSpec, entry: Entry) -> CppKernel:
        return CppKernel(spec, entry.source, self._command(entry.source))

    def _command(self, source: Path) -> list[str]:
        return [self.compiler, *self.flags, "-o", source.with_suffix(".so").name, source.name]


class CppKernel(BuiltKernel):
    """Launches a function of a shared object. Arguments' dtypes are checked, since a wrong one would corrupt memory.

    ``entry_point`` is the address of the same function with arguments in an array, see :meth:`slots`.
    """

    def __init__(self, spec: KernelSpec, source: Path, command: list[str]):
        super().__init__(spec, source)
        self._command = command
        library = ctypes.CDLL(str(source.with_suffix(".so")))
        self._function = getattr(library, spec.name)
        self._function.restype = None
        self._function.argtypes = [
            ctypes.c_void_p if argument.is_pointer else _SCALARS[argument.dtype] for argument in spec.arguments
        ]
        self._dtypes = [torch_dtype(argument.dtype) if argument.is_pointer else None for argument in spec.arguments]
        self.entry_point = ctypes.cast(getattr(library, f"{spec.name}_from_slots"), ctypes.c_void_p).value or 0

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        try:
            self._function(*self._converted(arguments))
        except (ctypes.ArgumentError, TypeError, ValueError) as error:
            raise self._launch_error(arguments, error) from error

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        try:
            function, values = self._function, self._converted(arguments)
        except (TypeError, ValueError) as error:
            raise self._launch_error(arguments, error) from error

        def call(_kept: tuple[Any, ...] = arguments) -> None:
            function(*values)

        return call

    def slots(self, arguments: Sequence[Any]) -> list[int]:
        """Returns the arguments for ``entry_point``: the bits of each in 64 bits. Raises :class:`KernelError`."""
        try:
            values = self._converted(arguments)
            typed = (ctype(value) for ctype, value in zip(self._function.argtypes, values, strict=True))
            return [int.from_bytes(bytes(each).ljust(8, b"\0"), sys.byteorder, signed=True) for each in typed]
        except (TypeError, ValueError) as error:
            raise self._launch_error(arguments, error) from error

    def _converted(self, arguments: Sequence[Any]) -> list[Any]:
        return [_convert(*pair) for pair in zip(arguments, self._dtypes, strict=True)]

    def _launch_error(self, arguments: Sequence[Any], error: Exception) -> KernelError:
        types = ", ".join(f"ctypes.{each.__name__}" for each in self._function.argtypes)
        library = self.source.with_suffix(".so").name
        context = {"command": repr(self._command), "library": repr(library), "types": types}
        text = script("launch_cpp", self.spec, self.source, arguments=made_up(arguments), **context)
        return launch_error(self.spec, self.source, arguments, error, text)


def _convert(argument: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return argument
    if not isinstance(argument, Tensor) or argument.dtype != dtype or argument.device.type != "cpu":
        raise TypeError(f"expected a {dtype} tensor on the CPU")
    return argument.data_ptr()


@cache
def _version(compiler: str) -> str:
    """Returns the first line of what a compiler says of itself. Raises :class:`CompilerNotFoundError`."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise CompilerNotFoundError(
            f"{compiler} is no C++ compiler: it does not answer --version. Install g++ or clang++, or set CXX"
        ) from None


def _first_error(log: str, status: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else f"exit status {status}")
