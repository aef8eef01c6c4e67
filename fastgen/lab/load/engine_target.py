"""An engine in this process as a target: its steps run on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.sessions import longest_sequence
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.engine_facts import engine_facts
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.policy import Policy

_Prepared = tuple[Sequence[int], SamplingParams]


@dataclass(slots=True, eq=False)
class _Order:
    """A request on its way through the engine, between the event loop and the engine's thread."""

    prepared: _Prepared
    # Ends with the request's generation, or with the reason why it was refused.
    outcome: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    generation: Generation | None = None

    def answer(self, found: Generation | Exception) -> None:
        """Passes the end of the request to the event loop, if that has not ended before it: after Ctrl-C."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set, found)

    def _set(self, found: Generation | Exception) -> None:
        if self.outcome.done():
            return
        if isinstance(found, Exception):
            self.outcome.set_exception(found)
        else:
            self.outcome.set_result(found)


class EngineTarget:
    """Runs ``engine``, which nothing else may step, until it is closed by :meth:`stop` or the end of a ``with`` block.

    ``about`` says what was loaded, for the header of runs. Times of tokens are the engine's own: when the step that
    made them had ended. Answers are token ids; no text is made.
    """

    def __init__(self, engine: Engine, about: Mapping[str, Any]):
        self.engine = engine
        self._about = dict(about)
        # What the engine's thread shall do between two steps; ``None`` ends it.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Generation, _Order] = {}
        self._failure: Exception | None = None
        engine.answers.gives_text = False
        engine.answers.on_end = self._ended
        self._thread = threading.Thread(target=self._run, name="fastgen-engine", daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any]:
        return {"kind": "engine", **self._about, "engine": asdict(engine_facts(self.engine.scheduler))}

    async def open(self, requests: Sequence[PlannedRequest]) -> None:
        for number, request in enumerate(requests):
            try:
                self.engine.check(*self.prepare(request))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"request {number} of the workload: {error}") from None
        if (longest := longest_sequence(requests)) > self.engine.max_model_len:
            raise InvalidArgumentError(
                f"a conversation of the workload has {longest} tokens at its end, and the engine takes "
                f"{self.engine.max_model_len} (max_model_len)"
            )

    def prepare(self, request: PlannedRequest) -> _Prepared:
        sampling = SamplingParams(max_new_tokens=request.num_new_tokens, ignore_eos=True)
        return request.prompt_ids, sampling

    async def send(self, prepared: _Prepared, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        order = _Order(prepared, loop.create_future(), loop)
        self._calls.put(lambda: self._submit(order))
        try:
            await order.outcome
        except asyncio.CancelledError:
            self._calls.put(lambda: self._cancel(order))
            raise
        finally:
            if order.generation is not None:
                _fill(answer, order.generation)
        assert order.generation is not None
        if (error := order.generation.completions[0].error) is not None:
            raise RequestFailedError(error)

    def ids_of(self, answer: Answer) -> list[int]:
        return answer.token_ids

    async def close(self) -> None:
        """Waits until the engine has ended what was cancelled. It stays ready for the next run."""
        await asyncio.wrap_future(self._on_thread(lambda: None))

    def use_policy(self, policy: Policy) -> None:
        """Replaces the engine's scheduling policy, between two runs. Raises ``InvalidArgumentError`` for a policy that
        this engine cannot have."""
        self._on_thread(lambda: self.engine.use_policy(policy)).result()

    def stop(self) -> None:
        """Cancels all requests and ends the engine's thread. Stopping twice does nothing."""
        self._calls.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _on_thread(self, call: Callable[[], None]) -> Future[None]:
        """Returns a future of ``call``, which the engine's thread makes between two steps, after all calls before."""
        done: Future[None] = Future()

        def make() -> None:
            try:
                call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(make)
        return done

    # On the engine's thread

    def _run(self) -> None:
        while self._take_calls():
            try:
                self.engine.step()
            except Exception as error:  # a bug: a step reports its failures in the answers
                self._failure = FastgenError(f"the engine failed: {error!r}")
                for order in self._running.values():
                    order.answer(self._failure)
                self._running.clear()
        self.engine.cancel_all()

    def _take_calls(self) -> bool:
        """Does what was asked for, and waits for that while the engine has nothing to do. Returns false at the end."""
        while True:
            is_idle = not self.engine.has_work or self._failure is not None
            try:
                call = self._calls.get(timeout=None if is_idle else self.engine.idle_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _submit(self, order: _Order) -> None:
        if self._failure is not None:
            order.answer(self._failure)
            return
        try:
            order.generation = self.engine.submit(*order.prepared)
        except FastgenError as error:
            order.answer(error)
        else:
            self._running[order.generation] = order

    def _cancel(self, order: _Order) -> None:
        if order.generation is not None:
            self.engine.cancel(order.generation)

    def _ended(self, generation: Generation) -> None:
        order = self._running.pop(generation, None)
        if order is not None:
            order.answer(generation)


def _fill(answer: Answer, generation: Generation) -> None:
    """Copies what there is of the answer. The engine's thread may add to it meanwhile, if it has not ended."""
    (completion,) = generation.completions
    has_ended = completion.finish_reason is not None
    answer.token_times, answer.token_ids = list(completion.token_times_s), completion.token_ids
    answer.finish_reason = completion.finish_reason
    if has_ended:
        answer.num_cached_tokens = completion.sequence.num_cached_tokens
        answer.ended = answer.token_times[-1] if answer.token_times else None
