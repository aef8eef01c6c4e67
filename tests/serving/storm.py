"""Many clients at once, most of them ill-behaved, against one server; and an engine that is killed under load.

Every request is drawn from a pool whose answers are known from the library. A client that waits must receive that
answer, or an error that says what is wrong. Nothing may hang. When all clients have gone, the server must hold no block
and no request, no more files than before and the same processes. Of a killed engine no shared memory and no socket may
be left.

``python -m tests.serving.storm --seconds 120 --streams 200 --kills 20 --output FILE`` runs both and writes the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.cpu.results import commit
from benchmarks.new_file import new_file
from fastgen.lab.machine import processor
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.serving.held import Held, shared_memory, still_there
from tests.serving.http_client import Answered, BrokenAnswerError, RawClient, ask, get
from tests.serving.server_process import ServerProcess, served
from tests.serving.started import started_by

MODEL = "tiny-llama"
FLAGS = ("--max-num-seqs", "32", "--max-body-bytes", "20000", "--body-timeout", "2", "--write-timeout", "2")
# Longer than any request of a storm takes.
HANG_S = 60.0
WORDS = ("once", "upon", "a", "time", "there", "was", "little", "girl", "dog", "sun", "and", "the", "happy", "ball")


@dataclass(frozen=True)
class Known:
    """A request and the library's answer."""

    body: dict[str, Any]
    text: str


def draw_pool(rng: random.Random, num_requests: int) -> list[Known]:
    """Returns distinct requests with their answers."""
    bodies = []
    for seed in range(num_requests):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(3, 60)))
        bodies.append({"model": MODEL, "prompt": prompt, "max_tokens": rng.randint(8, 60), "seed": seed})
        bodies[-1] |= {"temperature": rng.choice([0, 0.8]), "ignore_eos": True}
    with fastgen.load(MODEL) as llm:
        samplings = [
            SamplingParams(
                max_new_tokens=body["max_tokens"], seed=body["seed"], temperature=body["temperature"], ignore_eos=True
            )
            for body in bodies
        ]
        outputs = llm.generate([body["prompt"] for body in bodies], samplings)
    return [Known(body, output.text) for body, output in zip(bodies, outputs, strict=True)]


@dataclass
class Storm:
    """The behaviour of the clients, and its results."""

    address: str
    pool: list[Known]
    rng: random.Random
    happened: Counter[str] = field(default_factory=Counter)
    # Violations found.
    wrong: list[str] = field(default_factory=list)
    # Between the events of streams that were read as they came.
    gaps_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    # What the server holds before the clients come, and when they have gone.
    held: list[Held] = field(default_factory=list)

    @property
    def num_right(self) -> int:
        """Returns how many answers were as expected."""
        return sum(number for what, number in self.happened.items() if what.endswith("right"))

    async def run(self, num_clients: int, until_s: float) -> None:
        """Runs clients that send requests until the clock shows ``until_s``."""
        await asyncio.gather(*(self._client(until_s) for _ in range(num_clients)))

    async def _client(self, until_s: float) -> None:
        kinds = list(BEHAVIOURS)
        while time.monotonic() < until_s:
            kind = self.rng.choices(kinds, [weight for weight, _ in BEHAVIOURS.values()])[0]
            try:
                async with asyncio.timeout(HANG_S):
                    await BEHAVIOURS[kind][1](self, self.rng.choice(self.pool))
            except TimeoutError:
                self.wrong.append(f"{kind}: nothing came for {HANG_S:g} s")
            except BrokenAnswerError as error:
                self.wrong.append(f"{kind}: {error}")
            except ConnectionError as error:  # the system's word for a server that closed a connection
                self.happened[f"{kind}: {type(error).__name__}"] += 1

    def judge(self, kind: str, known: Known, answered: Answered) -> None:
        """Records whether the answer is right, or an error."""
        if answered.error is not None:
            self.happened[f"{kind}: error"] += 1
            self.errors[f"{answered.status} {answered.error[:80]}"] += 1
        elif answered.text == known.text:
            self.happened[f"{kind}: right"] += 1
        else:
            self.wrong.append(f"{kind}: {answered.text!r} in place of {known.text!r}")

    async def connect(self, known: Known, *, is_stream: bool) -> RawClient:
        client = await RawClient.connect(self.address)
        client.send(json.dumps(known.body | {"stream": is_stream}).encode())
        return client


async def stream(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=True)
    answered = await client.answer()
    storm.judge("stream", known, answered)
    times_s = answered.arrivals_s[:-1]  # [DONE] comes with the last piece
    storm.gaps_s += [later - earlier for earlier, later in pairwise(times_s)]
    client.leave()


async def whole(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=False)
    storm.judge("whole", known, await client.answer())
    client.leave()


async def read_slowly(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=True)
    storm.judge("slow", known, await client.answer(pause_s=storm.rng.uniform(0.01, 0.1)))
    client.leave()


async def leave_soon(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=storm.rng.random() < 0.5)
    await asyncio.sleep(storm.rng.choice([0.0, 0.01, 0.1]))
    client.leave()
    storm.happened["left before an answer"] += 1


async def leave_in_the_middle(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=True)
    await client.head()
    for _ in range(storm.rng.randint(1, 6)):
        await client.reader.readline()
    client.leave()
    storm.happened["left in the middle"] += 1


async def take_nothing(storm: Storm, known: Known) -> None:
    client = await storm.connect(known, is_stream=True)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(storm.rng.uniform(0.5, 3.0))
    client.leave()
    storm.happened["took nothing"] += 1


async def send_too_much(storm: Storm, known: Known) -> None:
    client = await RawClient.connect(storm.address)
    if storm.rng.random() < 0.5:
        client.send(b"", "content-length: 1000000000")
    else:
        client.send(b"", "transfer-encoding: chunked")
        client.writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
        for _ in range(5):
            client.writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
    await _refused(storm, client, "too large", 413)


async def send_nonsense(storm: Storm, known: Known) -> None:
    client = await RawClient.connect(storm.address)
    bodies = [
        b"{",
        b"\xff\xfe",
        b"[" * 15000,
        json.dumps(known.body | {"max_tokens": -1}).encode(),
        json.dumps(known.body | {"no_such_field": 1}).encode(),
        json.dumps(known.body | {"prompt": [10**9]}).encode(),
        json.dumps(known.body | {"prompt": {"a": 1}}).encode(),
    ]
    client.send(storm.rng.choice(bodies))
    await _refused(storm, client, "nonsense", 400)


async def send_no_http(storm: Storm, known: Known) -> None:
    client = await RawClient.connect(storm.address)
    client.writer.write(storm.rng.randbytes(40) + b"\r\n\r\n")
    await _refused(storm, client, "no HTTP", 400)


async def send_half(storm: Storm, known: Known) -> None:
    client = await RawClient.connect(storm.address)
    client.send(b'{"model"', "content-length: 100")
    await _refused(storm, client, "half a body", 408)


async def close_own_side(storm: Storm, known: Known) -> None:
    """The server either notices before it answers and sends an error, or has answered."""
    client = await storm.connect(known, is_stream=False)
    await asyncio.sleep(storm.rng.choice([0.0, 0.05, 0.5]))
    client.writer.write_eof()
    storm.judge("half closed", known, await client.answer())
    client.leave()


async def _refused(storm: Storm, client: RawClient, kind: str, status: int) -> None:
    answered = await client.answer()
    client.leave()
    if answered.status == status and answered.error is not None:
        storm.happened[f"{kind}: refused"] += 1
    else:
        storm.wrong.append(f"{kind}: {answered}")


BEHAVIOURS: dict[str, tuple[int, Callable[[Storm, Known], Awaitable[None]]]] = {
    "stream": (40, stream),
    "whole": (15, whole),
    "read slowly": (6, read_slowly),
    "leave soon": (10, leave_soon),
    "leave in the middle": (8, leave_in_the_middle),
    "take nothing": (3, take_nothing),
    "send too much": (4, send_too_much),
    "send nonsense": (5, send_nonsense),
    "send no HTTP": (3, send_no_http),
    "send half": (3, send_half),
    "close own side": (3, close_own_side),
}


async def counters(address: str) -> dict[str, float]:
    """Returns the server's metrics without labels, by name."""
    _, body = await get(address, "/metrics")
    lines = (line.split(" ") for line in body.decode().splitlines() if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in lines}


async def until_quiet(address: str) -> dict[str, float]:
    """Waits until the server has no work, and no connection but this one. Returns its counters then."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await counters(address)
            if found["fastgen_connections"] <= 1 and not found["fastgen_requests_running"]:
                return found
            await asyncio.sleep(0.1)


def children(pid: int) -> list[int]:
    """Returns the running child processes of ``pid`` that its first thread started: of a server, its engine. Its other
    threads start helpers."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def held(server: ServerProcess) -> Held:
    """Returns what ``server`` holds once it is quiet."""
    after = await until_quiet(server.address)
    return Held.of(after["fastgen_server_process_open_fds"], started_by(server.process.pid))


async def run_storm(server: ServerProcess, pool: list[Known], *, seconds: float, num_clients: int, seed: int) -> Storm:
    """Runs a storm of ``num_clients`` clients. Adds to ``wrong`` whatever the server has not released."""
    storm = Storm(server.address, pool, random.Random(seed))
    await asyncio.gather(*(ask(server.address, known.body) for known in pool))
    storm.held.append(await held(server))
    pids = children(server.process.pid)
    await storm.run(num_clients, time.monotonic() + seconds)
    after = await until_quiet(server.address)
    for name in ("fastgen_kv_blocks_held", "fastgen_requests_waiting", "fastgen_engine_restarts_total"):
        if after[name]:
            storm.wrong.append(f"{name} is {after[name]:g} when all have gone")
    storm.held.append(await held(server))
    storm.wrong += storm.held[1].beyond(storm.held[0])
    if children(server.process.pid) != pids:
        storm.wrong.append("a process was started again")
    return storm


@dataclass
class Kills:
    """Results of killing an engine repeatedly under load."""

    storm: Storm
    # Seconds from each kill until requests were accepted again.
    ready_s: list[float] = field(default_factory=list)
    # The named shared memory that engines had mapped when they were killed.
    mapped: set[str] = field(default_factory=set)


async def run_kills(
    server: ServerProcess, pool: list[Known], *, num_kills: int, num_clients: int, seed: int, most_s: float = 2.0
) -> Kills:
    """Kills the engine at a random time, up to ``most_s`` seconds after it was ready, under the load of streams and of
    requests for whole answers. Adds to ``wrong`` whatever is left of the killed engines, in the server and outside.
    """
    kills = Kills(Storm(server.address, pool, random.Random(seed)))
    await asyncio.gather(*(ask(server.address, known.body) for known in pool))
    kills.storm.held.append(await held(server))
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            known = kills.storm.rng.choice(pool)
            is_stream = kills.storm.rng.random() < 0.5
            try:
                async with asyncio.timeout(HANG_S):
                    client = await kills.storm.connect(known, is_stream=is_stream)
                    answered = await client.answer()
                    client.leave()
            except TimeoutError:
                kills.storm.wrong.append(f"nothing came for {HANG_S:g} s")
                continue
            except (BrokenAnswerError, ConnectionError) as error:
                kills.storm.wrong.append(f"no answer and no error: {error!r}")
                continue
            kills.storm.judge("stream" if is_stream else "whole", known, answered)
            if answered.error is not None:
                await asyncio.sleep(1.0)  # as it is asked to by Retry-After

    clients = [asyncio.create_task(client()) for _ in range(num_clients)]
    for _ in range(num_kills):
        await asyncio.sleep(kills.storm.rng.uniform(0.0, most_s))
        (engine,) = children(server.process.pid)
        kills.mapped |= shared_memory(engine)
        killed_s = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        while children(server.process.pid) in ([engine], []):
            await asyncio.sleep(0.005)
        async with asyncio.timeout(HANG_S):
            while (await get(server.address, "/ready"))[0] != 200:
                await asyncio.sleep(0.02)
        kills.ready_s.append(time.monotonic() - killed_s)
    num_right = kills.storm.num_right
    async with asyncio.timeout(HANG_S):
        while kills.storm.num_right == num_right:  # the last engine answers too
            await asyncio.sleep(0.02)
    is_over.set()
    await asyncio.gather(*clients)
    after = await until_quiet(server.address)
    if after["fastgen_engine_restarts_total"] != num_kills:
        kills.storm.wrong.append(f"{after['fastgen_engine_restarts_total']:g} restarts after {num_kills} kills")
    if after["fastgen_kv_blocks_held"]:
        kills.storm.wrong.append("blocks are held when all have gone")
    kills.storm.held.append(await held(server))
    kills.storm.wrong += kills.storm.held[1].beyond(kills.storm.held[0])
    if left := still_there(kills.mapped):
        kills.storm.wrong.append(f"shared memory of killed engines is left: {sorted(left)}")
    return kills


def quantile_ms(values_s: list[float], share: float) -> float | None:
    """Returns the quantile in milliseconds, or ``None`` of an empty list."""
    return round(1000 * sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))], 2) if values_s else None


def write(found: dict[str, Any], output: Path | None) -> None:
    """Saves the results so far."""
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=new_file, help="a JSON file")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "what": "ill-behaved clients, and an engine that is killed under load: tests/serving/storm.py",
        "date": datetime.now(UTC).date().isoformat(),
        "fastgen": fastgen.__version__,
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count()},
        "model": MODEL,
        "seed": given.seed,
    }
    pool = draw_pool(random.Random(given.seed), 40)
    with served(MODEL, *FLAGS) as server:
        sizes = {"seconds": given.seconds, "num_clients": given.streams, "seed": given.seed}
        storm = asyncio.run(run_storm(server, pool, **sizes))
        found["storm"] = {
            "seconds": given.seconds,
            "clients": given.streams,
            "happened": dict(sorted(storm.happened.items())),
            "errors": dict(storm.errors.most_common(10)),
            "wrong": storm.wrong[:20],
            "gap_ms": {f"p{share:g}": quantile_ms(storm.gaps_s, share / 100) for share in (50, 90, 99)},
            "held": [asdict(each) for each in storm.held],
        }
        print(json.dumps(found["storm"], indent=1), flush=True)
    write(found, given.output)
    with served(MODEL, *FLAGS) as server:
        kills = asyncio.run(run_kills(server, pool, num_kills=given.kills, num_clients=32, seed=given.seed))
        found["kills"] = {
            "kills": given.kills,
            "clients": 32,
            "happened": dict(sorted(kills.storm.happened.items())),
            "errors": dict(kills.storm.errors.most_common(10)),
            "wrong": kills.storm.wrong[:20],
            "ready_again_s": [round(seconds, 2) for seconds in kills.ready_s],
            "held": [asdict(each) for each in kills.storm.held],
            "shared_memory": sorted(kills.mapped),
        }
        print(json.dumps(found["kills"], indent=1), flush=True)
    write(found, given.output)
    if storm.wrong or kills.storm.wrong:
        raise SystemExit("something went wrong; see above")


if __name__ == "__main__":
    main()
