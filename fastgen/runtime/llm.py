"""The public face: :func:`load` a model, then ``generate``, ``stream``, ``chat``."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from fastgen.compile import device as devices
from fastgen.errors import FastgenError, InvalidArgumentError, RecipeError
from fastgen.models import hub, registry
from fastgen.models.causal_lm import CausalLM
from fastgen.models.checkpoint import Checkpoint, checkpoint_dtype
from fastgen.models.recipe import Recipe
from fastgen.models.resolve import resolve
from fastgen.models.spec import ModelSpec
from fastgen.models.weight_sizes import ModelBuild
from fastgen.runtime.assembly import build_engine
from fastgen.runtime.config import EngineConfig, parse_dtype, resolve_engine_config
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight import Recording
from fastgen.runtime.flight_file import write_recording
from fastgen.runtime.generation import Generation
from fastgen.runtime.interrupts import interrupt_deferred
from fastgen.runtime.ledger import Ledger, MemoryModel
from fastgen.runtime.metrics import Metrics
from fastgen.runtime.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.policies import Policy, choose_policy
from fastgen.runtime.progress import progress_bar
from fastgen.runtime.prompts import Conversation, Prompt, as_conversations, as_prompts, encode_each, name_prompt
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.runtime.targets import bundle_flags, choose_target, parse_quantize, sealed_loader, target_facts
from fastgen.runtime.text import TextCodec
from fastgen.runtime.waiting_queue import DEFAULT_AGING_S, check_aging_s
from fastgen.runtime.why import why
from fastgen.runtime.why_text import tell

_NAP_S = 0.005  # the longest that a policy which waits for more keeps this thread from seeing what came
_PROGRESS_FROM = 8  # prompts; fewer are done before a bar tells anything


def load(
    model: str | Path,
    *,
    recipe: str | Path | Recipe | None = None,
    device: str = "auto",
    dtype: str = "auto",
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_memory: int | str | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    policy: str | Policy = "splitfuse",
    itl_target_ms: float | None = None,
    aging_s: float = DEFAULT_AGING_S,
    prefix_caching: bool = True,
    num_threads: int | None = None,
    target: str = "auto",
    quantize: str | None = None,
    speculative: str | None = None,
    num_draft_tokens: int | None = None,
    sealed: bool | str | Path = False,
    revision: str | None = None,
    allow_config_keys: Sequence[str] = (),
) -> LLM:
    """Load a model and everything it takes to run it.

    ``model``: a local directory, a built-in name such as ``"tiny-llama"``, or a hub id, fetched at ``revision``.
    ``recipe``: a recipe's name or file in place of the one that claims the checkpoint's architecture; ``"checkpoint"``
    asks for the ``fastgen.yaml`` beside the weights. ``allow_config_keys``: keys of ``config.json`` to accept although
    the recipe says nothing of them; they must be there. ``device``: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    ``dtype``: ``"auto"`` for the checkpoint's, or ``"float32"``, ``"bfloat16"``, ``"float16"``.
    ``token_budget``: most tokens a step computes. ``max_num_seqs``: most sequences that run at once.
    ``kv_cache_memory``: bytes, or ``"4GiB"``. ``block_size``: tokens per KV block. ``max_model_len``: most tokens of
    prompt and answer together; by default what the model was trained for. ``policy``: what a step is made of:
    ``"splitfuse"``, or to compare with ``"prefill_first"``, ``"orca"``, ``"dynamic"``, ``"static"``, or a
    :class:`fastgen.runtime.policies.Policy` such as ``DynamicBatching(batch_size=8, max_delay_s=0.1)``.
    ``itl_target_ms``: the longest gap between two tokens of an answer, in milliseconds, that the prompts of others may
    cause; by default there is no bound. With one, loading writes the whole KV cache once. ``aging_s``: seconds after
    which a request that waits moves up a class (``priority``). ``prefix_caching``: keep blocks of the KV cache that are
    no longer in use until their room is needed, and let prompts that begin with the same tokens use them again; answers
    do not depend on it. ``num_threads``: CPU threads, for the whole
    process; by default one a core. ``target``: whose kernels run: ``"torch"`` for the reference, ``"cpp"`` for kernels
    built for this CPU, ``"triton"`` for those of a GPU (on a CPU interpreted, in a process that was started with
    ``TRITON_INTERPRET=1``), ``"auto"`` for the device's own, on a CPU where there is a compiler. ``quantize``: what
    matrices are kept in, where not in ``dtype``: ``"int8"`` (activations too), ``"int4"`` or ``"int8_weight_only"``;
    needs ``target="cpp"``.
    ``speculative``: ``"ngram"`` drafts what may come next from what stands in prompt and answer already, so that a step
    may give several tokens, the same ones; ``num_draft_tokens`` a sequence at most, 4 by default.
    ``sealed``: compile nothing and run from a bundle that ``fastgen kernels build`` wrote: from that in this directory,
    or for ``True`` from ``kernels-<arch>`` beside the weights.

    Raises a :class:`fastgen.errors.FastgenError` that says what is wrong, where, and what to do.
    """
    if num_threads is not None and (
        not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1
    ):
        raise InvalidArgumentError(f"num_threads={num_threads!r}: expected an integer of at least 1")
    chosen_policy = choose_policy(policy, itl_target_ms)
    check_aging_s(aging_s)
    found_device = devices.current(device)
    directory = hub.locate(model, revision=revision)
    checkpoint = Checkpoint.open(directory)
    found = registry.find_recipe(checkpoint.config, recipe=recipe, checkpoint_dir=directory)
    try:
        spec = resolve(
            found,
            checkpoint.config,
            config_file=str(directory / "config.json"),
            allow_config_keys=allow_config_keys,
        )
    except RecipeError as error:
        if recipe is None and (doubt := registry.doubt(found, checkpoint.config, directory)):
            raise RecipeError(error.message + doubt, file=error.file, line=error.line, node=error.node) from error
        raise
    torch_dtype = checkpoint_dtype(checkpoint.config, checkpoint) if dtype == "auto" else parse_dtype(dtype)
    facts = target_facts(target, found_device, num_threads=num_threads, sealed=sealed is not False)
    weight_format = parse_quantize(quantize, facts.name)
    memory = MemoryModel(ModelBuild(spec, torch_dtype, facts, weight_format), found_device)
    config = resolve_engine_config(
        memory,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        speculative=speculative,
        num_draft_tokens=num_draft_tokens,
    )
    chosen_policy.check(config.max_num_seqs)
    codec = TextCodec.from_checkpoint(directory, checkpoint.config)
    about = bundle_flags(
        model,
        torch_dtype,
        config.block_size,
        recipe=recipe,
        quantize=quantize,
        max_num_seqs=config.max_num_seqs,
        revision=revision,
        allow_config_keys=allow_config_keys,
    )
    bundle = sealed_loader(sealed, directory, found_device, about)
    kernels = choose_target(target, found_device, config, num_threads=num_threads, sealed=bundle)
    ledger = memory.ledger(config)
    engine = build_engine(
        spec,
        config,
        checkpoint,
        codec,
        torch_dtype,
        found_device.torch_device,
        kernels,
        weight_format,
        ledger=ledger,
        policy=chosen_policy,
        aging_s=aging_s,
    )
    return LLM(engine, codec, spec=spec, config=config, ledger=ledger, name=str(model))


class LLM:
    """A loaded model. Made by :func:`load`; a context manager; may be used from several threads.

    ``spec`` is the resolved model, ``config`` the engine's sizes, ``tokenizer`` the checkpoint's (``None`` if it has
    none), ``ledger`` the memory that all of it takes, row by row, ``name`` what was loaded.
    """

    def __init__(
        self, engine: Engine, codec: TextCodec, *, spec: ModelSpec, config: EngineConfig, ledger: Ledger, name: str
    ):
        self.spec, self.config, self.ledger, self.name = spec, config, ledger, name
        self._engine: Engine | None = engine
        self._codec = codec
        self._lock = threading.Lock()
        self._streams: list[tuple[weakref.ref[Stream], Generation]] = []

    @property
    def tokenizer(self) -> Any:
        return self._codec.tokenizer

    @property
    def model(self) -> CausalLM:
        """The modules that the engine runs, their weights in place: to be looked at, not to be called beside it."""
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
        """Answer one prompt, or several at once.

        A prompt is a string or a list of token ids. One gives a :class:`GenerationOutput`, a list of them a list in the
        same order. ``fields`` are those of :class:`SamplingParams`, over the model's defaults; or give ``sampling``
        whole, one for all prompts or a list of one each. Everything is checked before anything runs. Ctrl-C cancels
        these requests and leaves the engine usable.
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
        """Answer one conversation, or several at once, rendered by the checkpoint's own chat template.

        A conversation is a list of ``{"role": …, "content": …}``. Otherwise as :meth:`generate`.
        """
        items, single = as_conversations(messages)
        outputs = self._run(encode_each(self._codec.encode_chat, items), self._sampling(sampling, fields, len(items)))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer one prompt piece by piece: an iterator of :class:`GenerationChunk`.

        The request is queued at once and runs while its chunks are asked for (or anything else of this ``LLM`` runs).
        Closing the stream, or dropping it, cancels the request and frees its blocks.
        """
        items, single = as_prompts(prompt)
        if not single:
            raise InvalidArgumentError(
                "stream takes one prompt: a string or a list of token ids; use generate for several"
            )
        return self._stream(self._codec.encode(items[0]), sampling, fields)

    def stream_chat(self, messages: Conversation, sampling: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer one conversation piece by piece; see :meth:`chat` and :meth:`stream`."""
        items, single = as_conversations(messages)
        if not single:
            raise InvalidArgumentError("stream_chat takes one conversation: a list of {'role': …, 'content': …}")
        return self._stream(self._codec.encode_chat(items[0]), sampling, fields)

    def metrics(self) -> Metrics:
        """What the engine has counted since it was loaded."""
        with self._engine_lock() as engine:
            return engine.metrics.snapshot()

    def recording(self) -> Recording:
        """The engine's last steps, and what came and ended meanwhile; it holds no text. The engine waits for it."""
        with self._engine_lock() as engine:
            return engine.recorder.recording(self.name)

    def save_recording(self, path: str | Path) -> None:
        """Write :meth:`recording` to a file, for ``fastgen why``, ``fastgen replay`` and ``fastgen timeline``."""
        write_recording(self.recording(), path)

    def why(self, request: GenerationOutput | int | str) -> str:
        """Where the time of a request went, in sentences: of an output, or of a request by its ``request_id``;
        ``"3.1"`` is the second completion of request 3.
        """
        if isinstance(request, GenerationOutput):
            request = f"{request.request_id}.{request.index}"
        return tell(why(self.recording(), str(request)))

    def release_engine(self) -> Engine:
        """Hand the engine to who will run its steps from now on. This ``LLM`` is closed then, and frees nothing."""
        with self._engine_lock() as engine:
            self._engine = None
            return engine

    def close(self) -> None:
        """Cancel what runs and free the weights and the KV cache. Closing twice does nothing."""
        with self._lock, interrupt_deferred():
            if self._engine is not None:
                self._engine.cancel_all()
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
        """One for each prompt."""
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
            with progress_bar("prompts", enabled=len(prompts) >= _PROGRESS_FROM) as progress:
                while num_finished < len(generations):
                    self._step()
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
        """The next chunks of a stream, steps being run until there are some; none where it has ended."""
        while True:
            with self._lock, interrupt_deferred():
                chunks = generation.take_chunks()
                if chunks or generation.finished:
                    return chunks
            self._step()

    @contextmanager
    def _engine_lock(self) -> Iterator[Engine]:
        """The engine, for one act that neither another thread nor Ctrl-C divides."""
        with self._lock, interrupt_deferred():
            if self._engine is None:
                raise FastgenError("this LLM is closed; load the model again")
            self._cancel_abandoned(self._engine)
            yield self._engine

    def _step(self) -> None:
        with self._engine_lock() as engine:
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
        """End the requests whose streams nobody holds any more."""
        open_streams = []
        for stream, generation in self._streams:
            if stream() is None:
                engine.cancel(generation)
            elif not generation.finished:
                open_streams.append((stream, generation))
        self._streams = open_streams

    def _drop(self, generation: Generation) -> None:
        """Cancel the request of a stream that is being collected, perhaps in the middle of a step: where the engine is
        busy, the next act finds the stream gone."""
        if self._lock.acquire(blocking=False):
            try:
                with interrupt_deferred():
                    if self._engine is not None:
                        self._engine.cancel(generation)
            finally:
                self._lock.release()


class Stream(Iterator[GenerationChunk]):
    """The chunks of one request. After the last, :attr:`output` is the whole answer."""

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
        """The whole answer, once the stream has ended or was closed."""
        if not self._generation.finished:
            raise FastgenError("the stream has not ended; take its chunks, or close it, before asking for the output")
        return self._generation.output()

    def close(self) -> None:
        """Cancel what is not finished; its blocks are free at once. Chunks not taken yet are dropped."""
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
