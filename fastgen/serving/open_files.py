"""Keeps the number of connections within the files that this process may open."""

from __future__ import annotations

import contextlib
import logging
import resource
from dataclasses import replace

from fastgen.serving.options import ServeOptions

# Files that the server has open beside its connections.
_FILES_BESIDE_CONNECTIONS = 256
_log = logging.getLogger(__name__)


def within_file_limit(options: ServeOptions) -> ServeOptions:
    """Returns ``options`` with no more connections than this process may open, and logs if they are fewer.

    HTTP needs two files for each connection, because as many again are open while they are refused. gRPC needs one.
    """
    limits = options.connections
    files_each = 2 if options.grpc_port is None else 3
    wanted = files_each * limits.max_connections + _FILES_BESIDE_CONNECTIONS
    allowed = _allow_files(wanted)
    num_beside = min(_FILES_BESIDE_CONNECTIONS, allowed // 2)
    most = max(1, (allowed - num_beside) // files_each)
    if most >= limits.max_connections:
        return options
    _log.warning(
        "this process may open %d files, so at most %d connections are taken, not %d; 'ulimit -n %d' allows them",
        allowed,
        most,
        limits.max_connections,
        wanted,
    )
    return replace(options, connections=replace(limits, max_connections=most))


def _allow_files(number: int) -> int:
    """Raises this process's limit of open files to ``number``, or as far as the system allows. Returns the limit, or
    ``number`` if that is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return number
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
