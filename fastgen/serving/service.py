"""What the server does, whichever way it is asked: HTTP and gRPC only translate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from fastgen.models.checkpoint.files import read_json_object
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import Answers, Update
from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.messages import EngineFacts
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.grammars.trial import FormatTrials
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.monitoring.watch import Watch
from fastgen.serving.options import Limits
from fastgen.serving.refusals import BadRequestError, UnavailableError
from fastgen.serving.request_limits import check_limits
from fastgen.serving.templates.renderer import TemplateRenderer
from fastgen.version import __version__

State = Literal["starting", "ready", "restarting", "draining", "stopped", "failed"]

ENGINE_TIMEOUT_S = 60.0
_COUNT_S = 2.0


class Service:
    """One model, served. ``arguments`` are those of ``fastgen.load``; ``model_name`` is what clients call it; an engine
    that is silent for ``engine_timeout_s`` seconds is started again.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        model_name: str | None = None,
        limits: Limits | None = None,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
    ):
        self.model_name = str(arguments["model"]) if model_name is None else model_name
        self._watch = Watch(limits or Limits(), lambda: self.state == "ready")
        self.engine = EngineClient(arguments, self._watch, timeout_s=engine_timeout_s)
        self._codec: TextCodec | None = None
        self._templates: TemplateRenderer | None = None
        self._formats: FormatTrials | None = None
        self._is_draining = False

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
        if self._codec is None and self.engine.state == "ready":  # its tokenizer is still being read
            return "starting"
        return self.engine.state

    @property
    def metrics(self) -> ServerMetrics:
        return self._watch.metrics

    def info(self) -> dict[str, Any]:
        """What is served, and its sizes. Raises ``UnavailableError`` while they are not known."""
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
        """Load the model. Raises ``FastgenError`` where that fails."""
        facts = await self.engine.start()
        directory = Path(facts.directory)
        config = read_json_object(directory / "config.json")
        codec = await asyncio.to_thread(TextCodec.from_checkpoint, directory, config)
        if codec.has_chat_template:
            self._templates = TemplateRenderer(codec.tokenizer)
            await asyncio.to_thread(self._templates.processes.start)
            codec.render_chat = self._templates.render
        codec.max_tokens = facts.max_model_len
        if hasattr(codec.tokenizer, "backend_tokenizer"):  # formats need it, and the engine says so
            self._formats = FormatTrials(codec.tokenizer, facts.vocab_size)
        self._codec = codec

    async def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float | None = None,
        spelled: Mapping[int, str] | None = None,
    ) -> Running:
        """Queue a request. Raises :class:`~fastgen.serving.refusals.RefusedError` where it cannot be.

        It came at ``arrived_s`` of ``time.monotonic``, by default now. ``spelled`` are special tokens that have a text
        in the answer.
        """
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        admitted = None
        try:
            self._check_taking()
            check_limits(sampling)
            if reason := await self._format_refusal(sampling):
                raise BadRequestError(reason)
            self._check_taking()
            answers = Answers(prompt_ids, sampling, self.codec, spelled)
            admitted = self._watch.admission.admit(len(prompt_ids), sampling)
            request = self.engine.submit(prompt_ids, sampling, is_stream=is_stream, arrived_s=arrived_s)
        except Exception as error:
            if isinstance(error, UnavailableError):
                self.metrics.refused("unavailable")
            if admitted is not None:
                admitted.ended()
            raise
        self._watch.submitted(request, admitted)
        return Running(self, request, answers)

    def _check_taking(self) -> None:
        if self._is_draining:
            raise UnavailableError("the server is ending and takes no more requests", retry_after_s=5.0)
        self.engine.check_ready()

    async def _format_refusal(self, sampling: SamplingParams) -> str | None:
        """Why the format that an answer must have cannot be compiled, or not soon enough."""
        if sampling.response_format is None or self._formats is None:
            return None
        if self._formats.knows(sampling.response_format):
            return self._formats.refusal(sampling.response_format)
        return await asyncio.to_thread(self._formats.refusal, sampling.response_format)

    async def refusal(self, prompt_ids: list[int], sampling: SamplingParams) -> str | None:
        """Why such a request would be refused; ``None`` where it would not. Nothing is run. Raises ``RefusedError`` as
        :meth:`submit` does where it need not even be asked."""
        check_limits(sampling)
        if reason := await self._format_refusal(sampling):
            return reason
        return await self.engine.refusal(prompt_ids, sampling)

    async def metrics_text(self) -> bytes:
        """All counters, as they are now, in Prometheus' text format; the engine's as of its last word if it has no time
        to answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COUNT_S):
                await self.engine.count()
        return self.metrics.text()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait up to ``timeout_s`` for those there are. Those that are left then fail."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.engine.num_open:
                    await asyncio.sleep(0.02)
        self.engine.fail_all(UnavailableError(f"the server ends, and this was not done after {timeout_s:g} s"))

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine, by force after ``timeout_s``. What is still in it fails."""
        self._is_draining = True
        await self.engine.stop(timeout_s)
        for helper in (self._templates, self._formats):
            if helper is not None:
                helper.processes.close()


class Running:
    """A request that was queued: its updates as they come, or its whole output. Leaving it cancels what is left."""

    def __init__(self, service: Service, request: EngineRequest, answers: Answers):
        self._service, self._request, self._answers = service, request, answers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        """What has come since the last look, all of it at once. Raises ``RefusedError`` where the request fails."""
        while not self._answers.finished:
            updates = [self._answers.add(progress) for progress in await self._request.news()]
            if self._answers.finished:
                self._service.engine.finish(self._request)
            yield updates

    async def output(self) -> GenerationOutput:
        """Wait for all of it."""
        async for _ in self:
            pass
        return self._answers.output(self._request.number)

    @property
    def finished(self) -> bool:
        """Whether all of it has come."""
        return self._answers.finished

    def cancel(self) -> None:
        """End it, if it has not; its blocks are free before the next step."""
        self._service.engine.cancel(self._request)
