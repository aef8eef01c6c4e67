"""Loads the thread pool, which C++ kernels need when they are loaded, before the first test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import ThreadPool, load_thread_pool
from tests.compile.arches import HERE, loader
from tests.kernel_device import triton_loader


@pytest.fixture(scope="session")
def triton_kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    """Loads Triton kernels for the device of this run; tests that need it are marked ``kernels``."""
    return triton_loader(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session", autouse=True)
def _pool() -> None:
    load_thread_pool(KernelLoader(CppBuilder("portable")))


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    """The thread pool, which gets its size back at the end."""
    pool = load_thread_pool(loader(HERE))
    before = pool.num_threads
    yield pool
    pool.resize(before)
