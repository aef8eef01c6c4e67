from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastgen
from tests.serving.server_process import ServerProcess, served


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server of tiny-llama that tests share; they leave it as it was."""
    with served("tiny-llama") as process:
        yield process


@pytest.fixture(scope="session")
def llm() -> Iterator[fastgen.LLM]:
    """The same model in this process, for what its answers should be."""
    with fastgen.load("tiny-llama") as llm:
        yield llm
