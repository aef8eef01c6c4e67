"""The C++ instruction sets whose kernels tests run on this machine."""

from __future__ import annotations

from fastgen.compile.build.cpp import CPP_ARCHES, cpp_arch, runnable_arches
from fastgen.compile.host import device

CPU = device.current("cpu")
HERE = cpp_arch(CPU)
# Those whose instructions this machine has.
NATIVE = CPP_ARCHES[CPP_ARCHES.index(HERE) :]
# Those whose instructions are emulated.
EMULATED = tuple(arch for arch in runnable_arches(CPU) if arch not in NATIVE)
ARCHES = (*EMULATED, *NATIVE)
