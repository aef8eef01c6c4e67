"""Settings of every test: quiet libraries, no network, and nothing that differs from run to run or place to place."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import Record

try:
    import tests.hypothesis_profiles  # noqa: F401
except ModuleNotFoundError as error:  # a machine with a GPU may have no hypothesis, and tests there need none
    if error.name != "hypothesis":
        raise

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Models here are tiny: a second thread costs more than it brings, and test processes share the cores.
os.environ["OMP_NUM_THREADS"] = "1"


def chosen_device() -> str:
    """Returns what the command line has as ``--device``. pytest imports the conftest files of folders that are named
    there, and these import Triton, before it hands out options.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    return str(parser.parse_known_args()[0].device)


# Triton kernels run in Python here, except where tests run on a GPU. Triton reads this when it is imported, so it
# stands before every import of it.
if (device := chosen_device()) != "cpu":
    os.environ |= {"TRITON_INTERPRET": "0", "FASTGEN_TEST_DEVICE": device}
os.environ.setdefault("TRITON_INTERPRET", "1")

# Which kernels serve bf16 would follow from a measurement, and so might differ from run to run.
os.environ.setdefault("FASTGEN_AUTOTUNE", "0")

# Kernels for a matrix unit are run on CPUs without one too: its instructions are emulated there.
if (cpu_info := Path("/proc/cpuinfo")).exists() and "amx_bf16" not in cpu_info.read_text(encoding="utf-8"):
    os.environ["FASTGEN_EMULATE_AMX"] = "1"

# What people and services set for their own terminals, languages and models.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
for name in ("FASTGEN_RECIPES", "FASTGEN_KERNEL_SOURCES", "LANGUAGE"):
    os.environ.pop(name, None)
os.environ["LC_ALL"] = "C"

# Compiling this package and its tests takes longer than loading them, in every process that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test runner started in the background ignores Ctrl-C, and its children inherit that; some tests raise it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def begin_draws(name: str) -> None:
    """Makes everything that is drawn from here on without a generator of its own follow from ``name`` alone."""
    import torch  # not above: the process that only hands out tests needs none

    seed = zlib.crc32(name.encode())
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


@pytest.hookimpl(optionalhook=True)  # some runs leave xdist out
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns how many processes ``-n auto`` starts: one more than there are cores, since tests also wait, for servers
    and for time to pass."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps all that is imported and collected, more than a million objects that stay, out of garbage collection: each
    would walk through them for half a second. What is made later is collected more rarely than by default, since that
    took a tenth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()  # what was dropped so far is too little to look for
        gc.set_threshold(10_000)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    begin_draws(f"{fixturedef.baseid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    begin_draws(item.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """Ends a run with what it did not test, so that a green run without a browser or a compiler does not look whole."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    reasons = Counter(each.longrepr[2].removeprefix("Skipped: ") for each in skipped)
    terminalreporter.section(f"NOT TESTED on this machine: {len(skipped)} tests were skipped", sep="=", yellow=True)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} x {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, help="file to which tests append what they measured of each recipe")
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where Triton kernels run: interpreted on the CPU, or on a GPU, which only runs tests of these kernels",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that launch Triton kernels by a loader of them; on a GPU only marked tests are kept."""
    for item in items:
        if "triton_kernels" in getattr(item, "fixturenames", ()):
            item.add_marker("kernels")
    if config.getoption("--device") != "cpu":
        launching = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("kernels")]
        kept = [item for item in launching if not item.get_closest_marker("interpreter")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def _precompiled_header() -> None:
    """Has g++ read its largest header precompiled, in this process and in those that tests start."""
    from tests.precompiled import use_precompiled_header

    use_precompiled_header()


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    from tests.interpreter import find_builtins_once

    find_builtins_once()


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """Notes for docs/recipe-matrix.md what was measured; without ``--matrix`` nothing is kept."""
    file: Path | None = request.config.getoption("--matrix")

    def note(recipe: str, proof: str, value: Any) -> None:
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps([recipe, proof, value]) + "\n")

    return note


@pytest.fixture(autouse=True)
def logging_as_before() -> Generator[None]:
    """Takes back what a server in this process does to the loggers: it directs them to standard error."""
    loggers = [logging.getLogger(name) for name in ("fastgen", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
