"""Admission control. A request beyond the limits, or one that would be served too late, is refused at once with a time
to retry after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from fastgen.runtime.metrics import Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.prediction import EngineSize, Load, Pending, Prediction
from fastgen.serving.admission.request_limits import (
    MAX_MORE_ANSWERS,
    MAX_OPEN_LOGPROBS,
    logprob_bytes,
    num_logprobs,
    num_sequences,
)
from fastgen.serving.engine.messages import EngineFacts
from fastgen.serving.options import Limits
from fastgen.serving.refusals import OverloadedError, Refusal, TooLargeError, UnavailableError

# How long refusals reuse one prediction, because a refusal must be cheap.
_PREDICTION_S = 0.1


class Admitted:
    """An admitted request, until it ends. Later calls do nothing, so that several places may report its end."""

    __slots__ = ("_admission", "_held", "_pending")

    def __init__(self, admission: Admission, pending: Pending, held: _Held):
        self._admission, self._pending = admission, pending
        self._held: _Held | None = held

    def routed(self, replica: str) -> None:
        """Reports that it was sent to ``replica``. It need not be the expected one, and can change after a loss."""
        self._pending = self._admission.routed(self._pending, replica)

    def started(self) -> None:
        """Reports its first token; further calls do nothing."""
        self._admission.started(self._pending)

    def ended(self, num_generated: int = 0, *, is_whole: bool = False) -> None:
        """Reports that it has left the engine. ``is_whole``: it ended by itself, after ``num_generated`` tokens per
        sequence.
        """
        self._admission.ended(self._pending, num_generated, is_whole=is_whole)

    def let_go(self) -> None:
        """Reports that none of its log-probabilities are held any more. They may outlast its end in the engine, where
        a client takes its answer slowly.
        """
        if self._held is not None:
            self._admission.let_go(self._held)
            self._held = None


class _Held(NamedTuple):
    """The most log-probabilities that a request may hold, and the memory that these take."""

    num_logprobs: int
    logprob_bytes: int


class _Opened(NamedTuple):
    """An open request: the load that it is part of, and its answers beyond the first."""

    load: Load
    num_more_answers: int


class Admission:
    """Tracks the load of each replica's engine, and admits or refuses each request. A server without replicas has one
    engine, named ``""``. The log-probabilities of all requests take at most ``max_logprob_bytes`` until they are let
    go, so those of one request must not take more.

    ``on_refused`` is called with the reason for each refusal: ``queued_requests``, ``queued_tokens``,
    ``prompt_tokens``, ``answers``, ``logprobs``, ``ttft_slo`` or ``itl_target``.
    """

    def __init__(
        self,
        limits: Limits,
        on_refused: Callable[[Refusal], None],
        *,
        max_logprob_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits, self.max_logprob_bytes = limits, max_logprob_bytes
        self._on_refused, self._clock = on_refused, clock
        # By replica.
        self._loads: dict[str, Load] = {}
        self._open: dict[Pending, _Opened] = {}
        # The sum over all open requests.
        self._num_more_answers = 0
        # The sums over all requests whose answers are held.
        self._num_logprobs = self._logprob_bytes = 0
        self._last_prediction: tuple[float, Prediction | None] = (-math.inf, None)

    def begin(self, facts: EngineFacts, replica: str = "") -> None:
        """Starts over with a new engine, which has no requests yet."""
        old = self._loads.get(replica)
        for pending in [pending for pending, opened in self._open.items() if opened.load is old]:
            self._close(pending)
        num_kv_tokens = facts.num_blocks * facts.block_size
        self._loads[replica] = Load(EngineSize(facts.token_budget, facts.max_num_seqs, num_kv_tokens))

    def end(self, replica: str = "") -> None:
        """Forgets an engine that has ended. Its requests end too, or are sent to another one."""
        self._loads.pop(replica, None)

    def observe(self, metrics: Metrics, replica: str = "") -> None:
        """Receives the current counters of an engine."""
        if (load := self._loads.get(replica)) is not None:
            load.observe(metrics, self._clock())

    def predict(self, num_prompt_tokens: int, *, num_seqs: int = 1, priority: int = 0) -> Prediction | None:
        """Returns the times that a request would see, or ``None`` while too little has been measured."""
        return self._least_busy().predict(num_prompt_tokens, num_seqs, priority, self._clock())

    def _least_busy(self) -> Load:
        """Returns the load of the engine that the next request is expected to go to."""
        if not self._loads:
            raise UnavailableError("no engine is ready; try again in a moment")
        return min(self._loads.values(), key=lambda load: (load.num_waiting_tokens, load.num_open))

    def admit(self, num_prompt_tokens: int, sampling: SamplingParams) -> Admitted:
        """Admits a request. Raises :class:`TooLargeError` or :class:`OverloadedError`."""
        load, limits = self._least_busy(), self.limits
        num_waiting, num_waiting_tokens = self._waiting()
        if limits.max_prompt_tokens is not None and num_prompt_tokens > limits.max_prompt_tokens:
            self._on_refused("prompt_tokens")
            raise TooLargeError(
                f"the prompt has {num_prompt_tokens} tokens; this server takes {limits.max_prompt_tokens}"
            )
        num_seqs = num_sequences(sampling)
        if num_waiting >= limits.max_queued_requests:
            raise self._full("queued_requests", f"{num_waiting} requests wait for their first token")
        if num_waiting and num_waiting_tokens + num_prompt_tokens > limits.max_queued_tokens:
            raise self._full("queued_tokens", f"{num_waiting_tokens} prompt tokens wait")
        num_more = num_seqs - 1
        if self._num_more_answers + num_more > MAX_MORE_ANSWERS:
            self._on_refused("answers")
            raise OverloadedError(
                f"the running requests have {self._num_more_answers} answers beyond their first and this one "
                f"{num_more}; this server takes at most {MAX_MORE_ANSWERS} at once; try again later, or ask for fewer "
                "completions or beams",
                retry_after_s=1.0,
            )
        found, found_bytes = num_logprobs(num_prompt_tokens, sampling), logprob_bytes(num_prompt_tokens, sampling)
        if self._num_logprobs + found > MAX_OPEN_LOGPROBS or self._logprob_bytes + found_bytes > self.max_logprob_bytes:
            self._on_refused("logprobs")
            raise OverloadedError(
                f"the running requests may hold {self._num_logprobs} log-probabilities in {self._logprob_bytes} bytes "
                f"and this one {found} in {found_bytes}; this server takes at most {MAX_OPEN_LOGPROBS} in "
                f"{self.max_logprob_bytes} bytes at once; try again later, or ask for fewer tokens or alternatives",
                retry_after_s=1.0,
            )
        if limits.ttft_slo_s is not None or limits.itl_target_ms is not None:
            self._check_times(self.predict(num_prompt_tokens, num_seqs=num_seqs, priority=sampling.priority))
        pending = load.submitted(num_prompt_tokens, sampling.max_new_tokens, num_seqs, sampling.priority, self._clock())
        self._open[pending] = _Opened(load, num_more)
        self._num_more_answers += num_more
        self._num_logprobs += found
        self._logprob_bytes += found_bytes
        return Admitted(self, pending, _Held(found, found_bytes))

    def routed(self, pending: Pending, replica: str) -> Pending:
        """See :class:`Admitted`. Returns the pending request that later calls must name."""
        opened, load = self._open.get(pending), self._loads.get(replica)
        if opened is None or load is None or load is opened.load:
            return pending
        del self._open[pending]
        opened.load.ended(pending, 0, is_whole=False, now_s=self._clock())
        moved = load.submitted(
            pending.num_prompt_tokens, pending.num_new_tokens, pending.num_seqs, pending.priority, self._clock()
        )
        self._open[moved] = opened._replace(load=load)
        return moved

    def started(self, pending: Pending) -> None:
        """See :class:`Admitted`."""
        if (opened := self._open.get(pending)) is not None:
            opened.load.started(pending, self._clock())

    def ended(self, pending: Pending, num_generated: int, *, is_whole: bool) -> None:
        """See :class:`Admitted`."""
        if (opened := self._close(pending)) is not None:
            opened.load.ended(pending, num_generated, is_whole=is_whole, now_s=self._clock())

    def _close(self, pending: Pending) -> _Opened | None:
        """Takes a request out of the sum over open requests, and returns it, if it is open."""
        if (opened := self._open.pop(pending, None)) is not None:
            self._num_more_answers -= opened.num_more_answers
        return opened

    def let_go(self, held: _Held) -> None:
        """See :class:`Admitted`."""
        self._num_logprobs -= held.num_logprobs
        self._logprob_bytes -= held.logprob_bytes

    def _waiting(self) -> tuple[int, int]:
        """Returns how many requests wait for their first token, at all engines, and the tokens of their prompts."""
        loads = self._loads.values()
        return sum(load.num_waiting for load in loads), sum(load.num_waiting_tokens for load in loads)

    def _check_times(self, found: Prediction | None) -> None:
        """Refuses a request whose first token would come too late, or that would make the gaps of all requests too
        long.
        """
        if found is None:
            return
        slo_s, target_ms = self.limits.ttft_slo_s, self.limits.itl_target_ms
        if slo_s is not None and found.ttft_s > slo_s:
            self._on_refused("ttft_slo")
            raise OverloadedError(
                f"the first token would come after about {found.ttft_s:.2f} s, and this server refuses what it cannot "
                f"begin to answer within {slo_s:g} s; try again later, or with a shorter prompt",
                retry_after_s=max(1.0, found.ttft_s - slo_s),
                predicted_ttft_s=found.ttft_s,
            )
        if target_ms is not None and 1000 * found.gap_s > target_ms and self._open:
            self._on_refused("itl_target")
            raise OverloadedError(
                f"with this request all answers would get a token every {1000 * found.gap_s:.1f} ms, and this server "
                f"keeps to {target_ms:g} ms; try again later",
                retry_after_s=max(1.0, found.ttft_s),
                predicted_ttft_s=found.ttft_s,
            )

    def _full(self, reason: Literal["queued_requests", "queued_tokens"], what: str) -> OverloadedError:
        self._on_refused(reason)
        limit = getattr(self.limits, f"max_{reason}")
        now_s = self._clock()
        if now_s - self._last_prediction[0] > _PREDICTION_S:
            self._last_prediction = (now_s, self.predict(1))
        found = self._last_prediction[1]
        predicted_s = None if found is None else found.ttft_s
        expected = "" if predicted_s is None else f"a first token would come after about {predicted_s:.2f} s; "
        # A place becomes free when the first waiting request has its first token.
        retry_s = 1.0 if predicted_s is None else max(1.0, predicted_s / max(1, self._waiting()[0]))
        return OverloadedError(
            f"{what}, and this server lets at most {limit} wait; {expected}try again later",
            retry_after_s=retry_s,
            predicted_ttft_s=predicted_s,
        )
