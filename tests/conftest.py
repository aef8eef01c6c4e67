"""Settings of every test: quiet libraries, no network."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.matrix import Record

# `make test` draws the same cases every time, so that what turns red is what a change broke; `make test-all` draws
# afresh and prints how to draw a failing case again.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("fresh", print_blob=True)
settings.load_profile("repeatable")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Models here are tiny: a second thread costs more than it brings, and two test processes share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Triton kernels run in Python here. Triton reads this when it is imported, so it stands before every import of it.
os.environ["TRITON_INTERPRET"] = "1"

# A test runner started in the background ignores Ctrl-C, and its children inherit that; some tests raise it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, help="file to which tests append what they measured of each recipe")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """Notes for docs/recipe-matrix.md what was measured; without ``--matrix`` nothing is kept."""
    file: Path | None = request.config.getoption("--matrix")

    def note(recipe: str, proof: str, value: Any) -> None:
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps([recipe, proof, value]) + "\n")

    return note
