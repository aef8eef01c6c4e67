"""The process of the HTTP server in front of replicas: ``python -m fastgen.serving.replicas.ingress_process PIPE
PARENT``.

It reads its arguments as JSON on standard input, and reports through the pipe that it is ready, or why it cannot be.
After that a byte in the pipe is a sign of life, or says that a client ends the server. It ends when the process
``PARENT`` does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve

from fastgen.compile.host.parent import end_with
from fastgen.errors import FastgenError
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.engine.request import EngineWatcher
from fastgen.serving.replicas.handle import RayHandle
from fastgen.serving.replicas.replica_set import ReplicaSet
from fastgen.serving.replicas.server_process import SIGN_OF_LIFE, TERMINATED
from fastgen.serving.replicas.settings import generation_of
from fastgen.serving.run import run


def main() -> None:
    """Connects to the cluster and serves."""
    pipe, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    os.set_inheritable(pipe, False)
    request = json.load(sys.stdin)

    is_ready = False

    def report(outcome: Mapping[str, Any]) -> None:
        os.write(pipe, json.dumps(outcome).encode() + b"\n")

    def write(sign: bytes) -> None:
        if is_ready:
            with contextlib.suppress(OSError):  # the parent is gone, and this process ends
                os.write(pipe, sign)

    try:
        load_arguments, options = sort_arguments(request["given"])
        options = replace(options, api_keys=options.api_keys.with_digests(request["key_digests"]))
        ray.init(address=request["cluster"], namespace="serve", logging_level=logging.WARNING, log_to_driver=False)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

        def replicas(watcher: EngineWatcher) -> ReplicaSet:
            handle = serve.get_deployment_handle(request["deployment"], request["app"])
            generation = generation_of(load_arguments)
            return ReplicaSet(
                RayHandle(handle),
                watcher,
                generation=generation,
                router=options.router,
                on_beat=lambda: write(SIGN_OF_LIFE),
            )

        def ready(deployment: Deployment) -> None:
            nonlocal is_ready
            report({"deployment": asdict(deployment)})
            is_ready = True

        run(
            load_arguments,
            options,
            on_ready=ready,
            on_terminate=lambda: write(TERMINATED),
            make_engine=replicas,
        )
    except FastgenError as error:
        report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
