"""Loads the thread pool, which C++ kernels need when they are loaded, before the first test."""

from __future__ import annotations

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import load_thread_pool


@pytest.fixture(scope="session", autouse=True)
def _pool() -> None:
    load_thread_pool(KernelLoader(CppBuilder("portable")))
