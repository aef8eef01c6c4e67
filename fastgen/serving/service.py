"""The server's work, independent of the protocol: HTTP and gRPC only translate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.files import read_json_object
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.tokenizer_checks import check_can_be_served, may_encode_slowly
from fastgen.runtime.text.tokenizer_loading import import_generic_tokenizer
from fastgen.serving.admission.admission import Admitted
from fastgen.serving.admission.request_limits import (
    MANY_LOGPROBS,
    MANY_VALUES,
    check_limits,
    check_num_logprobs,
    num_logprobs,
)
from fastgen.serving.admission.turns import Turns
from fastgen.serving.answers import USUAL_TEXT, Answers, TextRules, Update
from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.engine import ServedEngine
from fastgen.serving.engine.messages import EngineFacts, Progress, RecordingReply
from fastgen.serving.engine.recent_requests import RecentRequests
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.isolated.encoding.encoder import TextEncoder
from fastgen.serving.isolated.grammars.queue import TrialQueue
from fastgen.serving.isolated.grammars.trial import FormatTrials
from fastgen.serving.isolated.templates.renderer import TemplateRenderer
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import Limits
from fastgen.serving.refusals import BadRequestError, OverloadedError, UnavailableError
from fastgen.serving.watch import Watch
from fastgen.version import __version__

State = Literal["starting", "ready", "restarting", "draining", "stopped", "failed"]

ENGINE_TIMEOUT_S = 60.0
_COUNT_S = 2.0
# The most of the event loop's time that the encoding of large answers takes, together with the texts of given ids.
_SHARE_OF_LARGE_ANSWERS = 0.125
# Token ids of which texts are made at once, without calls that have few. A token may have 128 characters.
_MAX_IDS_IN_TEXTS, _FEW_IDS = 2_000_000, 10_000
_TEXTS_RETRY_S = 5.0


class Service:
    """Serves one model.

    ``arguments`` are those of ``fastgen.load``; ``model_name`` is the name that clients use. An engine that is silent
    for ``engine_timeout_s`` seconds is restarted. ``make_engine`` makes the engine; by default it is one
    process of this machine.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        model_name: str | None = None,
        limits: Limits | None = None,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        make_engine: Callable[[EngineWatcher], ServedEngine] | None = None,
    ):
        self.model_name = str(arguments["model"]) if model_name is None else model_name
        self._watch = Watch(limits or Limits(), lambda: self.state == "ready")
        self.engine: ServedEngine = (
            EngineClient(arguments, self._watch, timeout_s=engine_timeout_s)
            if make_engine is None
            else make_engine(self._watch)
        )
        self._model, self._revision = str(arguments["model"]), arguments.get("revision")
        self._codec: TextCodec | None = None
        self._templates: TemplateRenderer | None = None
        self._encoder: TextEncoder | None = None
        self._formats: TrialQueue | None = None
        self._is_draining = False
        # In which large answers are encoded, and texts of given token ids are made.
        self.turns = Turns(1, share=_SHARE_OF_LARGE_ANSWERS)
        # Token ids of which texts are made now, but for few.
        self._num_ids_in_texts = 0
        self.recent = RecentRequests()

    @property
    def codec(self) -> TextCodec:
        if self._codec is None:
            raise UnavailableError("the server is starting; try again in a moment")
        return self._codec

    @property
    def facts(self) -> EngineFacts:
        if self.engine.facts is None:
            raise UnavailableError("the server is starting; try again in a moment")
        return self.engine.facts

    @property
    def state(self) -> State:
        if self._is_draining:
            return "draining"
        if self._codec is None and self.engine.state == "ready":  # the tokenizer is still being loaded
            return "starting"
        return self.engine.state

    @property
    def metrics(self) -> ServerMetrics:
        return self._watch.metrics

    @contextmanager
    def making_text(self, num_ids: int) -> Iterator[None]:
        """Counts ``num_ids`` token ids until the block ends, in which their text is made. Raises ``OverloadedError`` if
        those of all texts under way would take too much memory.
        """
        counted = num_ids if num_ids > _FEW_IDS else 0
        if counted and self._num_ids_in_texts and self._num_ids_in_texts + counted > _MAX_IDS_IN_TEXTS:
            self.metrics.refused("queued_texts")
            raise OverloadedError(
                f"texts of {self._num_ids_in_texts:,} token ids are made now, and this server makes those of at most "
                f"{_MAX_IDS_IN_TEXTS:,} at once; try again later",
                retry_after_s=_TEXTS_RETRY_S,
            )
        self._num_ids_in_texts += counted
        try:
            yield
        finally:
            self._num_ids_in_texts -= counted

    def info(self) -> dict[str, Any]:
        """Returns what is served and its sizes. Raises ``UnavailableError`` while they are not known."""
        facts = self.facts
        return {
            "model": self.model_name,
            "version": __version__,
            "vocab_size": facts.vocab_size,
            "max_model_len": facts.max_model_len,
            "max_num_seqs": facts.max_num_seqs,
            "token_budget": facts.token_budget,
            "state": self.state,
        }

    async def start(self) -> None:
        """Loads the model. Raises ``FastgenError`` if that fails."""
        facts, _ = await asyncio.gather(self.engine.start(), asyncio.to_thread(import_generic_tokenizer))
        directory = Path(facts.directory)
        if not directory.is_dir():  # the engine is on another machine
            directory = await asyncio.to_thread(hub.locate, self._model, revision=self._revision, with_weights=False)
        config = read_json_object(directory / "config.json")
        codec = await asyncio.to_thread(
            TextCodec.from_checkpoint, directory, config, tokenizer_class=facts.tokenizer_class
        )
        check_can_be_served(codec.tokenizer)
        if codec.has_chat_template:
            self._templates = TemplateRenderer(codec.tokenizer)
            await asyncio.to_thread(self._templates.processes.start)
            codec.render_chat = self._templates.render
            self._templates.render.queue.on_full = partial(self.metrics.refused, "queued_texts")
        if may_encode_slowly(codec.tokenizer):
            self._encoder = TextEncoder(codec.tokenizer)
            await asyncio.to_thread(self._encoder.processes.start)
            codec.encode_plain, codec.waits_to_encode = self._encoder.encode, True
            self._encoder.encode.queue.on_full = partial(self.metrics.refused, "queued_texts")
        codec.max_tokens = facts.max_model_len
        if codec.has_tokenizer:  # only formats need it; the engine reports the error
            self._formats = TrialQueue(FormatTrials(codec.tokenizer, facts.vocab_size))
        self._codec = codec

    async def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float | None = None,
        rules: TextRules = USUAL_TEXT,
        request_id: str | None = None,
        session: str | None = None,
    ) -> Running:
        """Queues a request. Raises :class:`~fastgen.serving.refusals.RefusedError` if it is refused.

        ``arrived_s`` is its arrival by ``time.monotonic``, by default now. ``rules`` say how tokens become text.
        ``request_id`` identifies it in the recording. Requests of one ``session`` go to one replica if possible.
        """
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        admitted = None
        try:
            self._check_taking()
            self._check_request(prompt_ids, sampling)
            if reason := await self._format_refusal(sampling):
                raise BadRequestError(reason)
            self._check_taking()
            answers = Answers(prompt_ids, sampling, self.codec, rules)
            admitted = self._watch.admission.admit(len(prompt_ids), sampling)
            comes_in_pieces = is_stream or num_logprobs(len(prompt_ids), sampling) > MANY_LOGPROBS
            request = self.engine.submit(
                prompt_ids, sampling, is_stream=comes_in_pieces, arrived_s=arrived_s, session=session
            )
        except Exception as error:
            if isinstance(error, UnavailableError):
                self.metrics.refused("unavailable")
            if admitted is not None:
                admitted.ended()
                admitted.let_go()
            raise
        if request_id is not None:
            self.recent.add(request_id, request.number)
        self._watch.submitted(request, admitted)
        return Running(self, request, answers, admitted)

    def check_num_requests(self, number: int, param: str) -> None:
        """Raises ``BadRequestError`` if so many requests at once would not be admitted even by an idle server."""
        most = self._watch.admission.limits.max_queued_requests
        if number > most:
            raise BadRequestError(
                f"{param}: {number} prompts are {number} requests, and this server lets at most {most} wait "
                "(--max-queued-requests); send fewer in a call",
                param=param,
            )

    def _check_taking(self) -> None:
        if self._is_draining:
            raise UnavailableError("the server is ending and takes no more requests", retry_after_s=5.0)
        self.engine.check_ready()

    def _check_request(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Raises ``BadRequestError`` if a request is beyond a limit that is known without the engine."""
        number, facts = len(prompt_ids), self.engine.facts
        if facts is not None and number >= facts.max_model_len:
            raise BadRequestError(
                f"the prompt has {number} tokens, max_model_len is {facts.max_model_len}; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        check_limits(sampling)
        check_num_logprobs(number, sampling, self._watch.admission.max_logprob_bytes)

    async def _format_refusal(self, sampling: SamplingParams) -> str | None:
        """Returns why the required answer format cannot be compiled, or not fast enough; ``None`` if it can."""
        if sampling.response_format is None or self._formats is None:
            return None
        try:
            return await self._formats.refusal(sampling.response_format)
        except OverloadedError:
            self.metrics.refused("queued_formats")
            raise

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Returns why such a request would be refused, or ``None``. Nothing is run.

        Raises ``RefusedError``, as :meth:`submit` does, if the engine need not be asked.
        """
        self._check_request(prompt_ids, sampling)
        if reason := await self._format_refusal(sampling):
            return reason
        return await self.engine.refusal(prompt_ids, sampling)

    async def recording(self, replica: str | None = None) -> RecordingReply:
        """Returns the flight recording of a replica's engine, by default of the first. Raises ``RefusedError`` if no
        engine can answer.
        """
        return await self.engine.ask("recording", RecordingReply, replica=replica)

    async def metrics_text(self) -> bytes:
        """Returns all current counters in Prometheus' text format. If the engine is too busy to answer, its last
        reported counters are used.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COUNT_S):
                await self.engine.count()
        self.metrics.num_restarts = self.engine.num_restarts
        return self.metrics.text()

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more requests, and waits up to ``timeout_s`` for the running ones. Those still left then fail."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.engine.num_open:
                    await asyncio.sleep(0.02)
        self.engine.fail_all(UnavailableError(f"the server ends, and this was not done after {timeout_s:g} s"))

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the engine, by force after ``timeout_s``. Its unfinished requests fail."""
        self._is_draining = True
        await self.engine.stop(timeout_s)
        if self._templates is not None:
            self._templates.processes.close()
        if self._encoder is not None:
            self._encoder.processes.close()
        if self._formats is not None:
            self._formats.close()


class Running:
    """A queued request: iterate over its updates, or await its whole output. Leaving the context cancels what
    is left. What it holds counts until then: stay in the context until the answer is encoded, or sent.
    """

    def __init__(self, service: Service, request: EngineRequest, answers: Answers, admitted: Admitted | None = None):
        self._service, self._request, self._answers, self._admitted = service, request, answers, admitted
        # How many tokens and log-probabilities have come.
        self.size = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        """Yields all progress since the last iteration, merged. Raises ``RefusedError`` if the request fails."""
        while not self._answers.finished:
            yield [self._add(part) for progress in await self._request.news() for part in self._answers.parts(progress)]

    async def output(self) -> GenerationOutput:
        """Waits for the whole answer. Until it has ended nothing of it is taken, so that an engine that is lost costs
        none of it: another replica begins again.
        """
        await self._request.ended()
        while not self._answers.finished:
            for number, progress in enumerate(await self._request.news()):
                if number:
                    await asyncio.sleep(0)  # a large answer has many, and other requests are to make progress
                self._add(progress)
        return self._answers.output(self._request.number)

    def _add(self, progress: Progress) -> Update:
        update = self._answers.add(progress)
        self.size += self._answers.num_values(update)
        if self._answers.finished:
            self._service.engine.finish(self._request)
        return update

    @property
    def finished(self) -> bool:
        """Returns whether the whole answer has been received."""
        return self._answers.finished

    @property
    def is_large(self) -> bool:
        """Returns whether so much has come that it must not be encoded in one piece."""
        return self.size > MANY_VALUES

    def cancel(self) -> None:
        """Ends the request if it runs; its blocks are free before the next step."""
        self._service.engine.cancel(self._request)
        if self._admitted is not None:
            self._admitted.let_go()
