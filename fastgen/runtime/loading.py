"""Loads a model by its name, and makes an engine that runs it: :func:`load`."""

from __future__ import annotations

import logging

import torch

from fastgen.arguments import takes
from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.host import device as devices
from fastgen.errors import InvalidArgumentError
from fastgen.models.measure import ModelBuild
from fastgen.models.shard.shard import shard
from fastgen.models.spec import Rank
from fastgen.options import LoadOptions
from fastgen.runtime.arrangement import check_arrangement, device_of_rank, start_team, threads_of_rank
from fastgen.runtime.assembly import build_engine
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.model_source import ModelSource
from fastgen.runtime.ranks.team import ending_on_error
from fastgen.runtime.scheduling.policies import choose_policy
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS
from fastgen.runtime.targets import bundle_flags, parse_quantize, sealed_loader, sealed_target
from fastgen.runtime.text.codec import TextCodec

_log = logging.getLogger(__name__)


@takes(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Loads a model and everything it takes to run it.

    Raises a :class:`fastgen.errors.FastgenError` that says what is wrong, where, and what to do.
    """
    _check_defaults_of_torch()
    policy = choose_policy(options.policy, options.itl_target_ms)
    device = devices.current(options.device)
    check_arrangement(options, device)
    source = ModelSource.open(options)
    name, sealed_arch = sealed_target(options, source.directory, device)
    num_threads = threads_of_rank(options, device)
    facts = target_facts(
        name,
        device,
        num_threads=num_threads,
        dtype=source.dtype,
        sealed=options.sealed is not False,
        sealed_arch=sealed_arch,
        quantize=options.quantize,
        measures=True,
    )
    weight_format = parse_quantize(options.quantize, facts.name)
    spec = shard(source.spec, Rank(0, options.tensor_parallel), weight_format)
    described = ModelBuild(spec, source.dtype, facts, weight_format)
    memory = MemoryModel(described, device_of_rank(device, options))
    config = resolve_engine_config(memory, options)
    policy.check(config.max_num_seqs)
    codec = TextCodec.from_checkpoint(source.directory, source.checkpoint.config)
    _warn_of_unknown_ids(codec, source.spec.vocab_size)
    _warn_of_unfollowed(codec)
    about = bundle_flags(options, source.dtype, block_size=config.block_size, max_num_seqs=config.max_num_seqs)
    bundle = sealed_loader(options, source.directory, device, about)
    backend = choose_backend(
        facts,
        device,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_prompt_rows=PROMPT_LOGITS_ROWS,
        num_threads=num_threads,
        sealed=bundle,
    )
    ledger = memory.ledger(config)
    team = None
    if options.tensor_parallel > 1:
        team = start_team(source, described, config, device, num_threads, ledger, is_timed=policy.observes)
    with devices.being_current(device.torch_device), ending_on_error(team):
        if team is not None:
            backend.ranks = team.connect(device.torch_device)
        engine = build_engine(
            described,
            config,
            source.checkpoint,
            codec,
            device.torch_device,
            backend,
            ledger=ledger,
            policy=policy,
            aging_s=options.aging_s,
            team=team,
        )
    return LLM(engine, codec, spec=source.spec, config=config, ledger=ledger, name=str(options.model))


def _check_defaults_of_torch() -> None:
    """Raises :class:`InvalidArgumentError` where the caller has changed what tensors are by default: fastgen and the
    libraries below it would make them so."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32:
        raise InvalidArgumentError(
            f"torch's default dtype is {dtype}, and has to be torch.float32 while a model is loaded and used: call "
            f"torch.set_default_dtype(torch.float32), and say dtype= to load"
        )
    if device.type != "cpu":
        raise InvalidArgumentError(
            f"torch's default device is {device}, and has to be the CPU while a model is loaded and used: call "
            f"torch.set_default_device(None), or leave `with torch.device(...)`, and say device= to load"
        )


def _warn_of_unfollowed(codec: TextCodec) -> None:
    if codec.not_followed:
        _log.warning(
            "generation_config.json sets %s, by which transformers chooses other tokens; fastgen does not follow that",
            ", ".join(codec.not_followed),
        )


def _warn_of_unknown_ids(codec: TextCodec, vocab_size: int) -> None:
    if num_unknown := codec.num_unknown(vocab_size):
        _log.warning(
            "the tokenizer knows %s of the model's %s token ids; the other %s have no text. This is harmless where "
            "they only pad the vocabulary; otherwise the tokenizer belongs to another model",
            *(f"{number:,}" for number in (vocab_size - num_unknown, vocab_size, num_unknown)),
        )
