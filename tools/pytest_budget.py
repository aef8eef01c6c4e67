"""A plugin of pytest that ends a run once its tests have taken enough of the processor.

``-p tools.pytest_budget --budget 60`` starts no test after 60 s of processor time, of this process and of those that it
has started and waited for. Unlike a limit in seconds of the clock it means the same on a busy machine.
"""

from __future__ import annotations

import os
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, default=float("inf"), help="seconds of the processor that tests may take")


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    _Spent.num_tests += 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if sum(os.times()[:4]) > item.config.getoption("--budget"):
        item.session.shouldstop = f"the budget is spent after {_Spent.num_tests} tests"
        raise item.session.Interrupted(item.session.shouldstop)


class _Spent:
    num_tests = 0
