"""Follows one sequence through the grammar of its answer, and computes its masks on other threads.

A mask is computed while the device computes the logits that it is for. A step waits a short time for late masks
(:meth:`Matcher.is_ready`), then leaves their sequences out. Late masks are computed at low priority, so that they take
little time from the kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.mask_threads import (
    FAST_MASK_CPU_S,
    MAX_SLOW_CPU_S,
    MAX_TAKEN_CPU_S,
    MaskThreads,
    TurnThreads,
    lower_priority,
)

MAX_MASK_CPU_S = 0.1
# Masks of one answer that may take longer than ``MAX_MASK_CPU_S``. One more, and the answer fails. The cost of a token
# grows with the square of the parser's branches, which no limit of the library covers.
MAX_SLOW_MASKS = 3
# Processor time after which nothing waits for a mask any more, and its answer fails.
MAX_AWAITED_CPU_S = 0.3
# The beginning of the library's message where the lexer that all answers in a format share has reached a limit.
_LEXER_ERROR = "lexer error"
# The weight of the latest mask in the average time of a format's masks.
_WEIGHT_OF_LATEST = 0.01
# Most masks take less where the lexer has seen all that may come.
_KNOWN_MASK_CPU_S = 0.001
# The library's advice that callers cannot follow, or that misses the usual cause, and better advice.
_ADVICE = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf",
    "try avoiding single-byte/short lexemes": "the format is too ambiguous here, or has a part that never ends",
}


class MaskSource(Protocol):
    """Computes masks of one vocabulary."""

    # Allows every token.
    all_tokens: Mask

    def next_tokens(self, state: Any) -> tuple[Mask, bool]:
        """Returns the mask of the tokens after ``state``, and whether the grammar may end there."""
        ...

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Returns a mask with the bits of ``token_ids`` set."""
        ...


class CompiledFormat:
    """A compiled format: ``start`` is the library's matcher before the first token. It is copied, never advanced.

    All copies share the library's lexer, which grows with the texts that it sees. The library locks it, and a thread
    that waits there keeps Python from running. So ``lock`` is held around every call for a copy.
    """

    def __init__(self, response_format: ResponseFormat, start: Any):
        self.response_format, self.start = response_format, start
        self.lock = threading.Lock()
        # The constraints of requests that have not ended.
        self.users: WeakSet[Constraint] = WeakSet()
        # The answers whose masks are due: computed, or queued for that.
        self.due: set[Matcher] = set()
        self._usual_mask_s = 0.0
        # Processor time of masks for which the lexer had to see something new, so that it grew.
        self.growing_cpu_s = 0.0
        # Whether the lexer has reached a limit, or takes too much memory. Then all answers in this format fail, until
        # it is compiled again.
        self.is_spoiled = False

    def due_s(self, took_s: float) -> float:
        """Returns how long the masks that are due are likely to take, if the latest one ``took_s``. One that takes
        longer than others says little about them.
        """
        if took_s > _KNOWN_MASK_CPU_S:
            self.growing_cpu_s += took_s
        self._usual_mask_s += _WEIGHT_OF_LATEST * (took_s - self._usual_mask_s)
        return len(self.due) * self._usual_mask_s


@dataclass(frozen=True, eq=False)
class Constraint:
    """A request's compiled format. Each sequence of the request has a :class:`Matcher` of it. The format is in use
    while this object is there.
    """

    format: CompiledFormat
    source: MaskSource
    threads: MaskThreads
    # The tokens that end an answer.
    ending: Mask
    min_new_tokens: int

    def __post_init__(self) -> None:
        self.format.users.add(self)

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """The tokens that one sequence may have next. It stays with the sequence, running or not.

    A token that ends the request is allowed only where the grammar may end. Before ``min_new_tokens`` it is allowed
    only if no other token is. Tokens that the tokenizer does not know, and special ones, have no text and are allowed
    only where a grammar names them.
    """

    def __init__(self, constraint: Constraint):
        self._constraint = constraint
        self._state: Any = None
        self._num_tokens = 0
        self._mask: Future[Mask] | None = None
        self._pool: ThreadPoolExecutor | TurnThreads = constraint.threads.threads
        # The thread that computes the mask, its processor clock if the system has one, and the clock's value when it
        # started.
        self._began: tuple[int, int | None, float] | None = None
        self._failure = ""
        self._num_slow = 0
        # Whether the last mask took long.
        self._is_slow = False
        # The newest token, until the parser has it.
        self._untaken: int | None = None
        # Whether the answer is complete, so that nothing can follow.
        self.is_complete = False
        # Whether the present step leaves the sequence out.
        self.is_late = False
        self._is_dropped = False

    def prepare(self) -> None:
        """Starts to compute the mask of the next token on another thread, unless that has started."""
        if self._mask is not None:
            return
        self._began = None
        threads = self._constraint.threads
        self._pool = threads.slow_threads if self._is_slow else threads.threads
        compiled = self._constraint.format
        compiled.due.add(self)
        try:
            if isinstance(self._pool, TurnThreads):
                self._mask = self._pool.submit(compiled, self._compute)
            else:
                self._mask = self._pool.submit(self._compute)
        except RuntimeError as error:  # no thread can start: only this sequence fails
            self.drop()  # it is queued nevertheless
            compiled.due.discard(self)
            self._mask = self._fail(error)

    def drop(self) -> None:
        """Ends the computation of a mask that has not begun: the sequence has ended."""
        self._is_dropped = True
        if self._mask is not None:
            self._cancelled(self._mask)

    def _cancelled(self, mask: Future[Mask]) -> bool:
        """Returns whether the computation of ``mask`` had not begun, and begins no longer."""
        is_cancelled = not mask.done() and mask.cancel()
        if is_cancelled:
            self._constraint.format.due.discard(self)
        return is_cancelled

    def is_ready(self, deadline_s: float) -> bool:
        """Waits for the mask of the next token until ``deadline_s`` of ``time.monotonic``; not at all if the last mask
        took long. Returns whether the mask is there; it is not if the answer turns out to be complete. If it is not,
        :meth:`mask` allows every token until the next call.
        """
        self.prepare()
        assert self._mask is not None
        has_come = self._comes_until(self._mask, 0.0 if self._is_slow else deadline_s)
        if not has_come:
            self._mask = self._overdue(self._mask)
        self.is_late = not has_come or self.is_complete
        return not self.is_late

    def wait(self, timeout_s: float) -> None:
        """Waits for the mask of the next token for at most ``timeout_s`` seconds."""
        self.prepare()
        assert self._mask is not None
        self._comes_until(self._mask, time.monotonic() + timeout_s)

    def mask(self) -> Mask:
        """Returns the mask of the next token. No bit is set if the grammar can neither continue nor end, or on failure;
        see :attr:`error`.
        """
        if self.is_late:
            return self._constraint.source.all_tokens
        while True:
            self.prepare()
            assert self._mask is not None
            if self._comes_until(self._mask, time.monotonic() + MAX_MASK_CPU_S):
                return self._mask.result()
            self._mask = self._overdue(self._mask)

    @staticmethod
    def _comes_until(mask: Future[Mask], deadline_s: float) -> bool:
        try:
            mask.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return False
        return True

    def _overdue(self, mask: Future[Mask]) -> Future[Mask] | None:
        """Returns what to wait for in place of ``mask``, which takes long; ``None`` if it has to start again."""
        threads = self._constraint.threads
        if not isinstance(self._pool, TurnThreads):
            is_waiting = self._cancelled(mask)  # all threads are busy with slow masks
            threads.replace(self._pool)
            if is_waiting:
                return None
            if self._began is not None:
                lower_priority(self._began[0])
        self._is_slow = True
        if self._spent_s() > MAX_AWAITED_CPU_S and not mask.done():
            return self._fail(TimeoutError(f"a token took more than {MAX_AWAITED_CPU_S:g} s of processor time"))
        return mask

    def _spent_s(self) -> float:
        """Returns the processor time of the thread since it started with the mask; 0 if the system does not report
        it.
        """
        if self._began is None:
            return 0.0
        _, clock, began_s = self._began
        if clock is None:
            return 0.0
        try:
            return time.clock_gettime(clock) - began_s
        except OSError:  # the mask is complete, and the thread has just ended
            return 0.0

    @property
    def error(self) -> str:
        """Returns the library's message if it reached a limit, or what else failed; empty otherwise."""
        if self.is_late:
            return ""
        self.mask()  # from here on no other thread uses the state, unless its mask was abandoned
        if self._failure:
            return self._failure
        error = message_of(self._state.get_error())
        if error.startswith(_LEXER_ERROR):
            self._constraint.format.is_spoiled = True
        return error

    def advance(self, token_id: int) -> bool:
        """Takes the next token, one that :meth:`mask` allows and that does not end the request. Returns whether the
        answer is complete, so that nothing can follow. Otherwise starts the next mask.

        If the mask of another answer in this format takes long, the parser gets the token later, and
        :attr:`is_complete` says it then.
        """
        self.mask()
        self._mask, self._untaken = None, token_id
        self._num_tokens += 1
        lock = self._constraint.format.lock
        if self._constraint.threads.acquire(lock):
            try:
                self._take()
            except TimeoutError as error:
                self._mask = self._fail(error)
            finally:
                lock.release()
        if not self.is_complete:
            self.prepare()
        return self.is_complete

    def _take(self) -> None:
        """Feeds the newest token to the parser, if it does not have it yet."""
        if self._untaken is None:
            return
        began_s = time.thread_time()
        is_taken: bool = self._state.consume_token(self._untaken)
        self._untaken = None
        self.is_complete = is_taken and self._state.is_stopped()
        if not self._constraint.threads.may_take(time.thread_time() - began_s) and not self.is_complete:
            raise TimeoutError(
                f"the tokens of answers took more than {MAX_TAKEN_CPU_S:g} s of processor time beside their masks"
            )

    def _compute(self) -> Mask:
        try:
            with self._constraint.format.lock:
                return self._constraint.source.mask_of(()) if self._is_dropped else self._compute_alone()
        finally:
            self._constraint.format.due.discard(self)

    def _compute_alone(self) -> Mask:
        try:
            began_s = time.thread_time()
            clock = None
            if hasattr(time, "pthread_getcpuclockid"):
                clock = time.pthread_getcpuclockid(threading.get_ident())
            self._began = threading.get_native_id(), clock, began_s
            self._take()
            mask = self._constraint.source.mask_of(()) if self.is_complete else self._next_mask()
            took_s = time.thread_time() - began_s
            self._is_slow = took_s > FAST_MASK_CPU_S
            self._num_slow += took_s > MAX_MASK_CPU_S
            if self._num_slow > MAX_SLOW_MASKS:
                raise TimeoutError(
                    f"of {MAX_SLOW_MASKS + 1} tokens each took more than {MAX_MASK_CPU_S:g} s of processor time"
                )
            if not self._constraint.threads.may_be_slow(took_s, self._constraint.format.due_s(took_s)):
                raise TimeoutError(
                    f"slow masks took more than {MAX_SLOW_CPU_S:g} s of processor time while requests waited for a slot"
                )
            return mask
        except BaseException as error:  # a panic of the library is no ``Exception``; interrupts do not reach here
            return self._fail(error).result()

    def _fail(self, error: BaseException) -> Future[Mask]:
        """Notes the failure, and returns a mask that allows no token."""
        self._failure = f"{type(error).__name__}: {error}"
        mask: Future[Mask] = Future()
        mask.set_result(self._constraint.source.mask_of(()))
        return mask

    def _next_mask(self) -> Mask:
        constraint = self._constraint
        if self._state is None:
            self._state = constraint.format.start.deep_copy()
        allowed, may_end = constraint.source.next_tokens(self._state)
        allowed &= ~constraint.ending
        if may_end and (self._num_tokens >= constraint.min_new_tokens or not allowed.any()):
            allowed |= constraint.ending
        return allowed


def message_of(error: str) -> str:
    """Returns the library's message without its note that more could be said and without a trace of its calls, and with
    advice that callers can follow; empty if it only means that no token fits.
    """
    message = error.removesuffix("<non-verbose/>").partition("\n<backtrace>")[0].strip()
    for advice, better in _ADVICE.items():
        message = message.replace(advice, better)
    return "" if message == "NoExtensionBias" else message
