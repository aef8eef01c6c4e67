"""The command in the foreground, without Ray: its ports, its keys, and its end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import RayActorError

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import UnauthorizedError
from fastgen.serving.replicas import application, cluster, launch
from fastgen.serving.replicas.placement import Machine, NoRoomError, needs_of

GIB = 1 << 30
# Looks at a call that is not answered, after which a test takes the wait for endless.
MANY = 100


class Ingress:
    """Takes the place of a handle whose calls end as the test says."""

    def __init__(self, *results: BaseException | None):
        self.end, self._results, self.num_looks = SimpleNamespace(remote=lambda: self), list(results), 0

    def result(self, timeout_s: float) -> None:
        self.num_looks += 1
        assert self.num_looks < MANY
        result = self._results.pop(0) if self._results else TimeoutError()
        if result is not None:
            raise result


@pytest.fixture
def endings() -> Any:
    return SimpleNamespace(first=threading.Event(), second=threading.Event())


ALIVE: Any = SimpleNamespace(is_alive=True)
GONE: Any = SimpleNamespace(is_alive=False, head="10.0.0.1:6379")


def end(ingress: Any, endings: Any, timeout_s: float) -> None:
    launch._end(ingress, ALIVE, endings, timeout_s)


def test_an_end_that_no_ingress_answers_is_given_up_in_time(endings: Any) -> None:
    end(Ingress(), endings, 0.0)


def test_an_ingress_that_dies_while_it_ends_is_no_error(endings: Any) -> None:
    ingress = Ingress(TimeoutError(), RayActorError())
    end(ingress, endings, 60.0)
    assert ingress.num_looks == 2


def test_an_end_is_waited_for_until_it_is_done_or_a_second_signal_comes(endings: Any) -> None:
    ingress = Ingress(TimeoutError(), TimeoutError(), None)
    end(ingress, endings, 60.0)
    assert ingress.num_looks == 3
    endings.second.set()
    ingress = Ingress()
    end(ingress, endings, 60.0)
    assert ingress.num_looks == 0


def test_a_cluster_that_is_gone_is_named_and_has_nothing_to_end(endings: Any) -> None:
    with pytest.raises(FastgenError, match=r"the cluster at 10\.0\.0\.1:6379 is gone, and its replicas with it"):
        launch._application(GONE)
    ingress: Any = Ingress()
    launch._end(ingress, GONE, endings, 60.0)
    assert ingress.num_looks == 0


@pytest.mark.parametrize(
    ("status", "ingresses", "expected"),
    [
        ("RUNNING", {}, True),
        ("DELETING", {"Ingress": {"STOPPING": 1}}, True),
        ("DELETING", {"Ingress": {"RUNNING": 0, "STOPPING": 1}}, True),
        ("DELETING", {"Ingress": {"STOPPING": 0}, "Replicas": {"STOPPING": 1}}, False),
        ("DELETING", {"Replicas": {"STOPPING": 1}}, False),
    ],
)
def test_an_application_that_is_deleted_has_a_server_until_its_ingress_has_ended(
    status: str, ingresses: dict[str, dict[str, int]], expected: bool
) -> None:
    deployments = {name: SimpleNamespace(replica_states=states) for name, states in ingresses.items()}
    application: Any = SimpleNamespace(status=status, deployments=deployments)
    assert launch._has_server(application) == expected
    assert not launch._has_server(None)


@pytest.mark.parametrize("hangs", [False, True])
def test_replicas_that_do_not_end_are_killed(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[tuple[str, bool]] = []
    killed: list[str] = []

    def found(cluster: Any) -> Any:
        return SimpleNamespace() if hangs and not killed else None

    actors = [f"SERVE_REPLICA::{name}" for name in ("fastgen#Replicas#a", "fastgen#Ingress#b", "other#Replicas#c")]
    monkeypatch.setattr("ray.serve.delete", lambda name, _blocking: deleted.append((name, _blocking)))
    monkeypatch.setattr(
        "ray.util.list_named_actors",
        lambda all_namespaces: [{"name": name, "namespace": "serve"} for name in [*actors, "SERVE_CONTROLLER_ACTOR"]],
    )
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: name)
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr(launch, "_application", found)
    monkeypatch.setattr(launch, "_DELETE_S", 0.0)
    launch._delete(ALIVE)
    assert deleted == [("fastgen", False)]
    assert killed == (actors[:2] if hangs else [])


def test_replicas_that_take_a_moment_to_end_are_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [SimpleNamespace(), SimpleNamespace(), None]
    killed: list[str] = []
    monkeypatch.setattr("ray.serve.delete", lambda name, _blocking: None)
    monkeypatch.setattr(launch, "_application", lambda cluster: looks.pop(0))
    monkeypatch.setattr(launch, "kill_actors", lambda: killed.append("all"))
    monkeypatch.setattr(launch, "_START_POLL_S", 0.0)
    launch._delete(ALIVE)
    assert (looks, killed) == ([], [])


def application_with(message: str, status: str) -> Any:
    deployments = {"Replicas": SimpleNamespace(message=message), "Ingress": SimpleNamespace(message="")}
    return SimpleNamespace(status=status, message="", deployments=deployments)


WAITS = "Deployment 'Replicas' in application 'fastgen' has 2 replicas that have taken more than 30s to be scheduled."


def test_replicas_that_others_leave_no_room_for_are_an_error(endings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [application_with("", "DEPLOYING"), application_with(WAITS, "DEPLOYING")]
    monkeypatch.setattr(launch, "_application", lambda cluster: looks.pop(0))
    monkeypatch.setattr(launch, "num_waiting_for_room", lambda: 2)
    monkeypatch.setattr(launch, "_START_POLL_S", 0.0)
    with pytest.raises(FastgenError, match="2 of the replicas have found no room on the machines of the cluster"):
        launch._until_running(ALIVE, endings)


def test_an_error_of_one_deployment_ends_the_wait(endings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [application_with("Traceback:\nfastgen.errors.CheckpointError: no such model\n", "DEPLOYING")]
    monkeypatch.setattr(launch, "_application", lambda cluster: looks.pop(0))
    monkeypatch.setattr(launch, "_START_POLL_S", 0.0)
    with pytest.raises(FastgenError, match="no such model"):
        launch._until_running(ALIVE, endings)


def test_replicas_that_have_room_and_start_slowly_are_waited_for(endings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [application_with(WAITS, "DEPLOYING")] * 3 + [application_with("", "RUNNING")]
    monkeypatch.setattr(launch, "_application", lambda cluster: looks.pop(0))
    monkeypatch.setattr(launch, "num_waiting_for_room", lambda: 0)
    monkeypatch.setattr(launch, "_START_POLL_S", 0.0)
    assert launch._until_running(ALIVE, endings)


def test_only_placement_groups_of_replicas_that_have_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        {"state": "PENDING", "name": "SERVE_REPLICA::fastgen#Replicas#a"},
        {"state": "CREATED", "name": "SERVE_REPLICA::fastgen#Replicas#b"},
        {"state": "PENDING", "name": "SERVE_REPLICA::other#Replicas#c"},
        {"state": "PENDING", "name": ""},
    ]
    monkeypatch.setattr("ray.util.placement_group_table", lambda: dict(enumerate(groups)))
    assert cluster.num_waiting_for_room() == 1


def test_machines_have_room_where_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    total = {"CPU": 8.0, "memory": 16.0 * GIB, "node:10.0.0.1": 1.0}
    nodes = [
        {"NodeID": str(number), "NodeManagerHostname": f"m{number}", "Resources": total, "Alive": number != 3}
        for number in range(4)
    ]
    free = {"0": {"CPU": 2.0, "memory": 4.0 * GIB}, "1": {"memory": 1.0 * GIB}}
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: free)
    found = cluster.machines_in_use()
    assert [each.room for each in found] == [
        Machine("m0", 2, 0, 4 * GIB),
        Machine("m1", 0, 0, GIB),
        Machine("m2", 8, 0, 16 * GIB),
    ]
    assert [(each.host, each.num_cpus) for each in cluster.machines()] == [("m0", 8), ("m1", 8), ("m2", 8)]
    with pytest.raises(NoRoomError, match=r"m1 has 0 CPUs, 0 GPUs and 1\.00 GiB that are not in use; m2 has 8 "):
        needs_of({"model": "m", "num_threads": 8}, 2, found)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The arguments that a command passes to ``application``, which then fails."""
    found: dict[str, Any] = {}

    def make(given: Any, **more: Any) -> None:
        found.update(given=given, **more)
        raise FastgenError("far enough")

    @contextmanager
    def connected(address: str | None) -> Iterator[Any]:
        yield ALIVE

    monkeypatch.setattr(application, "application", make)
    monkeypatch.setattr(launch, "connected", connected)
    monkeypatch.setattr(launch, "machines_in_use", lambda: [Machine("m", 8, 0, GIB)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield found
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_cluster_gets_no_key_and_its_server_knows_it(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_API_KEY", "a-secret-key")
    with pytest.raises(FastgenError, match="far enough"):
        launch.run_replicas({"model": "tiny-llama", "replicas": 1, "port": 0})
    assert "a-secret-key" not in repr(started)
    keys = ApiKeys(["of-the-file"]).with_digests(started["key_digests"])
    for key in ("a-secret-key", "of-the-file"):
        keys.check(key)
    with pytest.raises(UnauthorizedError):
        keys.check(started["key_digests"][0])
    with pytest.raises(UnauthorizedError):
        keys.check(None)


def test_why_an_application_does_not_run_is_taken_from_its_deployments() -> None:
    def text(*messages: str, application: str = "") -> str:
        deployments = {str(index): SimpleNamespace(message=message) for index, message in enumerate(messages)}
        found: Any = SimpleNamespace(deployments=deployments, message=application)
        return launch._failure_text(found)

    trace = "Traceback:\n  a line\nfastgen.errors.FastgenError: no such model\n"
    assert text("", trace, application="The deployment failed.") == "no such model"
    assert text("it has\n no  room", application="ValueError: other") == "it has no room"
    assert text("", application=f"more\n{trace}") == "no such model"
    assert text() == ""


def test_replicas_are_placed_where_nothing_runs(started: dict[str, Any]) -> None:
    with pytest.raises(FastgenError, match="far enough"):
        launch.run_replicas({"model": "tiny-llama", "replicas": 1, "port": 0})
    assert started["on"] == [Machine("m", 8, 0, GIB)]


def test_a_port_that_another_server_shares_is_refused_before_anything_starts(started: dict[str, Any]) -> None:
    with launch._ports(ServeOptions(port=0, grpc_port=0, replicas=1)) as ports:
        for name in ("port", "grpc_port"):
            with pytest.raises(
                InvalidArgumentError,
                match=f"cannot listen on 127.0.0.1:{ports[name]}: Address already in use; choose another port",
            ):
                launch.run_replicas({"model": "tiny-llama", "replicas": 1, "port": 0, name: ports[name]})
    assert started == {}


def test_a_port_of_another_cluster_is_not_kept_from_its_server() -> None:
    with launch._ports(ServeOptions(port=0, replicas=1, address="10.0.0.1:6379")) as ports:
        assert set(ports) == {"port"}
        socket.create_server(("127.0.0.1", ports["port"])).close()


def test_an_application_has_no_key_among_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "machines", list)
    bound: list[Any] = []

    def deployment(**settings: Any) -> Any:
        return lambda kind: SimpleNamespace(bind=lambda *arguments, **more: bound.append((kind.__name__, arguments)))

    monkeypatch.setattr(serve, "deployment", deployment)
    given = {"model": "tiny-llama", "replicas": 1}
    application.application(given, key_digests=["ab"], on=[Machine("m", 8, 0, GIB)])
    assert ["ab"] in dict(bound)["Ingress"]


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_port_that_is_given_is_kept_and_a_free_one_is_found_for_0(address: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with launch._ports(ServeOptions(port=port, grpc_port=0, replicas=1, address=address)) as ports:
        assert ports["port"] == port
        assert 1024 <= ports["grpc_port"] != port


def test_what_hangs_is_waited_for_before_and_after_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("ray.serve.delete", lambda name, _blocking: calls.append("delete"))
    monkeypatch.setattr(launch, "_is_deleted", lambda cluster, timeout_s: calls.append(timeout_s))
    monkeypatch.setattr(launch, "kill_actors", lambda: len(calls))
    launch._delete(ALIVE)
    assert calls == ["delete", 5.0, 10.0]
    assert caplog.messages == ["2 processes of replicas do not end, and are killed"]


def test_the_actors_of_the_application_that_still_run_are_killed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = ("fastgen#Replicas#a", "fastgen#Replicas#b", "other#Replicas#c", "fastgen#Ingress#d")
    names = [f"SERVE_REPLICA::{actor}" for actor in actors]
    killed: list[Any] = []

    def listed(all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces, "Ray Serve has a namespace of its own"
        return [{"name": name, "namespace": "serve"} for name in names]

    def found(name: str, namespace: str) -> str:
        if name == names[1]:
            raise ValueError("it has ended")
        return f"{namespace}/{name}"

    monkeypatch.setattr("ray.util.list_named_actors", listed)
    monkeypatch.setattr("ray.get_actor", found)
    monkeypatch.setattr("ray.kill", killed.append)
    assert cluster.kill_actors() == 2
    assert killed == [f"serve/{names[0]}", f"serve/{names[3]}"]


def test_a_long_error_of_ray_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with launch._unless_it_fails("it cannot be ended"):
        raise TimeoutError("a \n" + "b" * 500)
    assert caplog.messages == ["it cannot be ended: a " + "b" * 298]
