"""The pool of threads, which C++ kernels must find when they are loaded: there whichever test comes first."""

from __future__ import annotations

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import load_thread_pool


@pytest.fixture(scope="session", autouse=True)
def _pool() -> None:
    load_thread_pool(KernelLoader(CppBuilder("portable")))
