"""A server takes no more connections than it may open files."""

from __future__ import annotations

import logging
import resource

import pytest

from fastgen.serving.open_files import within_file_limit
from fastgen.serving.options import ConnectionLimits, ServeOptions


@pytest.mark.parametrize(
    ("soft", "hard", "grpc_port", "wanted", "allowed", "raised_to"),
    [
        (1024, 1 << 20, None, 1024, 1024, 2304),
        (1024, resource.RLIM_INFINITY, None, 1024, 1024, 2304),
        (4096, 4096, None, 1024, 1024, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1024, 1024, None),
        (1024, 1024, None, 1024, 384, 1024),
        (100, 200, None, 1024, 50, 200),
        (200, 200, None, 20, 20, 200),
        (2, 2, None, 20, 1, 2),
        (1024, 1 << 20, 0, 1024, 1024, 3328),
        (1024, 1024, 0, 1024, 256, 1024),
    ],
)
def test_connections_fit_within_the_limit_of_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    grpc_port: int | None,
    wanted: int,
    allowed: int,
    raised_to: int | None,
) -> None:
    limit = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limit.append(new))
    limits = ConnectionLimits(max_connections=wanted, keep_alive_s=7.0)
    found = within_file_limit(ServeOptions(grpc_port=grpc_port, connections=limits))
    assert found.connections == ConnectionLimits(max_connections=allowed, keep_alive_s=7.0)
    assert limit[-1][0] == (soft if raised_to is None else raised_to)
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(logged) == (allowed < wanted)
    for message in logged:
        assert f"at most {allowed} connections are taken, not {wanted}" in message
