"""From a model's name to an engine that runs it: :func:`load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.host import device as devices
from fastgen.errors import InvalidArgumentError, RecipeError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.checkpoint import Checkpoint, checkpoint_dtype
from fastgen.models.measure import ModelBuild
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry import registry
from fastgen.models.resolve.resolve import resolve
from fastgen.runtime.assembly import build_engine
from fastgen.runtime.config import parse_dtype, resolve_engine_config
from fastgen.runtime.llm import LLM
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.scheduling.policies import Policy, choose_policy
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S, check_aging_s
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS
from fastgen.runtime.targets import bundle_flags, parse_quantize, sealed_loader, sealed_target
from fastgen.runtime.text.codec import TextCodec


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
    ``dtype``: ``"auto"`` for the checkpoint's, or ``"float32"``, ``"bfloat16"``, ``"float16"``. On the ``cpp`` target
    activations are fp32 between matrices; where the CPU multiplies bf16, weights and a KV cache in bf16 have what they
    are multiplied with rounded.
    ``token_budget``: most tokens a step computes. ``max_num_seqs``: most sequences that run at once.
    ``kv_cache_memory``: bytes, or ``"4GiB"``. ``block_size``: tokens per KV block. ``max_model_len``: most tokens of
    prompt and answer together; by default what the model was trained for. ``policy``: what a step is made of:
    ``"splitfuse"``, or to compare with ``"prefill_first"``, ``"orca"``, ``"dynamic"``, ``"static"``, or a
    :class:`fastgen.runtime.scheduling.policies.Policy` such as ``DynamicBatching(batch_size=8, max_delay_s=0.1)``.
    ``itl_target_ms``: the longest gap between two tokens of an answer, in milliseconds, that the prompts of others may
    cause; by default there is no bound. With one, loading writes the whole KV cache once. ``aging_s``: seconds after
    which a request that waits moves up a class (``priority``). ``prefix_caching``: keep blocks of the KV cache that are
    no longer in use until their room is needed, and let prompts that begin with the same tokens use them again; answers
    do not depend on it. ``num_threads``: CPU threads, for the whole
    process; by default one a core. ``target``: whose kernels run: ``"torch"`` for the reference, ``"cpp"`` for kernels
    built for this CPU, ``"triton"`` for those of a GPU (on a CPU interpreted, in a process that was started with
    ``TRITON_INTERPRET=1``), ``"auto"`` for the device's own, on a CPU where there is a compiler. ``quantize``: what
    matrices are kept in, where not in ``dtype``: ``"int8_weight_only"``; with ``target="cpp"`` also ``"int8"`` and
    ``"int4"`` (activations in 8 bits too), with ``"triton"`` or ``"torch"`` also ``"int4_weight_only"`` and
    ``"fp8_weight_only"``, which leave embeddings that are no head, routers, experts and latent attention's maps of
    heads in ``dtype``.
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
        if recipe is None and (note := registry.mismatch_note(found, checkpoint.config, directory)):
            raise RecipeError(error.message + note, file=error.file, line=error.line, node=error.node) from error
        raise
    torch_dtype = checkpoint_dtype(checkpoint.config, checkpoint) if dtype == "auto" else parse_dtype(dtype)
    target, sealed_arch = sealed_target(target, sealed, directory, found_device)
    is_sealed = sealed is not False
    facts = target_facts(target, found_device, num_threads=num_threads, sealed=is_sealed, sealed_arch=sealed_arch)
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
    backend = choose_backend(
        target,
        found_device,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_prompt_rows=PROMPT_LOGITS_ROWS,
        num_threads=num_threads,
        sealed=bundle,
    )
    ledger = memory.ledger(config)
    with devices.being_current(found_device.torch_device):
        engine = build_engine(
            spec,
            config,
            checkpoint,
            codec,
            torch_dtype,
            found_device.torch_device,
            backend,
            weight_format,
            ledger=ledger,
            policy=chosen_policy,
            aging_s=aging_s,
        )
    return LLM(engine, codec, spec=spec, config=config, ledger=ledger, name=str(model))
