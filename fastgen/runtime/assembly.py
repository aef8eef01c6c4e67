"""Assembles an engine: builds kernels, loads weights, takes memory, captures graphs."""

from __future__ import annotations

import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.host.device import current
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.builder import build, kv_groups, kv_shapes, kv_windows
from fastgen.models.causal_lm import CausalLM
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.weights import load_weights
from fastgen.models.measure import ModelBuild
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.memory.ledger import Ledger
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.progress import progress_bar
from fastgen.runtime.sampling.kept_formats import most_kept_bytes
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.sampling.slot_sampler import SlotSampler, slot_sampler
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.early_start import EarlyStart
from fastgen.runtime.step.forward import CapturedForward, Forward, Results, TapedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.steady_decodes import SteadyDecodes
from fastgen.runtime.step.trial_batch import TrialBatch
from fastgen.runtime.text.codec import TextCodec


def build_engine(
    described: ModelBuild,
    config: EngineConfig,
    checkpoint: Checkpoint,
    codec: TextCodec,
    device: torch.device,
    backend: Backend,
    *,
    ledger: Ledger,
    policy: Policy,
    aging_s: float,
) -> Engine:
    """Builds the engine of the model ``described``, with the weights in ``checkpoint``.

    Its ops run on ``backend``, and it takes the memory in ``ledger``. Progress is shown on a terminal.
    """
    spec, dtype = described.spec, described.dtype
    model, slots = build(
        spec,
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        backend=backend,
        weight_format=described.weight_format,
    )
    input_batch = InputBatch(
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_rows=config.max_rows,
        num_groups=config.num_kv_groups,
        max_blocks=config.max_blocks,
        block_size=config.block_size,
        device=device,
        pads=backend.pads_batches,
    )
    sampler = Sampler(
        codec.eos_token_ids,
        backend.row_sampling(spec.vocab_size, max_rows=config.max_rows),
        slot_sampler(backend, spec.vocab_size, input_batch),
    )
    next_decodes = backend.next_decodes()
    with progress_bar("kernels", enabled=bool(backend.specs())) as kernel_progress:
        backend.build(kernel_progress)
    with progress_bar("weights", unit="B") as progress:
        load_weights(checkpoint, slots, ignored=spec.ignored_tensors, progress=progress)
    kv_cache = PagedKVCache(
        kv_groups(spec),
        kv_shapes(spec),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    results = Results(spec.hidden_size, spec.vocab_size, backend.activation_dtype(dtype), device)
    drafter = _drafter(config, sampler.slots)
    between = ledger.size_bytes("activations")
    forward = _forward(model, kv_cache, input_batch, results, config, backend, sampler.slots, between)
    if policy.observes:  # step times: the first step of a kind must not take longer than the next
        kv_cache.touch()
        if isinstance(forward, TapedForward):
            forward.record_sizes()
    steady = None
    if next_decodes is not None and sampler.kernel is not None and isinstance(forward, TapedForward):
        early = EarlyStart(backend.thread_pool(), config.block_size)
        steady = SteadyDecodes(forward, input_batch, sampler.kernel, next_decodes, sampler.rows, early)
        steady.record(1)
    return Engine(
        ModelRunner(forward, input_batch, sampler, steady),
        Scheduler(
            KVCacheManager(
                config.num_blocks,
                config.block_size,
                kv_windows(spec),
                max_chunk=config.token_budget,
                prefix_caching=config.prefix_caching,
            ),
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            propose_drafts=None if drafter is None else drafter.propose,
            policy=policy,
            aging_s=aging_s,
            kv_reservation=config.kv_reservation,
            max_model_len=config.max_model_len,
        ),
        vocab_size=spec.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=codec.eos_token_ids,
        new_detokenizer=codec.new_detokenizer if codec.has_tokenizer else None,
        grammars=(
            Grammars(
                codec.tokenizer,
                vocab_size=spec.vocab_size,
                eos_token_ids=codec.eos_token_ids,
                max_bytes=most_kept_bytes(current("cpu").memory_bytes),
            )
            if codec.has_tokenizer
            else None
        ),
        drafter=drafter,
        runs_ahead=sampler.slots is not None,
    )


def _drafter(config: EngineConfig, slots: SlotSampler | None) -> NgramDrafter | None:
    if config.num_draft_tokens == 0:
        return None
    if slots is None:
        return NgramDrafter(config.num_draft_tokens)
    return NgramDrafter(config.num_draft_tokens, slots.can_draft)


def _forward(
    model: CausalLM,
    kv_cache: PagedKVCache,
    input_batch: InputBatch,
    results: Results,
    config: EngineConfig,
    backend: Backend,
    slots: SlotSampler | None,
    activation_bytes: int,
) -> Forward:
    if backend.steps == "called":
        return Forward(model, kv_cache)
    pool = backend.graph_pool(results.device, expected_bytes=activation_bytes)
    sizes, row_sizes = captured_sizes(config.token_budget), captured_sizes(config.max_rows)
    if backend.steps == "taped":
        return TapedForward(model, kv_cache, pool, input_batch.views, results, sizes=sizes, max_rows=config.max_rows)
    assert slots is not None
    forward = CapturedForward(
        model, kv_cache, pool, input_batch.views, results, sizes=sizes, row_sizes=row_sizes, sample=slots.launch
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
