"""Watches from outside how an attack affects a server and its other clients.

An attack is one ill-behaved client, or many of one kind. A module of this folder holds the attacks of one kind, and
lists them in ``ATTACKS``. The test beside it runs a small instance of each; ``storm.py`` runs all of them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.serving.http_client import BrokenAnswerError, RawClient, get
from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
HONEST = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
PROBE_PAUSE_S = 0.02


# The statuses of a server that has too much to do.
_BUSY = {429, 503}


class BusyError(Exception):
    """The server said that it has too much to do. Of a single attack that is wrong, beside others it is not."""


@dataclass(frozen=True)
class Target:
    """The addresses that an attack is sent to. An example of ``grpc`` is ``127.0.0.1:40124``."""

    http: str
    grpc: str | None = None
    # The server's process, for attacks from the same machine.
    pid: int = 0


@dataclass(frozen=True)
class Attack:
    """One kind of ill-behaved client."""

    # Sends so much of it. Raises ``AssertionError`` if the server answers otherwise than it should, and ``BusyError``
    # if it does not take the attack's requests because it has too much to do.
    run: Callable[[Target, int], Awaitable[None]]
    # The sizes for a test of some seconds and for the storm.
    small: int
    large: int


@dataclass(kw_only=True)
class Probes:
    """The observations of a server from outside. Times are those of a machine that runs the attackers too."""

    # Most resident memory of the server and the processes below it.
    memory_peak: int = 0
    # How long each ``GET /health`` took, from the connection to the answer.
    health_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def probe(self, server: ServerProcess, pause_s: float, is_over: Callable[[], bool]) -> None:
        """Asks for ``/health`` and looks at the server's memory, once at least and until ``is_over`` returns true."""
        while not (is_over() and self.health_s):
            began_s = time.perf_counter()
            status, _ = await get(server.address, "/health")
            self.health_s.append(time.perf_counter() - began_s)
            if status != 200:
                self.wrong.append(f"/health answered {status}")
            self.memory_peak = max(self.memory_peak, resident_bytes(server.process.pid))
            await asyncio.sleep(pause_s)


@dataclass(kw_only=True)
class Seen(Probes):
    """The observations during a block."""

    # Resident memory before the block.
    memory_before: int
    # Between the tokens of honest streams.
    gaps_s: list[float] = field(default_factory=list)
    # The texts of honest streams; all of them are equal, because they sample greedily.
    texts: list[str] = field(default_factory=list)

    @property
    def memory_growth(self) -> int:
        """Returns the bytes between the peak and the memory before."""
        return self.memory_peak - self.memory_before


def check_status(status: int, *expected: int, about: object = "") -> None:
    """Raises ``AssertionError`` if an answer has none of the ``expected`` statuses, or ``BusyError``. ``about`` says
    which request it was.
    """
    if status in _BUSY and status not in expected:
        raise BusyError(f"{status} {about}")
    assert status in expected, f"{status} in place of {expected}: {about}"


@contextmanager
def observed(server: ServerProcess) -> Iterator[Seen]:
    """Watches memory, ``/health`` and one honest stream after the other, in a thread, until the block is left.

    The block begins after a first honest stream. It ends when the last one has ended, and one at least is in it. Raises
    :class:`AssertionError` if an honest stream failed or two of them differ.
    """
    memory = resident_bytes(server.process.pid)
    seen = Seen(memory_before=memory, memory_peak=memory)
    is_begun, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_watch(server, seen, is_begun, is_over)), daemon=True)
    thread.start()
    try:
        assert is_begun.wait(60), "no honest stream was answered before the attack"
        yield seen
    finally:
        is_over.set()
        thread.join(120)
    assert not thread.is_alive(), "honest clients wait for ever"
    assert seen.wrong == []
    assert len(set(seen.texts)) == 1, "honest streams differ"


def resident_bytes(pid: int, command_above: bytes = b"") -> int:
    """Returns the resident memory of a process and of all below it. One that has just been started still shows its
    parent's command and memory (``command_above``), and is left out.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        below = started_by(pid)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    if command == command_above:
        return 0
    return (_resident(status) or 0) + sum(resident_bytes(child, command) for child in below)


def resident_by_module(pid: int) -> dict[str, list[int]]:
    """Returns the resident memory of a process and of those that it started, by the Python module that each runs."""
    found: dict[str, list[int]] = {}
    for each in (pid, *started_by(pid)):
        words = Path(f"/proc/{each}/cmdline").read_bytes().decode().split("\0")
        name = words[words.index("-m") + 1] if "-m" in words else words[0]
        if (own := _resident(Path(f"/proc/{each}/status").read_text())) is not None:
            found.setdefault(name, []).append(own)
    return found


def _resident(status: str) -> int | None:
    """Returns the resident memory that ``/proc/PID/status`` shows, ``None`` for a process that has ended and whose
    parent has not asked for its exit status yet.
    """
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:")), None)


def started_by(pid: int) -> list[int]:
    """Returns the running child processes of ``pid``, whichever of its threads started them."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += map(int, file.read_text().split())
    return found


async def _watch(server: ServerProcess, seen: Seen, is_begun: threading.Event, is_over: threading.Event) -> None:
    try:
        seen.texts.append(await _stream(server.address, []))
        seen.memory_before = seen.memory_peak = resident_bytes(server.process.pid)
    finally:
        is_begun.set()

    async def stream() -> None:
        while not (is_over.is_set() and seen.gaps_s):
            seen.texts.append(await _stream(server.address, seen.gaps_s))

    probing = seen.probe(server, PROBE_PAUSE_S, is_over.is_set)
    for failed in await asyncio.gather(stream(), probing, return_exceptions=True):
        if isinstance(failed, BaseException):
            seen.wrong.append(f"an honest client met {failed!r}")


async def _stream(address: str, gaps_s: list[float]) -> str:
    client = await RawClient.connect(address)
    try:
        client.send(json.dumps(HONEST | {"stream": True}).encode())
        answered = await client.answer()
    finally:
        client.leave()
    if answered.error is not None:
        raise BrokenAnswerError(answered.error)
    gaps_s += [later - earlier for earlier, later in pairwise(answered.arrivals_s[:-1])]
    return answered.text
