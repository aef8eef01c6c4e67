"""A plugin of pytest that prints the outcome of each test as a line of JSON as soon as it is known."""

from __future__ import annotations

import json
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed and report.when != "call":
        return
    row: dict[str, Any] = {"case": report.nodeid, "seconds": report.duration}
    if not report.passed:
        row["error"] = f"{report.outcome}: {_reason(report)}"
    print(f"\n{json.dumps(row)}", flush=True)  # pytest's own dots end no line


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a test that is skipped: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else str(crash.message)
