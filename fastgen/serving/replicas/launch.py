"""Serves replicas in the foreground: ``fastgen serve --replicas``, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import API_KEY_VARIABLE
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.output import STDOUT, write_text
from fastgen.serving.replicas.cluster import Cluster, connected
from fastgen.serving.replicas.settings import APP, INGRESS
from fastgen.serving.run import announcement

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview

# How often the application is looked at while it starts, and while it runs: a look costs Ray Serve some milliseconds.
_START_POLL_S, _POLL_S = 0.25, 2.0


def run_replicas(given: Mapping[str, Any], *, on_ready: Callable[[Deployment], None] | None = None) -> None:
    """Serves replicas with these arguments of ``fastgen.serve``, until SIGTERM or Ctrl-C, or until a client ends the
    server. ``on_ready`` is called with the deployment once the model is served.

    Raises ``FastgenError`` where the server cannot start.
    """
    _, options = sort_arguments(given)
    api_key = os.environ.pop(API_KEY_VARIABLE, None)  # only the server's process is to have it
    ports = {"port": options.port, "grpc_port": options.grpc_port}
    given = {**given, **{name: _free_port(options.host) for name, port in ports.items() if port == 0}}
    with connected(options.address) as cluster:
        from ray import serve

        from fastgen.serving.replicas.application import application

        endings = _Endings()
        app = application(given, api_key)
        # Ray Serve says why a deployment fails. Its controller, if it is this command's, would print stack traces too.
        log_level = "CRITICAL" if options.address is None else "WARNING"
        serve.start(proxy_location="Disabled", logging_config={"log_level": log_level})
        if APP in serve.status().applications:
            raise FastgenError(
                f"this cluster serves an application named {APP} already; end it first, with `serve delete {APP}`"
            )
        try:
            serve.run_many([serve.RunTarget(app, name=APP, route_prefix=None)], wait_for_applications_running=False)
            if not _until_running(cluster, endings):
                return
            ingress = serve.get_deployment_handle(INGRESS, APP)
            deployment = Deployment(**ingress.deployment.remote().result())
            write_text(STDOUT, announcement(deployment, needs_key=bool(options.api_keys)))
            if on_ready is not None:
                on_ready(deployment)
            while not endings.first.wait(_POLL_S) and _application(cluster) is not None:
                pass
            if endings.first.is_set():
                _end(ingress, cluster, endings)
        finally:
            if cluster.is_alive:
                serve.delete(APP)


def _until_running(cluster: Cluster, endings: _Endings) -> bool:
    """Waits until the application runs; returns whether it does, and not a signal has come. Raises ``FastgenError`` if
    it cannot run.
    """
    while not endings.first.wait(_START_POLL_S):
        application = _application(cluster)
        if application is None:
            raise FastgenError("the application was deleted before it ran")
        if application.status == "RUNNING":
            return True
        has_failed = any("Error: " in one.message for one in application.deployments.values())
        if has_failed or application.status in ("DEPLOY_FAILED", "UNHEALTHY"):  # another attempt would fail too
            raise FastgenError(_failure_text(application))
    return False


def _application(cluster: Cluster) -> ApplicationStatusOverview | None:
    """Returns the state of the application; ``None`` if it was deleted."""
    from ray import serve

    if not cluster.is_alive:
        raise FastgenError(f"the cluster at {cluster.head} is gone, and its replicas with it")
    return serve.status().applications.get(APP)


def _end(ingress: DeploymentHandle[Any], cluster: Cluster, endings: _Endings) -> None:
    """Ends the server, whose running requests may finish until the second signal."""
    ending = ingress.end.remote()
    while not endings.second.is_set() and cluster.is_alive:
        with contextlib.suppress(TimeoutError):
            ending.result(timeout_s=_START_POLL_S)
            return


def _failure_text(application: ApplicationStatusOverview) -> str:
    """Returns why an application does not run, from the messages of its deployments."""
    messages = [one.message for one in application.deployments.values() if one.message] or [application.message]
    for message in messages:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        for line in reversed(lines):
            if "Error: " in line:
                return line.partition("Error: ")[2]
    return " ".join(messages[0].split())


class _Endings:
    """The signals that end a server: after the first, requests may finish; the second ends it at once."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: (self.second if self.first.is_set() else self.first).set())


def _free_port(host: str) -> int:
    """Returns a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
