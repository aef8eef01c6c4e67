"""What a server says at its start."""

from __future__ import annotations

import logging

import pytest

from fastgen.serving import run
from tests.serving.parts import Parts


def test_below_the_memory_ledger_stands_what_requests_may_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "memory_bytes", lambda: 1 << 30)
    with caplog.at_level(logging.INFO, logger=run.__name__):
        Parts(monkeypatch).serve()
    (told,) = (record.getMessage() for record in caplog.records if "memory" in record.getMessage())
    assert told.splitlines() == [
        "memory of m:",
        "total 3 MiB",
        "requests may take beside that, at most: log-probabilities 64.00 MiB, bodies by HTTP 256.00 MiB",
    ]
