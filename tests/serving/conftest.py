from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.server_process import ServerProcess, served


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server of tiny-llama that tests share; they leave it as it was."""
    with served("tiny-llama") as process:
        yield process
