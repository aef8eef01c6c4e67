"""The application of Ray Serve: a deployment of replicas, and the ingress in front of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from fastgen.serving.arguments import sort_arguments
from fastgen.serving.replicas.cluster import machines
from fastgen.serving.replicas.ingress import Ingress
from fastgen.serving.replicas.placement import Machine, NoRoomError, needs_of
from fastgen.serving.replicas.replica import EngineReplica
from fastgen.serving.replicas.router import ReplicaRouter
from fastgen.serving.replicas.settings import (
    INGRESS,
    REPLICAS,
    WAIT_FOR_MACHINES,
    check_ports,
    generation_of,
    settings_of,
    with_absolute_paths,
)

# Ray Serve logs warnings only; the server has a log of its own.
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
# Starts of a replica or an ingress that fail before Ray Serve gives up the deployment.
_MAX_STARTS = 3
# How often machines are looked for that have yet to join the cluster.
_POLL_S = 1.0
_ROUTER: Any = ReplicaRouter  # Ray's annotation does not name classes, which it takes
# A machine that is the head of its cluster has this resource.
_HEAD = "node:__internal_head__"


def application(
    given: Mapping[str, Any], *, key_digests: Sequence[str] = (), on: Sequence[Machine] | None = None
) -> Application:
    """Returns the application that serves the model with these arguments of ``fastgen.serve``, as ``serve run`` and
    ``serve deploy`` take it too. ``replicas`` is one of them. Ray keeps the digests of API keys with it, and no key.
    ``on`` are the machines for replicas, by default those of the cluster as if nothing ran there.

    Raises ``InvalidArgumentError`` for arguments that cannot be met on any machine, and ``NoRoomError`` where the
    machines of the cluster are too few or too small.
    """
    given = with_absolute_paths(given)
    load_arguments, options = sort_arguments(given, reads_keys=False)  # the ingress reads them
    check_ports(options)
    needs = needs_of(load_arguments, options.replicas or 1, machines() if on is None else on)
    settings = settings_of(options)
    replicas = serve.deployment(
        name=REPLICAS,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus, "memory": needs.memory_bytes or 0},
        placement_group_bundles=[needs.bundle],
        placement_group_strategy="STRICT_PACK",
        max_constructor_retry_count=_MAX_STARTS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **settings[REPLICAS],
    )(EngineReplica).bind(
        needs.load_arguments, generation=generation_of(load_arguments), timeout_s=options.engine_timeout_s
    )
    ingress: Application = serve.deployment(
        name=INGRESS,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        max_constructor_retry_count=_MAX_STARTS,
        **settings[INGRESS],
    )(Ingress).bind(replicas, given, key_digests)
    return ingress


def build(arguments: dict[str, Any]) -> Application:
    """Returns :func:`application` with the arguments of a file for ``serve deploy``. The ingress takes the key in
    ``FASTGEN_API_KEY`` from the environment of the cluster's head.

    ``wait_for_machines_s`` is one more argument: the seconds that machines may take to join the cluster until there is
    room for all replicas.
    """
    given = dict(arguments)
    until_s = time.monotonic() + float(given.pop(WAIT_FOR_MACHINES, 0.0))
    while True:
        try:
            return application(given)
        except NoRoomError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
