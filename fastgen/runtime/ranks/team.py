"""Starts the other ranks of a model, sends them plans, watches them, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from fastgen.compile.host.rank_memory import RankMemory, SharedRanks
from fastgen.errors import RankError
from fastgen.runtime.ranks.setup import RankSetup, memory_for
from fastgen.runtime.step.plans import Array, Kind

# The messages between the leader and a rank; each is a tuple that begins with one of these.
LOADED, GO, READY, FAILED = "loaded", "go", "ready", "failed"
# Seconds that a rank gets to end before it is killed.
_END_S = 1.0


@dataclass
class _Members:
    """The processes of the other ranks. The thread that watches them refers to this and not to the team, so that a team
    can be collected.
    """

    memory: RankMemory
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection[Any, Any]] = field(default_factory=list)
    is_closing: bool = False
    lost: str | None = None
    watcher: threading.Thread | None = None

    def lose(self, why: str) -> None:
        """Notes why the ranks cannot continue, unless that is known, and ends every wait of every rank."""
        if self.lost is None:
            self.lost = f"{why}; the model has to be loaded again"
        self.memory.end()

    def end(self) -> None:
        """Ends all processes, by force if they do not end by themselves."""
        self.is_closing = True
        self.memory.end()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # closed before
                _hang_up(connection)
        deadline_s = time.monotonic() + _END_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # also ends one that is stopped
                process.wait()
        if self.watcher is not None and self.watcher is not threading.current_thread():
            self.watcher.join()
        for connection in self.connections:
            connection.close()

    def watch(self) -> None:
        """Waits until a rank ends or fails, and notes why."""
        for connection in wait(self.connections):
            index = 1 + self.connections.index(connection)  # type: ignore[arg-type]
            why = self._why(index)
            if not self.is_closing:
                self.lose(f"rank {index} of {self.memory.count} {why}")

    def _why(self, index: int) -> str:
        with contextlib.suppress(EOFError, OSError):
            kind, text = self.connections[index - 1].recv()
            assert kind == FAILED
            return f"failed: {text}"
        return f"(process {self.processes[index - 1].pid}) {self._ending(index)}"

    def _ending(self, index: int) -> str:
        try:
            status = self.processes[index - 1].wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _hang_up(connection: Connection[Any, Any]) -> None:
    """Ends a connection for both sides, whatever they wait for."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


class Team:
    """Ranks 1 and up of a model whose rank 0 is this process.

    A wait for a rank ends after :data:`~fastgen.compile.host.rank_memory.TIMEOUT_S`, or as soon as a rank ends. From
    then on :attr:`lost` says why, and every call raises :class:`RankError`. The processes end with this object or this
    process.
    """

    def __init__(self, setups: Sequence[RankSetup]):
        self.memory, self.board = memory_for(setups[0])
        self._members = members = _Members(self.memory)
        self._finalizer = weakref.finalize(self, members.end)
        with ending_on_error(self):
            for setup in setups:
                self._start(setup)

    @property
    def own_ranks(self) -> SharedRanks:
        """Rank 0, which this process is."""
        return SharedRanks(self.memory, 0)

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "fastgen.runtime.ranks.follower"]
            descriptors = (self.memory.fd, theirs.fileno())
            self._members.processes.append(
                subprocess.Popen(
                    [*command, *map(str, descriptors), str(os.getpid())],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the leader, which ends the others
                )
            )
        self._members.connections.append(ours)
        ours.send(setup)

    def meet(self) -> None:
        """Waits until the weights of each rank are loaded, and has all continue together."""
        self._wait_until(LOADED)
        for connection in self._members.connections:
            connection.send((GO,))

    def ready(self) -> None:
        """Waits until each rank takes plans. From here on the ranks are watched, and send nothing unless they fail."""
        self._wait_until(READY)
        self._members.watcher = threading.Thread(target=self._members.watch, name="fastgen ranks", daemon=True)
        self._members.watcher.start()

    def _wait_until(self, message: str) -> None:
        """Waits until each rank has sent ``message``. Raises :class:`RankError` if one ends or fails instead."""
        for index, connection in enumerate(self._members.connections, 1):
            try:
                kind, *text = connection.recv()
            except (EOFError, OSError):
                kind, text = FAILED, ["ended while it was loading"]
            if kind != message:
                self.close()
                raise RankError(f"rank {index} of {self.memory.count}: {text[0]}")

    def plan(self, kind: Kind, numbers: Sequence[int], arrays: Sequence[Array] = ()) -> None:
        """Has the ranks carry out a plan. Raises :class:`RankError` if they cannot."""
        self.check()
        try:
            self.board.write(kind, numbers, arrays, self._wake)
        except RankError as error:
            self.give_up(str(error))
            self.check()

    def check(self) -> None:
        """Raises :class:`RankError` if the ranks cannot continue."""
        if self.lost is None:
            try:
                self.memory.check()
            except RankError as error:
                self.give_up(str(error))
        if self.lost is not None:
            raise RankError(self.lost)

    @property
    def lost(self) -> str | None:
        """Why the ranks cannot continue; ``None`` while they can."""
        return self._members.lost

    def close(self) -> None:
        """Ends the ranks. Closing twice does nothing."""
        self._finalizer()

    def _wake(self, rank: int) -> None:
        with contextlib.suppress(OSError):  # the thread that watches finds out why
            self._members.connections[rank - 1].send_bytes(b"plan")

    def give_up(self, why: str) -> None:
        """Ends the ranks, which cannot continue."""
        self._members.lose(why)
        self._members.end()


@contextlib.contextmanager
def ending_on_error(team: Team | None) -> Iterator[None]:
    """Ends the ranks if the block fails."""
    try:
        yield
    except BaseException:
        if team is not None:
            team.close()
        raise
