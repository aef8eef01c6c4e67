"""The application of Ray Serve: a deployment of replicas, and the ingress in front of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from fastgen.errors import InvalidArgumentError
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.replicas.cluster import machines
from fastgen.serving.replicas.ingress import Ingress
from fastgen.serving.replicas.placement import needs_of
from fastgen.serving.replicas.replica import EngineReplica
from fastgen.serving.replicas.router import ReplicaRouter

# Ray Serve logs warnings only; the server has a log of its own.
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
# The names of the two deployments.
REPLICAS, INGRESS = "Replicas", "Ingress"
# Requests that Ray Serve lets a replica have at once. The server limits them by ``max_queued_requests``.
_MAX_ONGOING = 1 << 20
# How often Ray Serve asks for signs of life, and how long an answer may take.
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 10.0
# How long a replica that is to end may take to finish its requests.
_FINISH_S = 600.0
# Starts of a replica or an ingress that fail before Ray Serve gives up the deployment.
_MAX_STARTS = 3
_ROUTER: Any = ReplicaRouter  # Ray's annotation does not name classes, which it takes
# A machine that is the head of its cluster has this resource.
_HEAD = "node:__internal_head__"


def application(given: Mapping[str, Any], api_key: str | None = None) -> Application:
    """Returns the application that serves the model with these arguments of ``fastgen.serve``, as ``serve run`` and
    ``serve deploy`` take it too. ``replicas`` is one of them.

    Raises ``InvalidArgumentError`` for arguments that cannot be met on any machine.
    """
    given = dict(given)
    load_arguments, options = sort_arguments(given)
    num_replicas = options.replicas or 1
    needs = needs_of(load_arguments, num_replicas, machines())
    for name, port in (("port", options.port), ("grpc_port", options.grpc_port)):
        if port == 0:
            raise InvalidArgumentError(f"{name}=0: replicas need a certain port, which a new ingress takes again")
    replicas = serve.deployment(
        name=REPLICAS,
        logging_config=_LOGGING,
        num_replicas=num_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus, "memory": needs.memory_bytes or 0},
        placement_group_bundles=[needs.bundle],
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_FINISH_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=_MAX_STARTS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )(EngineReplica).bind(needs.load_arguments, timeout_s=options.engine_timeout_s)
    ingress: Application = serve.deployment(
        name=INGRESS,
        logging_config=_LOGGING,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=options.drain_timeout_s + 30.0,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=_MAX_STARTS,
        max_surge_percent=100,
    )(Ingress).bind(replicas, given, api_key)
    return ingress


def build(arguments: dict[str, Any]) -> Application:
    """Returns :func:`application` with the arguments of a file for ``serve deploy``. The key in ``FASTGEN_API_KEY`` of
    the head's environment is valid, if it has one.
    """
    return application(arguments, os.environ.get("FASTGEN_API_KEY"))
