"""The cluster of Ray: joined, or started on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.replicas.placement import Machine
from fastgen.serving.replicas.settings import APP, REPLICAS
from fastgen.version import install_command

# The release of Ray whose interface for routers is known. Ray calls it alpha, so another release may have another.
_RAY = "2.60"
# How long the head of a cluster may take to accept a connection.
_CONNECT_S = 5.0
_HOW_TO_START = "start one with `ray start --head`, and name the address that it prints"
# Settings of a cluster that this command starts, unless they are given. By default Ray's processes look every 0.1 s for
# what Ray Serve has to do, and collect metrics that nothing reads without its dashboard. That is a third of the
# processor time that they take while nothing happens.
_SETTINGS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_enable_metrics_collection": "0",
}
# Ray's store of objects holds only calls with long prompts.
_STORE_BYTES = 128 << 20


def need_ray() -> None:
    """Raises ``FastgenError`` where the extra ``ray`` is not installed, or another release of Ray is."""
    try:
        found = version("ray")
        import_module("ray.serve")  # fails where Ray was installed without what Ray Serve needs
    except (PackageNotFoundError, ImportError):
        raise FastgenError(f"replicas need the package ray with Ray Serve: {install_command('ray')}") from None
    if not found.startswith(f"{_RAY}."):
        raise FastgenError(f"replicas need Ray {_RAY}, and Ray {found} is installed: {install_command('ray')}")


class Cluster:
    """A cluster that this process is connected to; ``head`` is the address of its head."""

    def __init__(self, head: str):
        self.head = head

    @property
    def is_alive(self) -> bool:
        """Returns whether its head accepts connections. Calls of Ray wait for a minute where it does not."""
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError:
            return False
        return True


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Joins the cluster at ``address``, ``"auto"`` for the one that runs on this machine, or starts one of this machine
    alone, which ends with the block. Raises ``FastgenError`` with the reason where that is not possible.
    """
    need_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this Ray prints the errors of calls that were given up, with their stack traces.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
    import ray

    # Ray makes its own token where it is missing, and warns of that.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)

    if address not in (None, "auto"):
        _check_answers(str(address))
    try:
        ray.init(
            address="local" if address is None else address,
            namespace="serve",
            include_dashboard=False if address is None else None,
            object_store_memory=_STORE_BYTES if address is None else None,
            logging_level=logging.WARNING,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise InvalidArgumentError(f"address='auto': no cluster runs on this machine; {_HOW_TO_START}") from None
        what = "a cluster cannot be started on this machine" if address is None else f"address={address!r}"
        raise FastgenError(f"{what}: {_one_line(error)}") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    cluster = Cluster(ray.get_runtime_context().gcs_address)
    try:
        yield cluster
    finally:
        if cluster.is_alive:
            ray.shutdown()


def machines() -> list[Machine]:
    """Returns the machines of the cluster that this process is connected to."""
    return [_machine(node, node["Resources"]) for node in _nodes()]


def machines_in_use() -> list[Machine]:
    """Returns the same as :func:`machines`, each with what nothing has reserved of it now."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    found = []
    for node in _nodes():
        left = free.get(node["NodeID"], node["Resources"])  # a machine that has just joined has yet to report
        found.append(replace(_machine(node, node["Resources"]), free=_machine(node, left)))
    return found


def num_waiting_for_room() -> int:
    """Returns how many replicas have no placement group yet, since no machine has room for them."""
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return sum(each["state"] == "PENDING" and f"{APP}#{REPLICAS}#" in each["name"] for each in groups)


def kill_actors() -> int:
    """Kills the actors of the application that still run, and with them the processes that they have started. Returns
    their number.
    """
    import ray
    from ray.util import list_named_actors

    number = 0
    for each in list_named_actors(all_namespaces=True):
        if f"::{APP}#" in each["name"]:
            with contextlib.suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(each["name"], namespace=each["namespace"]))
                number += 1
    return number


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _machine(node: Mapping[str, Any], resources: Mapping[str, float]) -> Machine:
    cpus, gpus, memory = (int(resources.get(name, 0)) for name in ("CPU", "GPU", "memory"))
    return Machine(node["NodeManagerHostname"], cpus, gpus, memory)


def _check_answers(address: str) -> None:
    """Raises ``InvalidArgumentError`` if nothing accepts connections at ``address``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not host or not port.isdecimal():
        raise InvalidArgumentError(
            f"address={address!r}: expected auto, or HOST:PORT of the cluster's head, such as 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise InvalidArgumentError(
            f"address={address!r}: no cluster answers there ({error}); {_HOW_TO_START}"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
