"""The engine's process. It takes requests and returns tokens, and knows nothing of HTTP or text.

One thread does all the work: between two steps it takes the messages that have arrived and reports the last step's
results. So a step never waits, and a cancelled request is gone before the next step. It is run as ``python -m
fastgen.serving.engine.process ADDRESS PARENT``, with the arguments of ``fastgen.load`` as JSON on standard input. It
ends when the process ``PARENT`` does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import zmq

from fastgen.compile.host.parent import end_with
from fastgen.errors import FastgenError, InvalidArgumentError, RankError
from fastgen.models.checkpoint import hub
from fastgen.runtime.answers.generation import Completion, Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.llm import LLM
from fastgen.runtime.loading import load
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import make_policy
from fastgen.runtime.step.faults import cause_of
from fastgen.serving.engine.connections import Connection, Connections
from fastgen.serving.engine.formats import FormatThread, end_large_formats, with_time_left
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    Close,
    End,
    EngineFacts,
    LoadFailed,
    Open,
    Progress,
    Ready,
    Refused,
    Reply,
    SamplingUnpacker,
    Status,
    Stop,
    Submit,
    ToEngine,
    encoder,
)
from fastgen.serving.engine.packed_logprobs import pack
from fastgen.serving.engine.recordings import Recordings
from fastgen.serving.garbage import collect, collected_by_hand
from fastgen.serving.monitoring.live import live_view
from fastgen.serving.monitoring.log import set_up_logging_of_engine
from fastgen.serving.monitoring.log_file import move_output_to_log
from fastgen.serving.process_end import end_process

# The longest time between two status reports, and the longest sleep of an idle engine.
STATUS_S = 0.25
# Steps shorter than this are not reported one by one, because a report would cost as much as a step. The later tokens
# of a stream may wait this long, and for the end of a step. First tokens and ends never wait.
PACE_S = 0.005
# How long requests of a connection are queued before the next step, and those whose formats are compiled: a call may
# have thousands of prompts.
_SUBMITTING_S = 0.003
# The longest sleep of an idle engine while a format is compiled.
_FORMAT_S = 0.002

_log = logging.getLogger(__name__)

# The question for the flight recording, which is answered beside the steps.
RECORDING = "recording"
# The other questions, which an engine answers between two steps, and the functions that answer them.
ANSWERS: dict[str, Callable[[Engine], Any]] = {
    "live": live_view,
    "metrics": lambda engine: engine.metrics.snapshot(),
}


class _Open:
    """A request that has not ended, and how much of it was reported."""

    __slots__ = ("connection", "generation", "is_plain", "is_stream", "num_reported", "number", "sampling", "token_ids")

    def __init__(
        self, connection: Connection, number: int, generation: Generation, sampling: SamplingParams, *, is_stream: bool
    ):
        self.connection, self.number, self.generation, self.is_stream = connection, number, generation, is_stream
        # As they were sent; the engine adds a seed to its own. Held so that equal ones are one object.
        self.sampling = sampling
        # Whether there is nothing but tokens to report until it ends.
        self.is_plain = sampling.n == 1 and sampling.logprobs is None and sampling.prompt_logprobs is None
        # Reported tokens of each completion; ``None`` once its end was reported.
        self.num_reported: list[int | None] = [0] * sampling.n
        # The tokens of the first completion.
        self.token_ids: list[int] | None = None

    def report_tokens(self) -> None:
        """Adds the unreported tokens of a plain request to the next report."""
        if self.token_ids is None:
            self.token_ids = self.generation.completions[0].token_ids
        start = self.num_reported[0]
        assert start is not None
        if start < len(self.token_ids):
            tokens = self.connection.tokens
            for token_id in self.token_ids[start:]:
                tokens += (self.number, token_id)
            self.num_reported[0] = len(self.token_ids)

    def report(self, now_s: float) -> int:
        """Adds the unreported progress to the next report. ``now_s`` is a time of the engine's clock. Returns how many
        completions have ended by themselves.
        """
        num_answered = 0
        for index, completion in enumerate(self.generation.completions):
            start, has_ended = self.num_reported[index], completion.finish_reason is not None
            if start is None or not (has_ended or (self.is_stream and start < len(completion.token_ids))):
                continue
            logprobs = None if self.sampling.logprobs is None else pack(completion.take_logprobs())
            end = self._end(completion, now_s) if has_ended else None
            prompt_logprobs = None
            if index == start == 0 and self.generation.prompt_logprobs is not None:
                prompt_logprobs = pack(self.generation.prompt_logprobs)
            progress = Progress(self.number, index, completion.token_ids[start:], logprobs, end, prompt_logprobs)
            self.connection.progress.append(progress)
            self.num_reported[index] = None if has_ended else len(completion.token_ids)
            num_answered += completion.finish_reason in ("stop", "length")
        return num_answered

    def _end(self, completion: Completion, now_s: float) -> End:
        assert completion.finish_reason is not None
        times_s = completion.token_times_s
        return End(
            completion.finish_reason,
            completion.error,
            completion.score,
            self.generation.metrics_of(completion),
            now_s - times_s[0] if times_s else None,
        )


class EngineLoop:
    """Runs ``engine`` for the process at the other end of ``socket``, and for servers that it lets in, until that
    process stops it or ``is_orphan()`` is true. ``model`` is its name in recordings. Raises :class:`RankError` when one
    of the model's ranks is lost.
    """

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], *, is_orphan: Callable[[], bool], model: str = "model"
    ):
        self._engine, self._is_orphan = engine, is_orphan
        self._connections = Connections(socket)
        self._recordings = Recordings(engine.recorder, model)
        self._open: dict[int, _Open] = {}
        self._by_request_id: dict[int, _Open] = {}
        # Open streams, by the engine's request id.
        self._streams: dict[int, _Open] = {}
        # Open requests without a token, by the engine's request id.
        self._without_token: dict[int, _Open] = {}
        self._ended: list[Generation] = []
        engine.answers.on_end = self._ended.append
        engine.answers.gives_text = False  # the server decodes tokens, so that no step waits for it
        self._formats = FormatThread(engine.grammars)
        self._samplings = SamplingUnpacker()
        self._num_steps, self._num_answered = 0, 0
        self._reported_s, self._streamed_s, self._is_stopped = 0.0, 0.0, False

    def run(self) -> None:
        """Repeats until stopped: receive messages, run a step, report, collect garbage."""
        while not self._is_stopped and not self._is_orphan():
            self._receive()
            if self._engine.has_work:
                if self._engine.grammars is not None:
                    is_wanted = self._engine.scheduler.are_slots_wanted or self._formats.is_full
                    self._engine.grammars.slots_are_wanted(is_wanted)
                self._engine.step()
                self._num_steps += 1
            self._report()
            collect()
            if self._engine.lost is not None:
                raise RankError(self._engine.lost)
        self._formats.close()
        self._connections.close_all()
        self._engine.close()

    def _receive(self) -> None:
        """Takes all messages that have arrived; of many requests the rest waits for the next step. If the engine has no
        work, waits for one.
        """
        if (not self._engine.has_work or self._engine.idle_s) and not self._num_submits:
            idle_s = min(self._engine.idle_s, STATUS_S) if self._engine.has_work else STATUS_S
            if self._formats.num_waiting:
                idle_s = min(idle_s, _FORMAT_S)
            self._connections.wait(idle_s)
        for connection in self._connections:
            for message in connection.messages():
                self._take(connection, message)
                if self._is_stopped:
                    return
            end_s = time.monotonic() + _SUBMITTING_S
            while connection.submits:
                self._submit(connection, connection.submits.pop(next(iter(connection.submits))))
                if self._engine.has_work and time.monotonic() > end_s:
                    break
        self._formats.proceed(time.monotonic() + _SUBMITTING_S if self._engine.has_work else math.inf)

    @property
    def _num_submits(self) -> int:
        """Returns how many requests have come and are not queued yet."""
        return sum(len(connection.submits) for connection in self._connections)

    def _take(self, connection: Connection, message: ToEngine) -> None:
        match message:
            case Submit():
                connection.submits[message.number] = message
            case Cancel():
                connection.submits.pop(message.number, None)
                self._cancel(message.number)
            case Ask(what=what) if what == RECORDING:
                self._recordings.ask(partial(self._reply, connection, message.number))
            case Ask():
                self._reply(connection, message.number, partial(ANSWERS[message.what], self._engine))
            case Check():
                self._check(connection, message)
            case Open():
                self._reply(connection, message.number, partial(self._connections.open, message.server, message.host))
            case Close():
                self._close(message.server)
            case Stop():
                self._is_stopped = True

    def _close(self, server: str) -> None:
        """Ends the requests of a server, and the connection with it."""
        closed = self._connections.close(server)
        if closed is None:
            return
        closed.submits.clear()
        self._formats.cancel_all(closed)
        for opened in [each for each in self._open.values() if each.connection is closed]:
            self._cancel(opened.number)

    def _submit(self, connection: Connection, message: Submit) -> None:
        """Queues a request when its format is compiled."""
        try:
            sampling = self._samplings.unpack(message.sampling)
        except Exception as error:  # the parameters of one request must not end the others
            self._refuse(connection, message.number, error)
            return
        began_s = time.monotonic()
        until_s = math.inf if sampling.timeout_s is None else began_s + sampling.timeout_s
        then = partial(self._queue, connection, message, sampling, began_s)
        self._formats.when_compiled(message.number, sampling.response_format, then, until_s=until_s, owner=connection)

    def _queue(self, connection: Connection, message: Submit, sampling: SamplingParams, came_s: float) -> None:
        """Queues a request that came at ``came_s`` by ``time.monotonic``."""
        if not connection.is_open:  # it was closed while the format was compiled
            return
        try:
            generation = self._engine.submit(message.prompt_ids, with_time_left(sampling, time.monotonic() - came_s))
        except Exception as error:  # the requests already in the engine are not affected
            self._refuse(connection, message.number, error)
            return
        opened = _Open(connection, message.number, generation, sampling, is_stream=message.is_stream)
        request_id = generation.request.request_id
        self._recordings.submitted(message.number, request_id)
        self._open[message.number] = self._by_request_id[request_id] = self._without_token[request_id] = opened
        if message.is_stream:
            self._streams[request_id] = opened

    def _refuse(self, connection: Connection, number: int, error: Exception) -> None:
        if isinstance(error, InvalidArgumentError):
            connection.refused.append(Refused(number, str(error)))
            return
        _log.error("a request cannot be queued: %s", cause_of(error), exc_info=error)
        why = f"the engine failed to queue this request: {cause_of(error)}"
        connection.refused.append(Refused(number, why, is_failure=True))

    def _reply(self, connection: Connection, number: int, find: Callable[[], Any]) -> None:
        """Answers with the result of ``find``. If it fails, the reply says why; the process continues."""
        body, cause = msgspec.Raw(encoder.encode(None)), None
        try:
            body = msgspec.Raw(encoder.encode(find()))
        except Exception as error:
            cause = cause_of(error)
            _log.error("a query cannot be answered: %s", cause, exc_info=error)
        connection.send(Reply(number, body, cause))

    def _check(self, connection: Connection, asked: Check) -> None:
        """Answers why a request would be refused, when its format is compiled."""

        def refusal() -> str | None:
            try:
                self._engine.check(asked.prompt_ids, self._samplings.unpack(asked.sampling))
            except InvalidArgumentError as error:
                return str(error)
            return None

        response_format = None
        with contextlib.suppress(Exception):  # `refusal` finds the same error
            response_format = self._samplings.unpack(asked.sampling).response_format
        then = partial(self._reply, connection, asked.number, refusal)
        self._formats.check(asked.number, response_format, then, owner=connection)

    def _drop(self, opened: _Open) -> None:
        """Forgets the request: nothing more is to be reported for it."""
        request_id = opened.generation.request.request_id
        del self._open[opened.number], self._by_request_id[request_id]
        self._streams.pop(request_id, None)
        self._without_token.pop(request_id, None)

    def _cancel(self, number: int) -> None:
        self._formats.cancel(number)
        opened = self._open.get(number)
        if opened is not None:
            self._drop(opened)
            self._engine.cancel(opened.generation)

    def _report(self) -> None:
        """Sends the results of the last step, recordings that are complete, and from time to time the engine's load."""
        self._recordings.proceed()
        now_s = time.monotonic()
        begun = self._begun()
        if now_s - self._streamed_s >= PACE_S or self._engine.idle_s:
            running = (sequence.request.request_id for sequence in self._engine.scheduler.running)
            self._report_streams(self._streams[each] for each in running if each in self._streams)
            self._streamed_s = now_s
        else:
            self._report_streams(opened for opened in begun if opened.is_stream)
        for opened in begun:
            if not opened.is_stream:
                opened.connection.started.append(opened.number)
        for generation in dict.fromkeys(self._ended):  # once, however many of its completions have ended
            ended = self._by_request_id.get(generation.request.request_id)
            if ended is not None:
                self._num_answered += ended.report(self._engine.clock())
                if generation.finished:
                    self._drop(ended)
        self._ended.clear()
        status = self._status() if now_s - self._reported_s >= STATUS_S else None
        for connection in self._connections:
            connection.report(status if connection is self._connections.parent else None)
        if status is not None:
            self._reported_s = now_s
            end_large_formats(self._engine, (opened.generation for opened in self._open.values()))

    def _status(self) -> Status:
        scheduler = self._engine.scheduler
        num_open = len(self._open) + self._formats.num_waiting + self._num_submits
        return Status(len(scheduler.running), scheduler.num_waiting, self._num_steps, num_open, self._num_answered)

    def _report_streams(self, streams: Iterable[_Open]) -> None:
        """Adds the progress of these streams, of which one may be given several times, to the next reports."""
        others: dict[int, _Open] = {}
        for opened in streams:
            if opened.is_plain:
                opened.report_tokens()
            else:
                others[opened.number] = opened
        for opened in others.values():
            self._num_answered += opened.report(self._engine.clock())

    def _begun(self) -> list[_Open]:
        """Returns the requests whose first token came with the last step."""
        begun = []
        for sequence in self._engine.scheduler.running if self._without_token else ():
            opened = self._without_token.get(sequence.request.request_id)
            if opened is not None and opened.generation.completions[0].token_ids:
                del self._without_token[sequence.request.request_id]
                begun.append(opened)
        return begun


def main() -> None:
    """Loads the model, reports that it is ready, and runs."""
    parent = int(sys.argv[2])
    end_with(parent)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach this process too, but the server decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logging_of_engine()
    arguments: dict[str, Any] = json.load(sys.stdin)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)  # a step never waits for the server; the queue is bounded by the answers
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(sys.argv[1])
        began_s = time.monotonic()
        try:
            directory = hub.locate(arguments["model"], revision=arguments.get("revision"))
            llm = load(**_with_policy(arguments))
        except (FastgenError, OSError) as error:
            socket.send(encoder.encode(LoadFailed(str(error))))
            sys.exit(1)
        move_output_to_log()
        with collected_by_hand():
            socket.send(encoder.encode(Ready(_facts(llm, str(directory), time.monotonic() - began_s))))
            engine, model = llm.release_engine(), str(arguments["model"])
            try:
                EngineLoop(engine, socket, is_orphan=lambda: os.getppid() != parent, model=model).run()
            except RankError as error:  # the server starts another process, which loads the model again
                _log.critical("the engine ends: %s", error)
                sys.exit(1)
    end_process()


def _with_policy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns ``arguments`` with a policy in place of its JSON form: ``{"name": …}`` with its parameters."""
    policy = arguments.get("policy")
    if not isinstance(policy, dict):
        return arguments
    parameters = {name: value for name, value in policy.items() if name != "name"}
    return arguments | {"policy": make_policy(policy["name"], parameters)}


def _facts(llm: LLM, directory: str, load_s: float) -> EngineFacts:
    return EngineFacts(
        directory=directory,
        architecture=llm.spec.architecture,
        recipe=llm.spec.recipe,
        tokenizer_class=type(llm.tokenizer).__name__ if llm.tokenizer is not None else "",
        vocab_size=llm.spec.vocab_size,
        max_model_len=llm.config.max_model_len,
        max_num_seqs=llm.config.max_num_seqs,
        token_budget=llm.config.token_budget,
        block_size=llm.config.block_size,
        num_blocks=llm.config.num_blocks,
        ledger=str(llm.ledger),
        load_s=load_s,
    )


if __name__ == "__main__":
    main()
