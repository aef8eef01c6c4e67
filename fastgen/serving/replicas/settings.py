"""The settings of the two deployments of Ray Serve. A file for ``serve deploy`` lists them, and users may change them.

This module imports nothing of Ray: such a file can be written where Ray is not installed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.serving.options import ServeOptions

# The name of the application, and of its two deployments.
APP = "fastgen"
REPLICAS, INGRESS = "Replicas", "Ingress"
# The argument of a file for ``serve deploy`` that is no argument of ``fastgen.serve``.
WAIT_FOR_MACHINES = "wait_for_machines_s"
# Requests that Ray Serve lets a replica have at once. The server limits them by ``max_queued_requests``.
MAX_ONGOING = 1 << 20
# How often Ray Serve asks for signs of life, and how long an answer may take.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
# How long a replica that is to end may take to finish its requests.
FINISH_S = 600.0
# How long the ingress may take to end after its running requests had their time.
INGRESS_END_S = 30.0
# How often Ray Serve looks whether a deployment that is to end has done so.
_END_POLL_S = 0.1
# Arguments that name a file or a directory of the machine that reads them.
_PATHS = ("model", "recipe", "api_key_file", "tls_cert", "tls_key", "sealed")


def generation_of(load_arguments: Mapping[str, Any]) -> str:
    """Returns the name of the generation of replicas that are deployed with these arguments of ``fastgen.load``. During
    a rolling update there are two, perhaps with different models, and a server uses only its own.
    """
    return hashlib.sha256(json.dumps(load_arguments, sort_keys=True, default=str).encode()).hexdigest()[:16]


def settings_of(options: ServeOptions) -> dict[str, dict[str, Any]]:
    """Returns the settings of both deployments, by their names."""
    health = {"health_check_period_s": HEALTH_PERIOD_S, "health_check_timeout_s": HEALTH_TIMEOUT_S}
    return {
        REPLICAS: {
            "num_replicas": options.replicas or 1,
            "max_ongoing_requests": MAX_ONGOING,
            **health,
            "graceful_shutdown_timeout_s": FINISH_S,
            "graceful_shutdown_wait_loop_s": _END_POLL_S,
        },
        INGRESS: {
            "num_replicas": 1,
            **health,
            "graceful_shutdown_timeout_s": options.drain_timeout_s + INGRESS_END_S,
            "graceful_shutdown_wait_loop_s": _END_POLL_S,
            "max_surge_percent": 100,
        },
    }


def check_ports(options: ServeOptions) -> None:
    """Raises ``InvalidArgumentError`` for port 0."""
    for name, port in (("port", options.port), ("grpc_port", options.grpc_port)):
        if port == 0:
            raise InvalidArgumentError(f"{name}=0: replicas need a certain port, which a new ingress takes again")


def with_absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the files and directories of this machine that they name as absolute paths: replicas
    and ingress have other working directories.
    """
    made = dict(given)
    for name in _PATHS:
        value = made.get(name)
        if isinstance(value, str | Path):
            path = Path(value).expanduser()
            made[name] = str(path.absolute() if path.exists() else value)
    return made
