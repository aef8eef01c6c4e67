"""Sanitizers and the compiler's warnings over every C++ kernel: memory, undefined behaviour, threads."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.ops.experts.cpp import SortKernel, sort_spec
from fastgen.compile.render import render
from tests.compile.arches import ARCHES, EMULATED, HERE
from tests.compile.captured_launches import CapturedLaunch, FlaggedBuilder, Replayer, captured
from tests.compile.kernel_runs import names_of, run

MEMORY, THREADS = "address,undefined", "thread"
# A kernel each: what else there is takes as many minutes as these take seconds.
QUICK = {("tables int8", HERE, MEMORY), ("latent 1", HERE, MEMORY)}
CASES = [
    pytest.param(*case, id=" ".join(case), marks=[] if case in QUICK else pytest.mark.slow)
    for arch in ARCHES
    for name in names_of(arch)
    for case in [(name, arch, MEMORY), *([(name, arch, THREADS)] if arch in (HERE, *EMULATED) else [])]
]
UNUSED = ("-Wno-unused-function", "-Wno-unused-parameter", "-Wno-unused-const-variable")
# Without what features that are off leave unused.
WARNINGS = ("-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", *UNUSED)


@cache
def loader(arch: str) -> KernelLoader:
    return KernelLoader(CppBuilder(arch))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For builds: what several tests need is built once."""
    return tmp_path_factory.mktemp("flagged")


def replayer(arch: str, checks: str, folder: Path) -> Replayer:
    place = folder / f"{arch}-{checks}"
    place.mkdir(exist_ok=True)
    return Replayer(FlaggedBuilder(arch, ("-O1", "-g", f"-fsanitize={checks}", "-fno-sanitize-recover=all")), place)


def launches_of(name: str, arch: str) -> list[CapturedLaunch]:
    with captured() as launches:
        run(name, loader(arch))
    return launches


@pytest.mark.parametrize(("name", "arch", "checks"), CASES)
def test_sanitizers_find_nothing_and_change_nothing(name: str, arch: str, checks: str, folder: Path) -> None:
    """In memory of exactly the arguments' size, on three threads, with the bits of the ordinary build."""
    replayer(arch, checks, folder).run(launches_of(name, arch))


def test_a_number_too_far_is_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sort_spec(3)
    with captured() as launches:
        SortKernel(loader(HERE).load(spec))(torch.tensor([[2], [0]]))
    wrong = render(spec).replace("first_rows[E] = first", "first_rows[E] = first_rows[E + 1]")
    (tmp_path / f"{spec.name}.cpp").write_text(wrong)
    monkeypatch.setenv("FASTGEN_KERNEL_SOURCES", str(tmp_path))
    with pytest.warns(UserWarning, match="instead of being rendered"), pytest.raises(AssertionError, match="overflow"):
        replayer(HERE, MEMORY, folder).run(launches)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for arch in ARCHES for name in names_of(arch)])
def test_compilers_warn_of_nothing(name: str, arch: str, compiler: str, folder: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    specs = {launch.spec for launch in launches_of(name, arch)} | {thread_pool_spec(), tape_spec()}
    KernelLoader(FlaggedBuilder(arch, WARNINGS, compiler), cache=KernelCache(folder / compiler)).build(specs)
