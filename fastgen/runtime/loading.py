"""From a model's name to an engine that runs it: :func:`load`."""

from __future__ import annotations

from fastgen.arguments import takes
from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.host import device as devices
from fastgen.models.measure import ModelBuild
from fastgen.options import LoadOptions
from fastgen.runtime.assembly import build_engine
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.model_source import ModelSource
from fastgen.runtime.scheduling.policies import choose_policy
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS
from fastgen.runtime.targets import bundle_flags, parse_quantize, sealed_loader, sealed_target
from fastgen.runtime.text.codec import TextCodec


@takes(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Loads a model and everything it takes to run it.

    Raises a :class:`fastgen.errors.FastgenError` that says what is wrong, where, and what to do.
    """
    policy = choose_policy(options.policy, options.itl_target_ms)
    device = devices.current(options.device)
    source = ModelSource.open(options)
    name, sealed_arch = sealed_target(options, source.directory, device)
    facts = target_facts(
        name,
        device,
        num_threads=options.num_threads,
        sealed=options.sealed is not False,
        sealed_arch=sealed_arch,
    )
    described = ModelBuild(source.spec, source.dtype, facts, parse_quantize(options.quantize, facts.name))
    memory = MemoryModel(described, device)
    config = resolve_engine_config(memory, options)
    policy.check(config.max_num_seqs)
    codec = TextCodec.from_checkpoint(source.directory, source.checkpoint.config)
    about = bundle_flags(options, source.dtype, block_size=config.block_size, max_num_seqs=config.max_num_seqs)
    bundle = sealed_loader(options, source.directory, device, about)
    backend = choose_backend(
        name,
        device,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_prompt_rows=PROMPT_LOGITS_ROWS,
        num_threads=options.num_threads,
        sealed=bundle,
    )
    ledger = memory.ledger(config)
    with devices.being_current(device.torch_device):
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
        )
    return LLM(engine, codec, spec=source.spec, config=config, ledger=ledger, name=str(options.model))
