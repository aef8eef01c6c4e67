"""Serves replicas in the foreground: ``fastgen serve --replicas``, from its start to its end."""

from __future__ import annotations

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
from fastgen.serving.replicas.cluster import connected
from fastgen.serving.replicas.settings import APP, INGRESS
from fastgen.serving.run import announcement

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

_POLL_S = 0.25


def run_replicas(given: Mapping[str, Any], *, on_ready: Callable[[Deployment], None] | None = None) -> None:
    """Serves replicas with these arguments of ``fastgen.serve``, until SIGTERM or Ctrl-C, or until a client ends the
    server. ``on_ready`` is called with the deployment once the model is served.

    Raises ``FastgenError`` where the server cannot start.
    """
    _, options = sort_arguments(given)
    if options.port == 0:
        given = {**given, "port": _free_port(options.host)}
    with connected(options.address):
        from ray import serve

        from fastgen.serving.replicas.application import application

        endings = _Endings()
        app = application(given, os.environ.get(API_KEY_VARIABLE))
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        if APP in serve.status().applications:
            raise FastgenError(
                f"this cluster serves an application named {APP} already; end it first, with `serve delete {APP}`"
            )
        try:
            serve.run_many([serve.RunTarget(app, name=APP, route_prefix=None)], wait_for_applications_running=False)
            if not _until_running(endings):
                return
            ingress = serve.get_deployment_handle(INGRESS, APP)
            deployment = Deployment(**ingress.deployment.remote().result())
            write_text(STDOUT, announcement(deployment, needs_key=bool(options.api_keys)))
            if on_ready is not None:
                on_ready(deployment)
            while not endings.first.wait(_POLL_S) and APP in serve.status().applications:
                pass
            if endings.first.is_set():
                ending = ingress.end.remote()
                while not endings.second.is_set() and APP in serve.status().applications:
                    try:
                        ending.result(timeout_s=_POLL_S)
                        break
                    except TimeoutError:
                        pass
        finally:
            serve.delete(APP)


def _until_running(endings: _Endings) -> bool:
    """Waits until the application runs; returns whether it does, and not a signal has come. Raises ``FastgenError`` if
    it cannot run.
    """
    from ray import serve

    while not endings.first.wait(_POLL_S):
        application = serve.status().applications.get(APP)
        if application is None:
            raise FastgenError("the application was deleted before it ran")
        if application.status == "RUNNING":
            return True
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise FastgenError(_reason(application))
    return False


def _reason(application: ApplicationStatusOverview) -> str:
    """Returns why an application does not run, from what Ray Serve says of its deployments."""
    told = [one.message for one in application.deployments.values() if one.message] or [application.message]
    for message in told:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        for line in reversed(lines):
            if "Error: " in line:
                return line.partition("Error: ")[2]
    return " ".join(told[0].split())


class _Endings:
    """The signals that end a server: after the first, requests may finish; the second ends it at once."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: (self.second if self.first.is_set() else self.first).set())


def _free_port(host: str) -> int:
    """Returns a port that nobody listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
