"""C++ kernels on 64-bit Arm: cross-built, run under emulation, and compared with what this machine computes."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader, target_of
from fastgen.compile.host.device import Device
from tests.compile.captured_launches import Replayer, captured
from tests.compile.kernel_runs import names_of, run

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
# Of the largest number: Arm fuses products with sums where portable x86-64 rounds twice.
TOLERANCE = 1e-5


@cache
def loader() -> KernelLoader:
    return KernelLoader(CppBuilder("portable"))


@pytest.fixture(scope="module")
def replayer(tmp_path_factory: pytest.TempPathFactory) -> Replayer:
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: Debian's g++-aarch64-linux-gnu and qemu-user have them")
    return Replayer(CppBuilder("portable", COMPILER), tmp_path_factory.mktemp("aarch64"), [EMULATOR, "-L", LIBRARIES])


def test_an_arm_cpu_gets_the_portable_kernels_and_no_flags_of_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_CPP_ARCH", raising=False)
    arm = Device("cpu", "some", 1 << 30, instruction_sets=("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"))
    assert target_of(arm) == "portable"
    assert not [flag for flag in CppBuilder("portable").flags if flag.startswith("-m")]


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of("portable"))
def test_kernels_compute_the_same(name: str, replayer: Replayer) -> None:
    with captured() as launches:
        run(name, loader())
    replayer.run(launches, tolerance=TOLERANCE)
