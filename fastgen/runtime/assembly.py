"""Assembles an engine: builds kernels, loads weights, takes memory, captures graphs."""

from __future__ import annotations

import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.host.device import current
from fastgen.models.builder import kv_windows
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.measure import ModelBuild
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.memory.ledger import Ledger
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.progress import progress_bar
from fastgen.runtime.ranks.decodes import LedDecodes
from fastgen.runtime.ranks.leading import LeadingForward
from fastgen.runtime.ranks.part import load_forward, new_inputs, new_model
from fastgen.runtime.ranks.team import Team
from fastgen.runtime.sampling.kept_formats import most_in_use, most_kept_bytes
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.sampling.slot_sampler import SlotSampler, slot_sampler
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.early_start import EarlyStart
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.steady_decodes import SteadyDecodes
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
    team: Team | None = None,
) -> Engine:
    """Builds the engine of the model ``described``, with the weights in ``checkpoint``.

    Its ops run on ``backend``, and it takes the memory in ``ledger``. Other ranks of the model are its ``team``.
    """
    spec = described.spec
    new, input_batch = new_model(described, config, device, backend), new_inputs(described, config, device, backend)
    sampler = Sampler(
        codec.eos_token_ids,
        backend.row_sampling(spec.vocab_size, max_rows=config.max_rows),
        slot_sampler(backend, spec.vocab_size, input_batch),
    )
    next_decodes, tell = backend.next_decodes(), None if team is None else backend.tell_tokens()
    drafter = _drafter(config, sampler.slots)
    forward = load_forward(
        new,
        input_batch,
        described,
        config,
        checkpoint,
        device,
        backend,
        activation_bytes=ledger.size_bytes("activations"),
        sample=None if sampler.slots is None else sampler.slots.launch,
        before_steps=_nothing if team is None else team.meet,
        progress_bar=progress_bar,
        is_timed=policy.observes,
    )
    steady = None
    if next_decodes is not None and sampler.kernel is not None and isinstance(forward, TapedForward):
        early = EarlyStart(backend.thread_pool(), config.block_size)
        others = LedDecodes(team, tell) if team is not None and tell is not None else None
        steady = SteadyDecodes(forward, input_batch, sampler.kernel, next_decodes, sampler.rows, early, others)
        steady.record(1)
    if team is not None:
        team.ready()
        forward = LeadingForward(forward, input_batch, team)
    host_bytes = ledger.device_bytes if device.type == "cpu" else current("cpu").memory_bytes // spec.rank.count
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
                max_bytes=most_kept_bytes(host_bytes),
                max_in_use=most_in_use(host_bytes),
            )
            if codec.has_tokenizer
            else None
        ),
        drafter=drafter,
        runs_ahead=sampler.slots is not None,
        ranks=spec.rank.count,
    )


def _nothing() -> None:
    """Does nothing before steps."""


def _drafter(config: EngineConfig, slots: SlotSampler | None) -> NgramDrafter | None:
    if config.num_draft_tokens == 0:
        return None
    if slots is None:
        return NgramDrafter(config.num_draft_tokens)
    return NgramDrafter(config.num_draft_tokens, slots.can_draft)
