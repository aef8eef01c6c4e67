"""A rank's part of a model: built, loaded, its steps captured. A model that is not shared is its only rank's part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fastgen.compile.backends.backend import Backend
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host.ranks import Ranks
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.causal_lm import CausalLM
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.weights import WeightSlot, load_weights
from fastgen.models.measure import ModelBuild
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step.forward import CapturedForward, Forward, Results, Sample, TapedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.trial_batch import TrialBatch


class ProgressBar(Protocol):
    """Shows how far a part of loading is."""

    def __call__(
        self, title: str, *, unit: Literal["", "B"] = "", enabled: bool = True
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        """Yields ``update(done, total)``; ``unit`` is ``"B"`` for bytes."""


def new_inputs(described: ModelBuild, config: EngineConfig, device: torch.device, backend: Backend) -> InputBatch:
    """Returns the inputs of steps of these sizes."""
    return InputBatch(
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_rows=config.max_rows,
        num_groups=config.num_kv_groups,
        max_blocks=config.max_blocks,
        block_size=config.block_size,
        device=device,
        pads=backend.pads_batches,
        keeps_sampled=described.spec.rank.count == 1 or backend.steps == "captured",
    )


def new_model(described: ModelBuild, config: EngineConfig, device: torch.device, backend: Backend) -> NewModel:
    """Returns the model ``described``, whose kernels are asked for and not built."""
    model, slots = build(
        described.spec,
        dtype=described.dtype,
        device=device,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        backend=backend,
        weight_format=described.weight_format,
    )
    return NewModel(model, slots)


class NewModel(NamedTuple):
    """A model without its weights, and the places of those."""

    model: CausalLM
    slots: list[WeightSlot]


def load_forward(
    new: NewModel,
    inputs: InputBatch,
    described: ModelBuild,
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    backend: Backend,
    *,
    activation_bytes: int,
    sample: Sample | None,
    before_steps: Callable[[], None],
    progress_bar: ProgressBar,
    is_timed: bool,
) -> Forward:
    """Builds kernels, loads weights, takes the KV cache's memory, and captures steps.

    Captured steps end with ``sample``, which only rank 0 has, and then give its tokens to all ranks. ``before_steps``
    is called before the first step runs or is captured. Where a policy looks at the times of steps (``is_timed``), what
    the first step of a kind would have to do is done here.
    """
    spec, dtype = described.spec, described.dtype
    with progress_bar("kernels", enabled=bool(backend.specs())) as kernel_progress:
        backend.build(kernel_progress)
    with progress_bar("weights", unit="B") as progress:
        load_weights(checkpoint, new.slots, ignored=spec.ignored_tensors, progress=progress)
    kv_cache = PagedKVCache(
        kv_groups(spec),
        kv_shapes(spec),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    before_steps()
    sizes = captured_sizes(config.token_budget)
    with torch.inference_mode():
        backend.choose_sums(sizes, spec.hidden_size, device)
    results = Results(spec.hidden_size, spec.vocab_size, backend.activation_dtype(dtype), device)
    ranks = backend.ranks if spec.rank.count > 1 else None
    forward = _forward(
        new.model, kv_cache, inputs, results, config, backend, sample, ranks, activation_bytes, progress_bar
    )
    if is_timed:
        kv_cache.touch()
        if isinstance(forward, TapedForward):
            forward.record_sizes()
    return forward


def _forward(
    model: CausalLM,
    kv_cache: PagedKVCache,
    input_batch: InputBatch,
    results: Results,
    config: EngineConfig,
    backend: Backend,
    sample: Sample | None,
    ranks: Ranks | None,
    activation_bytes: int,
    progress_bar: ProgressBar,
) -> Forward:
    if backend.steps == "called":
        return Forward(model, kv_cache)
    pool = backend.graph_pool(results.device, expected_bytes=activation_bytes)
    sizes, row_sizes = captured_sizes(config.token_budget), captured_sizes(config.max_rows)
    if backend.steps == "taped":
        return TapedForward(model, kv_cache, pool, input_batch.views, results, sizes=sizes, max_rows=config.max_rows)
    choose = sample if ranks is None else partial(_sample_together, sample, ranks, input_batch.sampled_ids)
    assert choose is not None
    forward = CapturedForward(
        model, kv_cache, pool, input_batch.views, results, sizes=sizes, row_sizes=row_sizes, sample=choose
    )
    # A sealed bundle's fence is closed from the start; its loader builds nothing in here either.
    trial = TrialBatch(
        input_batch,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        vocab_size=results.vocab_size,
    )
    with progress_bar("graphs") as progress, torch.inference_mode(), pool.fence.open():
        forward.capture(progress, trial if results.device.type == "cuda" else None)
    pool.fence.close()
    return forward


def _sample_together(sample: Sample | None, ranks: Ranks, sampled_ids: Tensor, logits: Tensor) -> None:
    """Samples by rank 0, and gives the ids last sampled for each slot to all ``ranks``. May be captured."""
    if sample is not None:
        sample(logits)
    library_call(ranks.broadcast, sampled_ids)
