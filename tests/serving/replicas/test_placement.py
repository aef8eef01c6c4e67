"""The needs of a replica, and the sentences for a cluster that does not meet them."""

from __future__ import annotations

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.replicas.placement import Machine, NoRoomError, needs_of

GIB = 1 << 30
LAPTOP = Machine("laptop", 8, 0, 16 * GIB)
GPUS = Machine("gpus", 32, 4, 256 * GIB)
HEAD = Machine("head", 0, 0, 4 * GIB)  # as KubeRay starts it: it lends no CPU


def test_replicas_share_the_cores_and_the_memory_of_one_machine() -> None:
    needs = needs_of({"model": "m"}, 4, [LAPTOP])
    assert (needs.num_cpus, needs.num_gpus, needs.bundle) == (2, 0, {"CPU": 2.0})
    assert needs.load_arguments == {
        "model": "m",
        "device": "cpu",
        "num_threads": 2,
        "memory": int(0.9 * 16 * GIB / 4),
    }


def test_replicas_fit_on_the_smallest_machine() -> None:
    needs = needs_of({"model": "m"}, 4, [LAPTOP, Machine("small", 6, 0, 8 * GIB)])
    assert needs.load_arguments["num_threads"] == 3
    assert needs.load_arguments["memory"] == int(0.9 * 8 * GIB / 2)


def test_a_replica_on_a_machine_of_its_own_keeps_its_memory() -> None:
    needs = needs_of({"model": "m"}, 2, [LAPTOP, LAPTOP])
    assert needs.num_cpus == 8
    assert "memory" not in needs.load_arguments


def test_what_the_arguments_say_is_kept() -> None:
    needs = needs_of({"model": "m", "num_threads": 3, "memory": "2GiB"}, 2, [LAPTOP])
    assert needs.bundle == {"CPU": 3.0, "memory": 2.0 * GIB}
    assert needs.load_arguments["memory"] == "2GiB"


def test_where_there_are_gpus_each_rank_gets_one() -> None:
    needs = needs_of({"model": "m", "tensor_parallel": 2}, 2, [LAPTOP, GPUS])
    assert needs.bundle == {"CPU": 2.0, "GPU": 2.0}
    assert needs.load_arguments["device"] == "cuda"
    assert needs_of({"model": "m", "device": "cpu"}, 1, [GPUS]).num_gpus == 0


def test_a_machine_that_lends_no_cpu_counts_for_nothing() -> None:
    assert needs_of({"model": "m"}, 1, [HEAD, LAPTOP]).num_cpus == 8
    with pytest.raises(NoRoomError, match=r"there is room for 0 \(the cluster has no machine\)"):
        needs_of({"model": "m"}, 1, [HEAD])


@pytest.mark.parametrize(
    ("arguments", "num_replicas", "machine", "sentence"),
    [
        (
            {"num_threads": 5},
            2,
            LAPTOP,
            r"2 replicas cannot be placed: each needs 5 CPUs of one machine, and there is room for 1 \(laptop has "
            r"8 CPUs, 0 GPUs and 16\.00 GiB\); start fewer replicas, add machines .* or give each replica fewer "
            r"threads",
        ),
        ({}, 9, LAPTOP, r"9 replicas cannot be placed: each needs 1 CPU of one machine, and there is room for 8"),
        (
            {"num_threads": 1, "memory": "10GiB"},
            2,
            LAPTOP,
            r"each needs 1 CPU and 10\.00 GiB of memory of one machine, and there is room for 1 .*, or less memory",
        ),
        (
            {"device": "cuda"},
            1,
            LAPTOP,
            r"a replica cannot be placed: it needs 1 CPU and 1 GPU of one machine, and there is room for 0",
        ),
        (
            {"tensor_parallel": 3},
            2,
            GPUS,
            r"each needs 3 CPUs and 3 GPUs of one machine, and there is room for 1 \(gpus has 32 CPUs, 4 GPUs",
        ),
    ],
)
def test_what_cannot_be_placed_is_named(
    arguments: dict[str, object], num_replicas: int, machine: Machine, sentence: str
) -> None:
    with pytest.raises(NoRoomError, match=sentence):
        needs_of({"model": "m", **arguments}, num_replicas, [machine])


def test_replicas_must_fit_each_on_one_machine() -> None:
    small = Machine("small", 2, 0, GIB)
    with pytest.raises(NoRoomError, match="room for 0"):
        needs_of({"model": "m", "num_threads": 4}, 1, [small, small])


def test_a_certain_gpu_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidArgumentError, match="device='cuda:1': Ray chooses the GPUs of a replica"):
        needs_of({"model": "m", "device": "cuda:1"}, 1, [GPUS])
