from __future__ import annotations

import pytest

from fastgen.serving.replicas import membership, replica_set


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a server look after its replicas and requests often."""
    monkeypatch.setattr(membership, "_WATCH_S", 0.02)
    monkeypatch.setattr(replica_set, "_POLL_S", 0.01)
