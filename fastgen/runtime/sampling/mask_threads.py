"""The threads that compute the masks of one engine, and the processor time that its answers may take on them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from fastgen.runtime.requests.constraint import Mask

MAX_THREADS = 4
# A step waits for a sequence's next mask only if the last one took at most this much processor time.
FAST_MASK_CPU_S = 0.01
# Processor time for feeding tokens to the parsers of all answers: ``MAX_TAKEN_CPU_S`` at once, and ``MAX_TAKEN_SHARE``
# of the time that passes. The answer whose token exceeds that fails. Tokens of at most ``SLOW_TAKE_CPU_S`` do not
# count; in ordinary grammars all are faster.
MAX_TAKEN_CPU_S = 0.1
MAX_TAKEN_SHARE = 0.1
SLOW_TAKE_CPU_S = 0.005
# Processor time for slow masks while requests wait for a slot, or for others' formats: ``MAX_SLOW_CPU_S`` at once, and
# ``MAX_SLOW_SHARE`` of the time that passes. The answer whose mask exceeds that fails. Masks of one format are computed
# one after the other, so many answers with slow masks would keep their slots for minutes or hours. A mask is slow if it
# takes longer than ``FAST_MASK_CPU_S``, or if all that are due of its format are likely to take longer than
# ``MAX_DUE_CPU_S`` together.
MAX_SLOW_CPU_S = 10.0
MAX_SLOW_SHARE = 0.25
MAX_DUE_CPU_S = 0.5
# Seconds that the engine waits to feed a token to a parser whose lexer computes another mask; and how long it does so
# at once for all answers, and the share of the time that passes.
MAX_TAKE_WAIT_S = 0.002
MAX_TAKE_WAITS_S, MAX_TAKE_WAITS_SHARE = 0.01, 0.1
# By how much threads whose work no step waits for are nicer than the process. Each comes back to Python at the end, and
# nothing else in the process runs while it waits for a processor then. Ten makes that up to 0.1 s beside a busy server,
# and three 0.03.
NICER_BY = 3


def lower_priority(thread_id: int | None = None) -> None:
    """Lowers the priority of a thread, by default the calling one, where the system has one for each."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has ended, or the system forbids it
            priority = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER_BY
            os.setpriority(os.PRIO_PROCESS, thread_id or threading.get_native_id(), priority)


class _Allowance:
    """An amount of time, at most ``most_s``, that a ``share`` of the passing time refills. Threads may share it."""

    def __init__(self, most_s: float, share: float) -> None:
        self._most_s, self._share = most_s, share
        self._lock = threading.Lock()
        self._spent_s = self._at_s = 0.0

    def spend(self, took_s: float) -> bool:
        """Takes ``took_s`` if there is as much. Returns whether there is."""
        with self._lock:
            now_s = time.monotonic()
            passed_s, self._at_s = now_s - self._at_s, now_s
            self._spent_s = max(0.0, self._spent_s - self._share * passed_s)
            if self._spent_s + took_s > self._most_s:
                return False
            self._spent_s += took_s
            return True


class MaskThreads:
    """The threads that compute the masks of one engine, and what its answers have cost it."""

    def __init__(self) -> None:
        self.threads = _new_threads()
        # For sequences that had a mask for which a step did not wait.
        self.slow_threads = TurnThreads()
        # Whether requests wait for what an answer with slow masks keeps for long.
        self.are_slots_wanted = False
        self._taken = _Allowance(MAX_TAKEN_CPU_S, MAX_TAKEN_SHARE)
        self._slow = _Allowance(MAX_SLOW_CPU_S, MAX_SLOW_SHARE)
        self._waits = _Allowance(MAX_TAKE_WAITS_S, MAX_TAKE_WAITS_SHARE)

    def replace(self, busy: ThreadPoolExecutor) -> None:
        """Starts new threads in place of ``busy``, unless that has been done: some of ``busy`` compute what cannot be
        stopped.
        """
        if self.threads is busy:
            self.threads = _new_threads()
            busy.shutdown(wait=False)

    def may_take(self, took_s: float) -> bool:
        """Counts the time of a token that was fed to a parser. Returns whether that is still within the limits."""
        return took_s <= SLOW_TAKE_CPU_S or self._taken.spend(took_s)

    def may_be_slow(self, took_s: float, due_s: float) -> bool:
        """Counts the time of a mask, where all that are due in its format are likely to take ``due_s``. Returns whether
        that is still within the limits.
        """
        is_slow = took_s > FAST_MASK_CPU_S or due_s > MAX_DUE_CPU_S
        return not (is_slow and self.are_slots_wanted) or self._slow.spend(took_s)

    def acquire(self, lock: threading.Lock) -> bool:
        """Acquires the ``lock`` of a format if it is free soon. Returns whether it was."""
        if lock.acquire(timeout=0.0):
            return True
        return self._waits.spend(MAX_TAKE_WAIT_S) and lock.acquire(timeout=MAX_TAKE_WAIT_S)


class TurnThreads:
    """Threads of a low priority that compute masks, of each format one at a time. Formats take turns."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_num_threads(), "fastgen-slow-mask", lower_priority)
        self._lock = threading.Lock()
        # What has not begun of each format, in the order of their turns; and the formats that a thread is at.
        self._queues: dict[Hashable, deque[tuple[Future[Mask], Callable[[], Mask]]]] = {}
        self._under_way: set[Hashable] = set()

    def submit(self, turn_of: Hashable, compute: Callable[[], Mask]) -> Future[Mask]:
        """Returns what ``compute`` will return, called when it is the turn of the format ``turn_of``. Raises
        ``RuntimeError`` if no thread can start."""
        mask: Future[Mask] = Future()
        with self._lock:
            self._queues.setdefault(turn_of, deque()).append((mask, compute))
        self._threads.submit(self._run)
        return mask

    def _run(self) -> None:
        """Computes masks until none is left whose format no other thread is at; that thread goes on with those."""
        while True:
            with self._lock:
                turn_of = next((each for each in self._queues if each not in self._under_way), None)
                if turn_of is None:
                    return
                queue = self._queues.pop(turn_of)
                mask, compute = queue.popleft()
                if queue:
                    self._queues[turn_of] = queue  # behind the others
                self._under_way.add(turn_of)
            try:
                if mask.set_running_or_notify_cancel():
                    mask.set_result(compute())
            except BaseException as error:  # the memory is over, for example
                mask.set_exception(error)
            finally:
                with self._lock:
                    self._under_way.remove(turn_of)


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_threads(), "fastgen-mask")
