"""The needs of a replica, and whether the machines of a cluster meet them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen.arguments import parse_bytes, shown_bytes
from fastgen.errors import InvalidArgumentError

# Share of a machine's memory for all replicas on it: Ray and the server need some.
_SHARE_OF_MEMORY = 0.9


class NoRoomError(InvalidArgumentError):
    """The machines of a cluster have no room for all replicas. More may join it."""


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster, with all that Ray may hand out of it."""

    host: str
    num_cpus: int
    num_gpus: int
    memory_bytes: int
    # The part that is not in use, if only that counts; ``None`` if all of the machine does.
    free: Machine | None = None

    @property
    def room(self) -> Machine:
        """Returns what replicas may take of it."""
        return self.free or self

    @property
    def text(self) -> str:
        room = self.room
        found = f"{self.host} has {room.num_cpus} CPUs, {room.num_gpus} GPUs and {shown_bytes(room.memory_bytes)}"
        return found if room in (self, replace(self, free=None)) else f"{found} that are not in use"


@dataclass(frozen=True)
class Needs:
    """The cores, GPUs and memory that one replica takes, all of one machine."""

    # Threads that compute, or one for each GPU.
    num_cpus: int
    num_gpus: int
    # Memory that is kept for it; ``None`` where it takes its share of what there is.
    memory_bytes: int | None
    # The arguments of ``fastgen.load`` with which a replica keeps to that.
    load_arguments: Mapping[str, Any]

    @property
    def bundle(self) -> dict[str, float]:
        """Returns the bundle of its placement group."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory_bytes or 0}
        return {name: float(amount) for name, amount in found.items() if amount}

    @property
    def text(self) -> str:
        parts = [f"{self.num_cpus} CPU{'s' if self.num_cpus > 1 else ''}"]
        parts += [f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"] if self.num_gpus else []
        parts += [f"{shown_bytes(self.memory_bytes)} of memory"] if self.memory_bytes else []
        return " and ".join(parts)

    def count_on(self, machine: Machine) -> int:
        """Returns how many replicas have room on ``machine``."""
        counts = [machine.num_cpus // self.num_cpus]
        counts += [machine.num_gpus // self.num_gpus] if self.num_gpus else []
        counts += [machine.memory_bytes // self.memory_bytes] if self.memory_bytes else []
        return min(counts)


def needs_of(load_arguments: Mapping[str, Any], num_replicas: int, machines: Sequence[Machine]) -> Needs:
    """Returns what each of ``num_replicas`` takes of ``machines``: GPUs where the model runs on them, else an equal
    share of the cores and of the memory, if the arguments do not say how much.

    Raises ``NoRoomError`` where there is no room for all of them.
    """
    machines = [machine for machine in machines if machine.num_cpus]  # the head of a cluster may lend none
    rooms = [machine.room for machine in machines if machine.room.num_cpus]
    wanted, num_ranks = str(load_arguments.get("device", "auto")), int(load_arguments.get("tensor_parallel", 1))
    has_gpus = any(machine.num_gpus for machine in machines)
    memory = load_arguments.get("memory")
    memory_bytes = None if memory is None else parse_bytes(memory, "memory")
    if wanted.startswith("cuda") or (wanted == "auto" and has_gpus):
        if ":" in wanted:
            raise InvalidArgumentError(f"device={wanted!r}: Ray chooses the GPUs of a replica; ask for 'cuda'")
        needs = Needs(num_ranks, num_ranks, memory_bytes, {**load_arguments, "device": "cuda"})
    else:
        needs = _needs_of_cpus(load_arguments, num_replicas, rooms, memory_bytes)
    room = sum(map(needs.count_on, rooms))
    if room < num_replicas:
        raise NoRoomError(_no_room(needs, num_replicas, room, machines))
    return needs


def _needs_of_cpus(
    load_arguments: Mapping[str, Any], num_replicas: int, machines: Sequence[Machine], memory_bytes: int | None
) -> Needs:
    most_on_one = math.ceil(num_replicas / max(1, len(machines)))
    num_cores = min((machine.num_cpus for machine in machines), default=1)
    num_threads = load_arguments.get("num_threads") or max(1, num_cores // most_on_one)
    limited = {**load_arguments, "device": "cpu", "num_threads": num_threads}
    if memory_bytes is None and most_on_one > 1:
        smallest = min((machine.memory_bytes for machine in machines), default=0)
        limited["memory"] = int(_SHARE_OF_MEMORY * smallest / most_on_one)
    return Needs(num_threads, 0, memory_bytes, limited)


def _no_room(needs: Needs, num_replicas: int, room: int, machines: Sequence[Machine]) -> str:
    listed = "; ".join(machine.text for machine in machines)
    ways = "start fewer replicas, add machines with `ray start --address`"
    ways += "" if needs.num_gpus else ", or give each replica fewer threads (num_threads)"
    ways += ", or less memory" if needs.memory_bytes else ""
    what = (
        f"{num_replicas} replicas cannot be placed: each needs"
        if num_replicas > 1
        else "a replica cannot be placed: it needs"
    )
    return (
        f"{what} {needs.text} of one machine, and there is room for {room} "
        f"({listed or 'the cluster has no machine'}); {ways}"
    )
