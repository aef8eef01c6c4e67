"""The public face of a loaded model: ``generate``, ``stream``, ``chat``."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from fastgen.compile.host import device as devices
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.models.causal_lm import CausalLM
from fastgen.models.spec import ModelSpec
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.recording_file import write_recording
from fastgen.runtime.flight.why import why
from fastgen.runtime.flight.why_text import as_text
from fastgen.runtime.interrupts import interrupt_deferred
from fastgen.runtime.memory.ledger import Ledger
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.progress import progress_bar
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.prompts import Conversation, Prompt, as_conversations, as_prompts, encode_each, name_prompt

_NAP_S = 0.005  # longest sleep while a policy waits for more requests
_PROGRESS_FROM = 8  # prompts; fewer are done before a bar is of use


class LLM:
    """A loaded model, from :func:`fastgen.load`. It is a context manager, and may be used from several threads.

    ``spec`` is the resolved model, ``config`` the sizes of the engine, ``tokenizer`` that of the checkpoint (``None``
    if it has none), ``ledger`` the memory that the engine takes, row by row, ``name`` the model's name or directory.
    """

    def __init__(
        self, engine: Engine, codec: TextCodec, *, spec: ModelSpec, config: EngineConfig, ledger: Ledger, name: str
    ):
        self.spec, self.config, self.ledger, self.name = spec, config, ledger, name
        self._engine: Engine | None = engine
        self._codec = codec
        self._lock = threading.Lock()
        self._streams: list[tuple[weakref.ref[Stream], Generation]] = []

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"max_model_len={self.config.max_model_len}"
        return f"<fastgen.LLM {self.name}: {self.spec.architecture}, {state}>"

    @property
    def tokenizer(self) -> Any:
        return self._codec.tokenizer

    def check_can_chat(self) -> None:
        """Raises ``InvalidArgumentError`` if the model lacks the tokenizer or chat template that :meth:`chat` needs."""
        self._codec.check_can_chat()

    @property
    def model(self) -> CausalLM:
        """Returns the modules that the engine runs, with their weights. Do not call them while the engine runs."""
        with self._engine_lock() as engine:
            return engine.runner.model

    @overload
    def generate(self, prompts: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answers one prompt, or several at once.

        A prompt is a string or a list of token ids. One prompt gives a :class:`GenerationOutput`, a list of prompts a
        list in the same order. ``fields`` are those of :class:`SamplingParams`; they replace the model's defaults. Or
        pass ``sampling``: one for all prompts, or a list of one for each. All is checked before anything runs. Ctrl-C
        cancels these requests and leaves the engine usable.
        """
        items, single = as_prompts(prompts)
        outputs = self._run(encode_each(self._codec.encode, items), self._sampling(sampling, fields, len(items)))
        return outputs[0] if single else outputs

    @overload
    def chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[GenerationOutput]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answers one conversation, or several at once, rendered by the checkpoint's own chat template.

        A conversation is a list of ``{"role": …, "content": …}``. See :meth:`generate` for the rest.
        """
        items, single = as_conversations(messages)
        outputs = self._run(encode_each(self._codec.encode_chat, items), self._sampling(sampling, fields, len(items)))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answers one prompt piece by piece: returns an iterator of :class:`GenerationChunk`.

        The request is queued at once, and runs while its chunks are read or another request of this ``LLM`` runs.
        Closing or dropping the stream cancels the request and frees its blocks.
        """
        items, single = as_prompts(prompt)
        if not single:
            raise InvalidArgumentError(
                "stream takes one prompt: a string or a list of token ids; use generate for several"
            )
        return self._stream(self._codec.encode(items[0]), sampling, fields)

    def stream_chat(self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answers one conversation piece by piece; see :meth:`chat` and :meth:`stream`."""
        items, single = as_conversations(messages)
        if not single:
            raise InvalidArgumentError("stream_chat takes one conversation: a list of {'role': …, 'content': …}")
        return self._stream(self._codec.encode_chat(items[0]), sampling, fields)

    def metrics(self) -> Metrics:
        """Returns the counts of the engine since it was loaded."""
        with self._engine_lock() as engine:
            return engine.metrics.snapshot()

    def recording(self) -> Recording:
        """Returns the last steps of the engine and their requests; it holds no text. The engine waits meanwhile."""
        with self._engine_lock() as engine:
            return engine.recorder.recording(self.name)

    def save_recording(self, path: str | Path) -> None:
        """Writes :meth:`recording` to a file, for ``fastgen why``, ``fastgen replay`` and ``fastgen timeline``."""
        write_recording(self.recording(), path)

    def why(self, request: GenerationOutput | int | str) -> str:
        """Explains in sentences where the time of a request went.

        The request is an output, or a ``request_id``; ``"3.1"`` is the second completion of request 3.
        """
        if isinstance(request, GenerationOutput):
            request = f"{request.request_id}.{request.index}"
        return as_text(why(self.recording(), str(request)))

    def release_engine(self) -> Engine:
        """Returns the engine to a caller that will run its steps. This ``LLM`` is closed then, and frees nothing."""
        with self._engine_lock() as engine:
            self._engine = None
            return engine

    def close(self) -> None:
        """Cancels all requests and frees the weights and the KV cache. Closing twice does nothing."""
        with self._lock, interrupt_deferred():
            if self._engine is not None:
                self._engine.cancel_all()
                self._engine.close()
                self._engine = None
        devices.return_freed_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sampling(
        self,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        fields: Mapping[str, Any],
        num_prompts: int,
    ) -> list[SamplingParams]:
        """Returns the sampling of each prompt."""
        if sampling is not None and fields:
            raise InvalidArgumentError(f"give sampling=, or the fields {', '.join(fields)}, not both")
        if sampling is None:
            sampling = SamplingParams.from_fields(self._codec.default_sampling, **fields)
        if isinstance(sampling, SamplingParams):
            return [sampling] * num_prompts
        given = list(sampling) if isinstance(sampling, Sequence) and not isinstance(sampling, str) else [sampling]
        if not all(isinstance(each, SamplingParams) for each in given):
            raise InvalidArgumentError("sampling must be a SamplingParams, or a list of one for each prompt")
        if len(given) != num_prompts:
            raise InvalidArgumentError(
                f"{num_prompts} prompts, but {len(given)} SamplingParams; give one for each prompt"
            )
        return given

    def _run(self, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[GenerationOutput]:
        self._check_all(prompts, samplings)
        generations: list[Generation] = []
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                with self._engine_lock() as engine:
                    generations.append(engine.submit(prompt, sampling))
            num_finished = 0  # of the oldest; requests are served in order, so this is nearly all of them
            bar = progress_bar("prompts", enabled=len(prompts) >= _PROGRESS_FROM)
            with bar as progress, interrupt_deferred() as deferral:  # once for all steps: changing handlers takes time
                while num_finished < len(generations):
                    self._step()
                    deferral.raise_received()
                    while num_finished < len(generations) and generations[num_finished].finished:
                        num_finished += 1
                    progress(num_finished, len(generations))
        finally:
            self._cancel(*generations)
        return [generation.output() for generation in generations]

    def _check_all(self, prompts: list[list[int]], samplings: list[SamplingParams]) -> None:
        with self._engine_lock() as engine:
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
                try:
                    engine.check(prompt, sampling)
                except InvalidArgumentError as error:
                    name_prompt(error, index, len(prompts))
                    raise

    def _stream(self, prompt: list[int], sampling: SamplingParams | None, fields: Mapping[str, Any]) -> Stream:
        (one,) = self._sampling(sampling, fields, 1)
        with self._engine_lock() as engine:
            stream = Stream(self, engine.submit(prompt, one))
            self._streams.append((weakref.ref(stream), stream._generation))
        return stream

    def _next_chunks(self, generation: Generation) -> list[GenerationChunk]:
        """Runs steps until the stream has new chunks, and returns them; none where the stream has ended."""
        while True:
            with self._lock, interrupt_deferred():
                chunks = generation.take_chunks()
                if chunks or generation.finished:
                    return chunks
            self._step()

    @contextmanager
    def _engine_lock(self) -> Iterator[Engine]:
        """Yields the engine for a block that neither another thread nor Ctrl-C interrupts."""
        with self._lock, interrupt_deferred():
            yield self._open_engine()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise FastgenError("this LLM is closed; load the model again")
        if self._streams:
            self._cancel_abandoned(self._engine)
        return self._engine

    def _step(self) -> None:
        with self._lock, interrupt_deferred():
            engine = self._open_engine()
            engine.step()
            idle_s = engine.idle_s
        if idle_s:
            time.sleep(min(idle_s, _NAP_S))

    def _cancel(self, *generations: Generation) -> None:
        with self._lock, interrupt_deferred():
            if self._engine is not None:
                for generation in generations:
                    self._engine.cancel(generation)

    def _cancel_abandoned(self, engine: Engine) -> None:
        """Cancels the requests whose streams were dropped."""
        open_streams = []
        for stream, generation in self._streams:
            if stream() is None:
                engine.cancel(generation)
            elif not generation.finished:
                open_streams.append((stream, generation))
        self._streams = open_streams

    def _drop(self, generation: Generation) -> None:
        """Cancels the request of a stream that is being collected, perhaps in the middle of a step. Where the engine is
        busy, the next call finds the stream gone."""
        if self._lock.acquire(blocking=False):
            try:
                with interrupt_deferred():
                    if self._engine is not None:
                        self._engine.cancel(generation)
            finally:
                self._lock.release()


class Stream(Iterator[GenerationChunk]):
    """The chunks of one request. After the last one, :attr:`output` is the whole answer."""

    def __init__(self, llm: LLM, generation: Generation):
        self._llm, self._generation = llm, generation
        self._ready: list[GenerationChunk] = []

    def __next__(self) -> GenerationChunk:
        if not self._ready:
            self._ready = self._llm._next_chunks(self._generation)[::-1]
        if not self._ready:
            raise StopIteration
        return self._ready.pop()

    @property
    def output(self) -> GenerationOutput:
        """Returns the whole answer, after the stream has ended or was closed."""
        with self._llm._lock:  # another thread may be in the step that ends it
            if not self._generation.finished:
                raise FastgenError(
                    "the stream has not ended; take its chunks, or close it, before asking for the output"
                )
            return self._generation.output()

    def close(self) -> None:
        """Cancels the request if it still runs, which frees its blocks at once. Unread chunks are dropped."""
        self._llm._cancel(self._generation)
        self._generation.take_chunks()
        self._ready = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._llm._drop(self._generation)
