"""The C++ instruction sets whose kernels tests run on this machine."""

from __future__ import annotations

from fastgen.compile.build.cpp import CPP_ARCHES, can_run, cpp_arch, emulates_amx
from fastgen.compile.host import device

CPU = device.current("cpu")
HERE = cpp_arch(CPU)
# Those whose instructions this machine has.
NATIVE = CPP_ARCHES[CPP_ARCHES.index(HERE) :]
# Those whose instructions are emulated.
EMULATED = ("amx",) if HERE != "amx" and emulates_amx() and can_run("avx512bf16", CPU) else ()
ARCHES = (*EMULATED, *NATIVE)
