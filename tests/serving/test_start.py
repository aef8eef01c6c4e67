"""The messages of a server at its start, also where its output cannot be written."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import pytest

from fastgen.serving import run
from fastgen.serving.output import STDOUT, write_text
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
        "requests may take beside that, at most: log-probabilities 64.00 MiB, bodies by HTTP 256.00 MiB, "
        "their formats 480.00 MiB",
    ]


def test_a_server_that_other_machines_reach_without_a_key_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Parts(monkeypatch).serve(host="0.0.0.0")
    assert any("every machine that reaches 0.0.0.0 may use this server" in line for line in caplog.messages)


def test_grpc_listens_where_http_does(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    parts.serve(host="10.0.0.7")
    assert parts.grpc_at == "10.0.0.7"


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def without_a_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("make_output", [full, without_a_reader])
def test_a_server_whose_output_is_not_taken_serves(
    make_output: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    monkeypatch.setattr(run, "write_text", write_text)
    output, real = make_output(), os.dup(STDOUT)
    try:
        os.dup2(output, STDOUT)
        with open(output, "w", buffering=1) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            parts.serve()
    finally:
        os.dup2(real, STDOUT)
        os.close(real)
    assert "ready at http://127.0.0.1:81" in parts.calls
