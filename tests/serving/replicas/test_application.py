"""The application of Ray Serve: what its actors reserve, and how long it waits for machines."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.serving.replicas import application
from fastgen.serving.replicas.placement import Machine, NoRoomError

GIB = 1 << 30
LAPTOP = Machine("laptop", 8, 0, 16 * GIB)


def made(given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the deployments of the replicas and of the ingress on a laptop."""
    ingress: Any = application.application({"model": "tiny-llama", **given}, on=[LAPTOP])._bound_deployment
    return ingress.init_args[0]._bound_deployment, ingress


def reserved(deployment: Any) -> tuple[float, float, float, Any]:
    found = deployment.ray_actor_options
    return found["num_cpus"], found.get("num_gpus", 0), found.get("memory", 0), found.get("resources")


def test_replicas_reserve_what_they_need_and_the_ingress_only_a_place_at_the_head() -> None:
    replicas, ingress = made({"replicas": 2, "num_threads": 3, "memory": "1GiB"})
    assert reserved(replicas)[:3] == (3, 0, GIB)
    assert replicas._replica_config.placement_group_bundles == [{"CPU": 3.0, "memory": float(GIB)}]
    assert reserved(ingress)[:2] == (0, 0)
    assert list(reserved(ingress)[3]) == ["node:__internal_head__"]
    assert reserved(ingress)[3]["node:__internal_head__"] < 0.01, "an ingress that replaces another has room beside it"


def test_without_a_number_there_is_one_replica_with_the_whole_machine() -> None:
    replicas, _ = made({})
    assert (replicas.num_replicas, reserved(replicas)[:3]) == (1, (8, 0, 0))


class Clock:
    """A clock by which a look at the machines takes a tenth of a second."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("given", "joins_after_s", "waited_s"),
    [
        ({"wait_for_machines_s": 2.5}, 2.0, 2.0),
        ({"wait_for_machines_s": 2.5}, 600.0, None),
        ({}, 0.05, None),
    ],
)
def test_machines_may_take_the_time_to_join_that_the_file_gives_them(
    given: dict[str, Any], joins_after_s: float, waited_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    began_s = clock.now_s

    def make(arguments: dict[str, Any]) -> str:
        assert arguments == {"model": "m"}
        if clock.now_s - began_s < joins_after_s:
            clock.now_s += 0.1
            raise NoRoomError("there is room for 0")
        return "the application"

    monkeypatch.setattr(application, "time", clock)
    monkeypatch.setattr(application, "application", make)
    arguments = {"model": "m", **given}
    if waited_s is None:
        with pytest.raises(NoRoomError, match="room for 0"):
            application.build(arguments)
        limit_s = given.get("wait_for_machines_s", 0.0)
        assert limit_s < clock.now_s - began_s < limit_s + 1.2, "it is looked once a second"
    else:
        built: Any = application.build(arguments)
        assert built == "the application"
        assert waited_s <= clock.now_s - began_s
    assert arguments == {"model": "m", **given}, "the file's own arguments are left alone"


def test_an_actor_may_fail_three_times_to_start_and_logs_no_requests() -> None:
    for deployment in made({"replicas": 2}):
        assert deployment._deployment_config.max_constructor_retry_count == 3
        logging_config = deployment._deployment_config.logging_config
        assert (logging_config["log_level"], logging_config["enable_access_log"]) == ("WARNING", False)


def test_replicas_are_placed_on_the_machines_of_the_cluster_where_none_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application, "machines", lambda: [LAPTOP])
    ingress: Any = application.application({"model": "tiny-llama", "replicas": 4})._bound_deployment
    assert reserved(ingress.init_args[0]._bound_deployment)[:2] == (2, 0)
    with pytest.raises(NoRoomError, match="room for 0"):
        application.application({"model": "tiny-llama", "replicas": 4}, on=[])
