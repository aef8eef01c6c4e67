"""``fastgen info``: versions, the device, and a model, without reading its weights."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastgen.cli import options
from fastgen.options import LoadOptions
from fastgen.version import __version__, installed_version

if TYPE_CHECKING:
    from fastgen.compile.host.device import Device
    from fastgen.models.measure import ModelBuild
    from fastgen.models.shard.plan import ShardPlan
    from fastgen.runtime.memory.ledger import Ledger
    from fastgen.runtime.model_source import ModelSource

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_PACKAGES = ("torch", "transformers", "triton")


# The arguments that decide which model it is and how much memory it takes.
_LOAD = options.only(
    options.LOAD_ARGUMENTS,
    *("recipe", "device", "dtype", "target", "quantize", "token_budget", "max_num_seqs", "kv_cache_memory", "memory"),
    *("block_size", "max_model_len", "num_threads", "tensor_parallel", "revision", "allow_config_keys"),
)


@options.with_flags(load=_LOAD)
def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Describe this model too.")] = None,
    *,
    load: options.Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show versions and device, and for MODEL its recipe, its sizes and the memory that an engine would take."""
    facts = {"versions": _versions(), "device": _device_facts(load.get("device", "auto"))}
    ledger: Ledger | None = None
    if model is not None:
        from fastgen.runtime.model_source import ModelSource

        load_options = LoadOptions(model, **load)
        source = ModelSource.open(load_options)
        facts["model"] = _model_facts(source)
        build = _build(load_options, source)
        if load_options.tensor_parallel > 1:
            plan = _plan(load_options, build)
            facts["tensor_parallel"], build = _plan_facts(plan), replace(build, spec=plan.ranks[0])
        facts["engine"], ledger = _engine(load_options, build)
    if as_json:
        print(json.dumps(facts if ledger is None else facts | {"ledger": ledger.as_json()}))
        return
    for title, section in facts.items():
        print(title)
        for name, value in section.items():
            if value not in (None, []):
                print(f"  {name.replace('_bytes', '').replace('_', ' '):20} {_for_people(name, value)}")
    if ledger is not None:
        count = load.get("tensor_parallel", 1)
        title = "memory of the engine" if count == 1 else f"memory of rank 0 of {count}"
        print(title, *ledger.explained().splitlines(), sep="\n  ")


def _versions() -> dict[str, str | None]:
    packages = {package: installed_version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), "fastgen": __version__, **packages}


def _device_facts(name: str) -> dict[str, Any]:
    from fastgen.compile.build.cpp import cpp_arch
    from fastgen.compile.host.device import current, free_memory_bytes

    device = current(name)
    facts = {
        "device": str(device),
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "free_memory_bytes": free_memory_bytes(device),
    }
    if device.kind == "cpu":
        sets = list(device.instruction_sets)
        units = {"kernels_for": cpp_arch(device), "matrix_unit": _matrix_unit(device), "bf16": _bf16(device)}
        return {**facts, "cores": device.num_cores, "instruction_sets": sets, **units}
    assert device.capability is not None
    return {**facts, "capability": "{}.{}".format(*device.capability), "sms": device.num_sms}


def _bf16(device: Device) -> str | None:
    """Returns the instruction set of kernels in bf16, and why it is that; ``None`` where the CPU has no choice."""
    from fastgen.compile.ops.linear.bf16_tuning import bf16_choice
    from fastgen.errors import CompilerNotFoundError

    try:
        choice = bf16_choice(device)
    except CompilerNotFoundError:
        return None
    return None if choice is None else f"{choice.arch} ({choice.reason})"


def _matrix_unit(device: Device) -> str | None:
    """Returns how the CPU's matrix unit takes part in computing; ``None`` for a CPU without one."""
    from fastgen.compile.build.cpp import cpp_arch, emulates_amx
    from fastgen.compile.host.device import AMX
    from fastgen.compile.weights.packed import ARCHES_WITH_TILES

    if cpp_arch(device) not in ARCHES_WITH_TILES:
        has_unit = set(AMX) <= set(device.instruction_sets)
        return device.amx_refusal or ("AMX, not used" if has_unit else None)
    return "AMX, emulated" if emulates_amx() else "AMX"


def _model_facts(source: ModelSource) -> dict[str, Any]:
    spec, dtype = source.spec, source.dtype
    return {
        "directory": str(source.directory),
        "architecture": spec.architecture,
        "recipe": spec.recipe,
        "recipe_file": str(source.recipe.file),
        "parameters": spec.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": spec.num_parameters * dtype.itemsize,
        "kv_bytes_per_token": spec.kv_bytes_per_token(dtype.itemsize),
        "context": spec.max_positions,
        "vocabulary": spec.vocab_size,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
    }


def _build(load_options: LoadOptions, source: ModelSource) -> ModelBuild:
    """Returns the whole model as ``fastgen.load`` would build it."""
    from fastgen.compile.backends.choose import target_facts
    from fastgen.compile.host.device import current
    from fastgen.models.measure import ModelBuild
    from fastgen.runtime.arrangement import threads_of_rank
    from fastgen.runtime.targets import parse_quantize

    device, quantize = current(load_options.device), load_options.quantize
    num_threads = threads_of_rank(load_options, device)
    target = target_facts(load_options.target, device, num_threads=num_threads, dtype=source.dtype, quantize=quantize)
    return ModelBuild(source.spec, source.dtype, target, parse_quantize(quantize, target.name))


def _plan(load_options: LoadOptions, build: ModelBuild) -> ShardPlan:
    """Returns how the model would be split over the ranks."""
    from fastgen.models.shard.plan import plan_shards

    return plan_shards(build.spec, load_options.tensor_parallel, build.dtype.itemsize, build.weight_format)


def _plan_facts(plan: ShardPlan) -> dict[str, Any]:
    return {
        "ranks": len(plan.ranks),
        "possible": [str(count) for count in plan.possible],
        "a_rank_has": list(plan.parts),
        "sums_of_a_step": plan.num_sums,
        "weights_bytes": max(plan.weight_bytes),
        "weights_bytes_of_all": sum(plan.weight_bytes),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
    }


def _engine(load_options: LoadOptions, build: ModelBuild) -> tuple[dict[str, Any], Ledger]:
    """Returns the sizes and the memory of the engine that ``fastgen.load`` would make. ``build`` is the model, or the
    part of one rank.
    """
    from fastgen.compile.host.device import current
    from fastgen.runtime.arrangement import device_of_rank
    from fastgen.runtime.config import resolve_engine_config
    from fastgen.runtime.memory.fit import blocks_of_sequence
    from fastgen.runtime.memory.ledger import MemoryModel

    memory = MemoryModel(build, device_of_rank(current(load_options.device), load_options))
    config = resolve_engine_config(memory, load_options)
    blocks = blocks_of_sequence(memory, config.max_model_len, config.token_budget, config.block_size)
    sizes = {
        "token_budget": config.token_budget,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        # How many requests of max_model_len tokens, prompt and answer together, can run at once.
        "full_length_requests": min(config.max_num_seqs, (config.num_blocks - 1) // blocks),
    }
    return sizes, memory.ledger(config)


def _for_people(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ("\n" + 23 * " ").join(value) if name == "a_rank_has" else " ".join(value)
    if "_bytes" in name:
        unit, size = next(unit for unit in _UNITS if value >= unit[1])
        return f"{value / size:.1f} {unit}"
    return f"{value:,}" if isinstance(value, int) else str(value)
