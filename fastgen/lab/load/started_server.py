"""A server of fastgen that is started for a measurement, in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastgen.serving.clients.deployments import Deployment, find_deployment
from fastgen.serving.detached import serve


@contextmanager
def started_server(model: str, load: Mapping[str, Any]) -> Iterator[Deployment]:
    """Yields a server of ``model`` on a free port, loaded with these arguments of ``fastgen.load``. It ends with the
    block. Raises ``FastgenError`` with its own message if it cannot start.
    """
    name = f"bench-{os.getpid()}"
    server = serve(model, name=name, host="127.0.0.1", port=0, **load)
    try:
        yield find_deployment(name)
    finally:
        server.terminate_server()
