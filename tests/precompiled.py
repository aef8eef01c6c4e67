"""Lets g++ read the largest headers precompiled, since most of a small kernel's build is parsing them.

``$CXX`` names a script that begins every source with one header that includes them. g++ looks in ``x86.h.gch/`` for one
that was precompiled with the flags of the build, and reads the header itself if there is none. The binaries are the
same bytes. It is precompiled for the instruction sets that the fast tests run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder, find_compiler
from tests.compile.arches import EMULATED, WIDTHS

# The intrinsics of x86 CPUs, and the parts of the C++ library that kernels include.
HEADERS = ("immintrin.h", "algorithm", "atomic", "cmath", "cstdint", "cstring", "type_traits")


def use_precompiled_header() -> None:
    """Sets ``$CXX`` for this process and those that it starts, unless it is set, or this is no x86 CPU with g++.

    Where the cache of kernels cannot be written, tests build without the header.
    """
    if "CXX" not in os.environ and platform.machine() == "x86_64" and (compiler := shutil.which("g++")):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            os.environ["CXX"] = str(_precompiled(compiler))
            find_compiler.cache_clear()


def _precompiled(compiler: str) -> Path:
    """Returns the script. It lies with its headers beside the kernels that are built, so later runs find them."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    directory = KernelCache().directory / f".headers-{hashlib.sha256(version).hexdigest()[:12]}"
    header, script = directory / "x86.h", directory / "g++"
    precompiled = directory / "x86.h.gch"
    precompiled.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(directory / "lock", "w") as lock:  # one of several test processes makes them
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            header.write_text("".join(f"#include <{each}>\n" for each in HEADERS), encoding="utf-8")
            script.write_text(
                f'#!/bin/sh\nexec {shlex.quote(compiler)} -include {shlex.quote(str(header))} "$@"\n', encoding="utf-8"
            )
            script.chmod(0o700)
        for arch in (*WIDTHS, *EMULATED):
            flags = CppBuilder(arch, compiler).flags
            place = precompiled / hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12]
            if not place.exists():
                draft = directory / "draft"
                subprocess.run([compiler, *flags, "-x", "c++-header", "-o", str(draft), str(header)], check=True)
                os.replace(draft, place)
    return script
