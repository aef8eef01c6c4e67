"""All attacks at once beside honest streams.

The server is in bad surroundings, as ``surroundings.py`` says. Honest clients stream answers that are known from the
library. Three kinds of turns alternate: alone; beside processes that compute and attack nothing; beside all attacks of
this folder, each repeated. Each answer must be right, honest clients' and attackers' alike, and the gaps between tokens
are compared. All clients run on one half of the machine's cores and the server on the other, as if these were two
machines. Honest clients come before attackers on their cores, where the system allows it. Still it gives attackers a
little of the time there, so the second kind, with as many processes of the same priority, shows what their own work
costs, whatever they send. Where the clients' process was late itself, that is taken from gaps in a figure of its own.

``python -m tests.serving.attacks.storm --seconds 120 --streams 50 --output FILE`` writes the results. ``--only MODULE``
has the attacks of that module alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from fastgen.collector import collector_off
from fastgen.compile.host.system import memory_bytes
from fastgen.lab.machine import processor
from fastgen.serving.clients.deployments import deployments
from tests.serving.attacks import (
    bodies,
    connections,
    formats,
    grpc_connections,
    helpers,
    json_bodies,
    log_lines,
    logprobs,
)
from tests.serving.attacks.harness import MODEL, Attack, BusyError, Probes, Target, resident_by_module, resident_bytes
from tests.serving.attacks.surroundings import badly_placed
from tests.serving.http_client import BrokenAnswerError, ask, get
from tests.serving.server_process import ServerProcess
from tests.serving.storm import Known, Storm, draw_pool, quantile_ms, until_quiet

# By name, so that other processes find them.
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (bodies, connections, json_bodies, formats, logprobs, grpc_connections, helpers, log_lines)
}
# Limits of time are short, so that attacks that wait for them happen more often.
FLAGS = (
    *("--grpc-port", "0", "--num-threads", "1", "--max-num-seqs", "64"),
    *("--header-timeout", "5", "--body-timeout", "20", "--keep-alive", "5"),
)
# Longer than any attack takes, and than any honest answer.
HANG_S = 120.0
# How long an attack that has begun may go on after the end of its turn; then its clients leave.
GRACE_S = 5.0
# Priority of attackers, and of the processes that compute in their place: the least. Real ones are other machines.
_NICE = 19
# How much shorter turns without attacks are.
_CONTROL_SHARE = 0.25
# Most that all processes of the server may take beyond their memory before: 256 MiB of bodies, parsed bodies of four
# times their size, 128 MiB of kept formats, a 16th of the machine's memory for those in use, four helper processes, and
# the log-probabilities of a large answer.
MAX_MEMORY_GROWTH = (2 << 30) + memory_bytes() // 16
_PROBE_PAUSE_S = 0.1
# How often the clients' process looks at the clock, and by how much it is late where it is called so.
_WATCH_S, LATE_S = 0.002, 0.01


def attacks() -> dict[str, Attack]:
    """Returns all attacks by name."""
    return {name: attack for module in MODULES.values() for name, attack in module.ATTACKS.items()}


@dataclass(kw_only=True)
class Phase(Probes):
    """The observations of honest clients in turns of one kind."""

    num_right: int = 0
    # Gaps between tokens, one list for each turn.
    gaps_s: list[list[float]] = field(default_factory=list)
    # The same gaps, less what the clients' process was late itself meanwhile.
    gaps_of_server_s: list[float] = field(default_factory=list)
    # How late the clients' process was, whenever it was.
    late_s: list[float] = field(default_factory=list)

    @property
    def all_gaps_s(self) -> list[float]:
        return [gap for turn in self.gaps_s for gap in turn]

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the phase: times in ms, memory in bytes."""
        return {
            "right": self.num_right,
            "wrong": self.wrong[:20],
            "gap_ms": {f"p{share:g}": quantile_ms(self.all_gaps_s, share / 100) for share in (50, 90, 99, 99.9, 100)},
            "gap_p99_ms_of_turns": [quantile_ms(turn, 0.99) for turn in self.gaps_s],
            "gap_ms_less_lateness_of_clients": {
                f"p{share:g}": quantile_ms(self.gaps_of_server_s, share / 100) for share in (99, 99.9, 100)
            },
            "clients_late_ms": [round(1e3 * each, 1) for each in sorted(self.late_s, reverse=True)[:10]],
            "health_ms": {f"p{share:g}": quantile_ms(self.health_s, share / 100) for share in (50, 99, 100)},
            "memory_peak_bytes": self.memory_peak,
        }


@dataclass
class Found:
    """The outcome of a storm."""

    alone: Phase = field(default_factory=Phase)
    # Beside processes that attack nothing.
    control: Phase = field(default_factory=Phase)
    beside: Phase = field(default_factory=Phase)
    # How often each attack ended in each way.
    attacks: Counter[str] = field(default_factory=Counter)
    # Answers to attacks that are other than they should be.
    wrong_to_attacks: list[str] = field(default_factory=list)
    memory_before: int = 0
    # What the server keeps when all have gone, after each turn of attacks: the memory of its processes by their module,
    # and open files.
    memory_after: list[dict[str, list[int]]] = field(default_factory=list)
    files_after: list[int] = field(default_factory=list)
    # What the server has not released, or does not answer, afterwards.
    wrong: list[str] = field(default_factory=list)

    @property
    def memory_growth(self) -> int:
        return self.beside.memory_peak - self.memory_before

    def p99_ratio(self, other: Phase) -> float:
        """Returns the P99 gap beside the attacks, relative to that of ``other``."""
        return (quantile_ms(self.beside.all_gaps_s, 0.99) or 0.0) / (quantile_ms(other.all_gaps_s, 0.99) or 1.0)

    def summary(self) -> dict[str, Any]:
        return {
            "alone": self.alone.summary(),
            "beside other work": self.control.summary(),
            "beside attacks": self.beside.summary(),
            "p99_gap_ratio_to_alone": round(self.p99_ratio(self.alone), 2),
            "p99_gap_ratio_to_other_work": round(self.p99_ratio(self.control), 2),
            "memory_before_bytes": self.memory_before,
            "memory_after_turns_bytes": self.memory_after,
            "open_files_after_turns": self.files_after,
            "attacks": dict(sorted(self.attacks.items())),
            "wrong answers to attacks": self.wrong_to_attacks,
            "wrong afterwards": self.wrong,
        }


class Lateness:
    """How late the loop of this process comes back to what waits: a gap that a client sees then may be its own."""

    def __init__(self) -> None:
        # When it was late: from and until, by ``time.perf_counter``.
        self._spans: list[tuple[float, float]] = []

    async def watch(self, is_over: Callable[[], bool]) -> None:
        """Notes what is late until ``is_over()``."""
        last_s = time.perf_counter()
        while not is_over():
            await asyncio.sleep(_WATCH_S)
            now_s = time.perf_counter()
            if now_s - last_s > _WATCH_S + LATE_S:
                self._spans.append((last_s + _WATCH_S, now_s))
            last_s = now_s

    def between(self, from_s: float, until_s: float) -> float:
        """Returns for how many of these seconds the process was late."""
        return sum(max(0.0, min(until_s, end_s) - max(from_s, start_s)) for start_s, end_s in self._spans)

    @property
    def all_s(self) -> list[float]:
        return [end_s - start_s for start_s, end_s in self._spans]


async def honest(
    server: ServerProcess, pool: list[Known], phase: Phase, *, seconds: float, num_streams: int, seed: int
) -> None:
    """Streams known answers with ``num_streams`` clients for ``seconds``, and adds what they see to ``phase``."""
    storm, gaps, lateness = Storm(server.address, pool, random.Random(seed)), list[tuple[float, float]](), Lateness()
    until_s = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until_s:
            known = storm.rng.choice(pool)
            try:
                async with asyncio.timeout(HANG_S):
                    connected = await storm.connect(known, is_stream=True)
                    answered = await connected.answer()
                    connected.leave()
            except (TimeoutError, BrokenAnswerError, ConnectionError) as error:
                phase.wrong.append(repr(error))
                continue
            if answered.error is not None or answered.text != known.text:
                phase.wrong.append(answered.error or f"{answered.text!r} in place of {known.text!r}")
                continue
            phase.num_right += 1
            gaps.extend(pairwise(answered.arrivals_s[:-1]))

    def is_over() -> bool:
        return time.monotonic() >= until_s

    probing = phase.probe(server, _PROBE_PAUSE_S, is_over)
    await asyncio.gather(probing, lateness.watch(is_over), *(client() for _ in range(num_streams)))
    phase.gaps_s.append([later_s - earlier_s for earlier_s, later_s in gaps])
    phase.gaps_of_server_s += [
        later_s - earlier_s - lateness.between(earlier_s, later_s) for earlier_s, later_s in gaps
    ]
    phase.late_s += lateness.all_s


# What an attack's process sends when it ends: how its attacks ended, and which answers were wrong.
Ends = tuple[Counter[str], list[str]]


def attack(kind: str, target: Target, seconds: float, is_large: bool, seed: int, found: Queue[Ends]) -> None:
    """Repeats the attacks of one of ``MODULES`` for ``seconds``, each on its own, and puts how they ended into
    ``found``. Runs in another process.
    """
    os.nice(_NICE)
    happened, wrong = Counter[str](), list[str]()

    async def repeat(name: str, one: Attack, rng: random.Random) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            limit = asyncio.timeout(left_s + GRACE_S)
            try:
                async with limit:
                    await one.run(target, one.large if is_large else one.small)
                end = "as alone"
            except Exception as error:
                end = _end_by(error, is_cut_off=limit.expired())
                if end == "wrong":
                    wrong.append(f"{name}: {error!r:.500}")
            happened[f"{name}: {end}"] += 1
            await asyncio.sleep(rng.uniform(0.0, 1.0))

    async def run() -> None:
        rng = random.Random(seed)
        # Clients of attacks that were cut off have exceptions that nothing retrieves.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await asyncio.gather(*(repeat(name, one, rng) for name, one in MODULES[kind].ATTACKS.items()))

    asyncio.run(run())
    found.put((happened, wrong))


def _end_by(error: Exception, *, is_cut_off: bool) -> str:
    """Returns how an attack ended that raised ``error``. One that is cut off may raise anything."""
    if is_cut_off:
        return "cut off at the end of a turn"
    if isinstance(error, BusyError):
        return "refused, since the server had too much to do"
    if isinstance(error, TimeoutError):  # of its own
        return "took longer than alone"
    if isinstance(error, ConnectionError | BrokenAnswerError):
        return "the connection was closed"
    return "wrong"


def compute(seconds: float) -> None:
    """Computes for ``seconds``, in another process."""
    os.nice(_NICE)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sum(range(100_000))


def target_of(server: ServerProcess) -> Target:
    """Returns the addresses of ``server``, that of gRPC as its deployment says."""
    (found,) = [one for one in deployments() if one.pid == server.process.pid]
    assert found.grpc_address is not None
    return Target(server.address, f"127.0.0.1:{found.grpc_address.rpartition(':')[2]}", server.process.pid)


def run(
    server: ServerProcess,
    pool: list[Known],
    *,
    seconds: float,
    num_streams: int,
    is_large: bool,
    num_turns: int = 2,
    kinds: Sequence[str] = tuple(MODULES),
) -> Found:
    """Lets honest clients stream ``seconds`` beside all attacks of the modules ``kinds``, in ``num_turns`` turns, each
    after two shorter turns: alone, and beside other work.
    """
    found, target = Found(), target_of(server)
    context = multiprocessing.get_context("spawn")
    asyncio.run(honest(server, pool, Phase(), seconds=2, num_streams=num_streams, seed=0))
    found.memory_before = resident_bytes(server.process.pid)
    for turn in range(num_turns):
        turn_s, sizes = seconds / num_turns, {"num_streams": num_streams, "seed": turn}
        control_s = _CONTROL_SHARE * turn_s
        asyncio.run(honest(server, pool, found.alone, seconds=control_s, **sizes))
        others = [context.Process(target=compute, args=(control_s,)) for _ in kinds]
        for other in others:
            other.start()
        asyncio.run(honest(server, pool, found.control, seconds=control_s, **sizes))
        for other in others:
            other.join()
        ends: Queue[Ends] = context.Queue()
        arguments = (target, turn_s, is_large, turn, ends)
        attackers = [context.Process(target=attack, args=(kind, *arguments)) for kind in kinds]
        for attacker in attackers:
            attacker.start()
        asyncio.run(honest(server, pool, found.beside, seconds=turn_s, **sizes))
        for _ in attackers:
            happened, wrong = ends.get(timeout=2 * HANG_S)
            found.attacks += happened
            found.wrong_to_attacks += wrong
        for attacker in attackers:
            attacker.join()
        quiet = asyncio.run(until_quiet(server.address))
        found.memory_after.append(resident_by_module(server.process.pid))
        found.files_after.append(round(quiet["fastgen_server_process_open_fds"]))
    found.wrong = asyncio.run(wrong_after(server, pool))
    return found


async def wrong_after(server: ServerProcess, pool: list[Known]) -> list[str]:
    """Returns what ``server`` has not released, and what it does not answer as before."""
    after = await until_quiet(server.address)
    names = ("fastgen_kv_blocks_held", "fastgen_requests_waiting", "fastgen_engine_restarts_total")
    wrong = [f"{name} is {after[name]:g} when all have gone" for name in names if after[name]]
    if (status := (await get(server.address, "/ready"))[0]) != 200:
        wrong.append(f"/ready answers {status}")
    for known in pool:
        answered = await ask(server.address, known.body)
        if answered.text != known.text:
            wrong.append(f"{answered} in place of {known.text!r}")
    return wrong


def halves(cores: set[int]) -> tuple[set[int], set[int]]:
    """Returns the cores for clients and those for the server; where there is one only, both have it."""
    ordered = sorted(cores)
    return set(ordered[: len(ordered) // 2]) or cores, set(ordered[len(ordered) // 2 :])


def come_first() -> bool:
    """Lets this process, but none that it starts, run before all others on its cores. Returns whether the system allows
    it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True


@contextmanager
def server_on_half_the_cores(directory: Path) -> Iterator[tuple[ServerProcess, bool]]:
    """Yields a server on one half of the cores, while this process runs on the other, and whether it comes first there.
    The server is :func:`badly_placed`, with its files in ``directory``.
    """
    cores = os.sched_getaffinity(0)
    ours, theirs = halves(cores)
    os.sched_setaffinity(0, theirs)  # the server takes over what it is started with
    try:
        with badly_placed(directory, *FLAGS) as server:
            os.sched_setaffinity(0, ours)
            yield server, come_first()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of all turns beside attacks, together")
    parser.add_argument("--turns", type=int, default=2, help="of each kind")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--only", choices=MODULES, nargs="+", default=[*MODULES], metavar="MODULE", help="of attacks")
    parser.add_argument("--output", type=new_file, help="a JSON file")
    given = parser.parse_args()
    about: dict[str, Any] = {
        "what": "attacks of tests/serving/attacks at once, beside honest streams: tests/serving/attacks/storm.py",
        "modules": given.only,
        "date": datetime.now(UTC).date().isoformat(),
        "fastgen": fastgen.__version__,
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)},
        "model": MODEL,
        "flags": " ".join(FLAGS),
        "seconds": given.seconds,
        "streams": given.streams,
    }
    pool = draw_pool(random.Random(0), 40)
    # A full collection of this process's garbage takes a tenth of a second, which would count as a gap.
    with (
        collector_off(),
        tempfile.TemporaryDirectory() as directory,
        server_on_half_the_cores(Path(directory)) as (server, is_first),
    ):
        about["honest clients come first"] = is_first
        sizes = {"seconds": given.seconds, "num_streams": given.streams, "num_turns": given.turns}
        found = run(server, pool, is_large=True, kinds=given.only, **sizes)
    about |= found.summary()
    print(json.dumps(about, indent=1))
    if given.output is not None:
        given.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
