"""Starts the other ranks of a model, sends them plans, watches them, and ends them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from fastgen.compile.host.group_ranks import GroupRanks, MeetingPoint, open_group
from fastgen.compile.host.rank_memory import TIMEOUT_S, RankMemory, SharedRanks
from fastgen.compile.host.ranks import Ranks
from fastgen.errors import RankError
from fastgen.runtime.ranks.setup import RankSetup, memory_for
from fastgen.runtime.step.plans import MAX_PAIRS, Array, Kind, PlanBoard

# The messages between the leader and a rank; each is a tuple that begins with one of these.
LOADED, GO, READY, FAILED = "loaded", "go", "ready", "failed"
# Seconds that a rank gets to end before it is killed.
_END_S = 1.0
# Seconds between two looks at whether ranks with a GPU each still take plans.
_LOOK_S = 1.0


@dataclass
class _Members:
    """The processes of the other ranks. The thread that watches them refers to this and not to the team, so that a team
    can be collected.
    """

    memory: RankMemory
    board: PlanBoard
    # Where ranks meet that do not exchange through memory, and this process's place among them.
    meeting: MeetingPoint | None = None
    group: GroupRanks | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection[Any, Any]] = field(default_factory=list)
    is_closing: bool = False
    lost: str | None = None
    watcher: threading.Thread | None = None
    have_started: threading.Event = field(default_factory=threading.Event)
    # How many ranks have sent each message so far; guarded by `came`, which is notified of a change and of a loss.
    num_sent: Counter[str] = field(default_factory=Counter)
    came: threading.Condition = field(default_factory=threading.Condition)

    @property
    def are_ready(self) -> bool:
        """Returns whether all ranks take plans."""
        return self.num_sent[READY] == self.memory.count - 1

    def lose(self, why: str) -> None:
        """Notes why the ranks cannot continue, unless that is known, and ends every wait of every rank."""
        with self.came:
            if self.lost is None:
                self.lost = f"{why}; the model has to be loaded again" if self.are_ready else why
            self.came.notify_all()
        self.memory.end()
        self.leave_group()

    def leave_group(self) -> None:
        """Ends this process's exchanges with the others, also those that its GPU waits in."""
        with self.came:
            group, self.group = self.group, None
        if group is not None:
            group.abort()

    def end(self) -> None:
        """Ends all processes, by force if they do not end by themselves."""
        self.is_closing = True
        self.memory.end()
        self.have_started.wait()
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
        self.leave_group()
        if self.meeting is not None:
            shutil.rmtree(self.meeting.file.parent, ignore_errors=True)

    def run(self, setups: Sequence[RankSetup]) -> None:
        """Starts a process for each of ``setups``, and watches all until one ends. The processes end with the thread
        that calls this, as they do with this process."""
        try:
            for setup in setups:
                if not self.is_closing:
                    self._start(setup)
        except Exception as error:
            self.lose(f"the other ranks cannot be started: {error}")
        self.have_started.set()
        self._watch()

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "fastgen.runtime.ranks.follower"]
            descriptors = (self.memory.fd, theirs.fileno())
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, descriptors), str(os.getpid())],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the leader, which ends the others
                )
            )
        self.connections.append(ours)
        with contextlib.suppress(OSError):  # it has ended; `_watch` finds out why
            ours.send(setup)

    def _watch(self) -> None:
        """Notes what ranks send, until one ends or fails, and then why."""
        watch = _Watch(self.board)
        while not self.is_closing and self.lost is None:
            for connection in wait(self.connections, None if self.meeting is None else _LOOK_S):
                index = 1 + self.connections.index(connection)  # type: ignore[arg-type]
                why = self._hear(index)
                if why is not None and not self.is_closing:
                    self.lose(f"rank {index} of {self.memory.count} {why}")
            # This process waits for its GPU, which waits for those of others, so it cannot look itself.
            if self.group is not None and self.are_ready and (late := watch.late_rank()) is not None:
                self.lose(f"rank {late} of {self.memory.count} takes no plans")

    def _hear(self, index: int) -> str | None:
        """Notes a message of a rank. Returns why the rank cannot continue, if that is what it says."""
        try:
            kind, *text = self.connections[index - 1].recv()
        except (EOFError, OSError):
            return f"(process {self.processes[index - 1].pid}) {self._ending(index)}"
        if kind == FAILED:
            return f"failed: {text[0]}"
        with self.came:
            self.num_sent[kind] += 1
            self.came.notify_all()
        return None

    def _ending(self, index: int) -> str:
        try:
            status = self.processes[index - 1].wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class _Watch:
    """Watches whether ranks take the plans on ``board``."""

    def __init__(self, board: PlanBoard):
        self._board = board
        self._seen: tuple[int, int] | None = None
        self._since_s = time.monotonic()

    def late_rank(self) -> int | None:
        """Returns a rank for whose next plan :data:`TIMEOUT_S` have passed; ``None`` where there is none."""
        slowest = self._board.slowest()
        if slowest is None or slowest != self._seen:
            self._seen, self._since_s = slowest, time.monotonic()
            return None
        return slowest[0] if time.monotonic() - self._since_s > TIMEOUT_S else None


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
        self.memory, self.board, self.mailbox = memory_for(setups[0])
        self._before_plan: weakref.WeakMethod[Callable[[], None]] | None = None
        self._members = members = _Members(self.memory, self.board, setups[0].meeting)
        self._finalizer = weakref.finalize(self, members.end)
        members.watcher = threading.Thread(target=members.run, args=(setups,), name="fastgen ranks", daemon=True)
        members.watcher.start()

    def connect(self, device: torch.device) -> Ranks:
        """Returns rank 0, which is this process and computes on ``device``, connected to the others. Raises
        :class:`RankError` if they cannot be connected."""
        members = self._members
        if members.meeting is None:
            return SharedRanks(self.memory, 0)
        # A rank that does not come is waited for without end, in a library, so a thread of its own waits.
        opening: Future[GroupRanks] = Future()
        arguments = opening, members.meeting, self.memory.count, device
        threading.Thread(target=_open, args=arguments, name="fastgen ranks meet", daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                members.group = group = opening.result(timeout=0.1)
                self.check()  # a rank that was lost before has ended no exchange of the group
                return group
            self.check()

    def meet(self) -> None:
        """Waits until the weights of each rank are loaded, and has all continue together."""
        self._wait_until(LOADED)
        for connection in self._members.connections:
            with contextlib.suppress(OSError):  # the thread that watches finds out why
                connection.send((GO,))

    def ready(self) -> None:
        """Waits until each rank takes plans. From here on the ranks send nothing unless they fail."""
        self._wait_until(READY)

    def _wait_until(self, message: str) -> None:
        """Waits until each rank has sent ``message``. Raises :class:`RankError` if one ends or fails instead."""
        members = self._members
        with members.came:
            members.came.wait_for(lambda: members.lost or members.num_sent[message] == self.memory.count - 1)
        self.check()

    def before_plans(self, call: Callable[[], None]) -> None:
        """Has the method ``call`` called before each plan, as long as its object is there."""
        self._before_plan = weakref.WeakMethod(call)

    def write_tables(self, places: Array, blocks: Array) -> None:
        """Has the ranks write entries of block tables: flat ``places`` and ``blocks``, i64."""
        for start in range(0, len(places), MAX_PAIRS):
            pairs = slice(start, start + MAX_PAIRS)
            self.plan(Kind.WRITE_TABLES, (), (places[pairs], blocks[pairs]))

    def plan(self, kind: Kind, numbers: Sequence[int], arrays: Sequence[Array] = ()) -> None:
        """Has the ranks carry out a plan. Raises :class:`RankError` if they cannot."""
        self.check()
        if self._before_plan is not None and (call := self._before_plan()) is not None:
            call()
        with self._giving_up():
            self.board.write(kind, numbers, arrays, self._wake)

    def finish_plans(self) -> None:
        """Waits until the ranks have carried out all plans. Raises :class:`RankError` if they cannot."""
        with self._giving_up():
            self.board.finish()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Ends the ranks if the block finds that one is lost."""
        try:
            yield
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
        """Returns why the ranks cannot continue; ``None`` while they can."""
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


def _open(opening: Future[GroupRanks], meeting: MeetingPoint, count: int, device: torch.device) -> None:
    """Puts rank 0 of a group into ``opening``, or why there is none."""
    try:
        opening.set_result(open_group(meeting, 0, count, device))
    except Exception as error:  # libraries raise classes of their own
        opening.set_exception(RankError(f"the ranks cannot be connected by {meeting.library}: {error}"))


@contextlib.contextmanager
def ending_on_error(team: Team | None) -> Iterator[None]:
    """Ends the ranks if the block fails. If it waited for a rank in vain, the error says what that rank said."""
    try:
        yield
    except BaseException as error:
        if team is not None:
            team.close()
            if isinstance(error, RankError) and team.lost is not None:
                raise RankError(team.lost) from error
        raise
