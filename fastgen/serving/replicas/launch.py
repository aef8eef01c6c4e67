"""Serves replicas in the foreground: ``fastgen serve --replicas``, from its start to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fastgen.errors import FastgenError
from fastgen.serving.api_keys import API_KEY_VARIABLE, ApiKeys
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.clients.deployments import Deployment
from fastgen.serving.http.server import hold_port
from fastgen.serving.options import ServeOptions
from fastgen.serving.output import STDOUT, write_text
from fastgen.serving.replicas.cluster import Cluster, connected, kill_actors, machines_in_use, num_waiting_for_room
from fastgen.serving.replicas.settings import APP, INGRESS, INGRESS_END_S
from fastgen.serving.run import announcement

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview

# How often the application is looked at while it starts, and while it runs: a look costs Ray Serve some milliseconds.
_START_POLL_S, _POLL_S = 0.25, 2.0
# How long the application may take to end after its server. No request is left then that a replica could finish.
_DELETE_S = 5.0
# How long Ray may take to end processes that are killed.
_KILL_S = 10.0
# Most characters of an error that are logged.
_MOST_LOGGED = 300
# A part of the message with which Ray Serve reports, after 30 s, that replicas are not scheduled.
_IS_WAITING = "to be scheduled"
_log = logging.getLogger(__name__)


def run_replicas(given: Mapping[str, Any], *, on_ready: Callable[[Deployment], None] | None = None) -> None:
    """Serves replicas with these arguments of ``fastgen.serve``, until SIGTERM or Ctrl-C, or until a client ends the
    server. ``on_ready`` is called with the deployment once the model is served.

    Raises ``FastgenError`` where the server cannot start.
    """
    _, options = sort_arguments(given)
    # The cluster's processes are to have no key.
    key_digests = ApiKeys.load(None, {API_KEY_VARIABLE: os.environ.pop(API_KEY_VARIABLE, "")}).digests
    with _ports(options) as ports, connected(options.address) as cluster:
        from ray import serve

        from fastgen.serving.replicas.application import application

        endings = _Endings()
        app = application({**given, **ports}, key_digests=key_digests, on=machines_in_use())
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
            while not endings.first.wait(_POLL_S) and _has_server(_application(cluster)):
                pass
            if endings.first.is_set():
                _end(ingress, cluster, endings, options.drain_timeout_s + INGRESS_END_S)
        finally:
            if cluster.is_alive:
                with _unless_it_fails("the application cannot be deleted"):
                    _delete(cluster)


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
        is_waiting = any(_IS_WAITING in one.message for one in application.deployments.values())
        if is_waiting and (number := num_waiting_for_room()):  # and not only for processes that start slowly
            raise FastgenError(
                f"{number} of the replicas have found no room on the machines of the cluster: what these have is in "
                "use, as `ray status` shows; start fewer replicas, or add machines with `ray start --address`"
            )
    return False


def _application(cluster: Cluster) -> ApplicationStatusOverview | None:
    """Returns the state of the application; ``None`` if it was deleted."""
    from ray import serve

    if not cluster.is_alive:
        raise FastgenError(f"the cluster at {cluster.head} is gone, and its replicas with it")
    return serve.status().applications.get(APP)


def _has_server(application: ApplicationStatusOverview | None) -> bool:
    """Returns whether the application runs, or is being deleted and its server has yet to end."""
    if application is None or application.status != "DELETING":
        return application is not None
    ingress = application.deployments.get(INGRESS)
    return ingress is not None and any(ingress.replica_states.values())


def _delete(cluster: Cluster) -> None:
    """Deletes the application, whose server has ended. What has not ended in time is killed, such as a replica that is
    stopped or hangs: Ray Serve would give it its time to finish requests.
    """
    from ray import serve

    serve.delete(APP, _blocking=False)
    if not _is_deleted(cluster, _DELETE_S):
        _log.warning("%d processes of replicas do not end, and are killed", kill_actors())
        _is_deleted(cluster, _KILL_S)


def _is_deleted(cluster: Cluster, timeout_s: float) -> bool:
    """Waits until the application is deleted; returns whether it is after ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    while _application(cluster) is not None:
        if time.monotonic() > until_s:
            return False
        time.sleep(_START_POLL_S)
    return True


def _end(ingress: DeploymentHandle[Any], cluster: Cluster, endings: _Endings, timeout_s: float) -> None:
    """Ends the server, whose running requests may finish until the second signal, or for ``timeout_s``. An ingress that
    fails, or has no process, has nothing to finish.
    """
    until_s = time.monotonic() + timeout_s
    with _unless_it_fails("the server cannot be ended in order"):
        ending = ingress.end.remote()
        while not endings.second.is_set() and cluster.is_alive and time.monotonic() < until_s:
            with contextlib.suppress(TimeoutError):
                ending.result(timeout_s=_START_POLL_S)
                return


@contextmanager
def _unless_it_fails(what: str) -> Iterator[None]:
    """Logs the errors of calls through Ray in the block: this command ends in any case."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (RayError, RayServeException, TimeoutError) as error:
        _log.warning("%s: %s", what, " ".join(str(error).split())[:_MOST_LOGGED])


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


@contextmanager
def _ports(options: ServeOptions) -> Iterator[dict[str, int]]:
    """Yields the ports of the server, free ones for 0. A server on this machine has them to itself until the block is
    left: its processes share ports, so that one can replace another, and would share them with another server too.

    Raises ``InvalidArgumentError`` if one of them is in use.
    """
    given = {"port": options.port, "grpc_port": options.grpc_port}
    wanted = {name: port for name, port in given.items() if port is not None}
    with ExitStack() as stack:
        if options.address is None:
            yield {name: stack.enter_context(hold_port(options.host, port)) for name, port in wanted.items()}
            return
        with ExitStack() as found:  # the head, which may be another machine, may have another user
            ports = {name: port or found.enter_context(hold_port(options.host, port)) for name, port in wanted.items()}
        yield ports
