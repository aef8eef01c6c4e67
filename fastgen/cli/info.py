"""``fastgen info``: versions and device, and what a model is, told without reading its weights."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastgen.cli import options
from fastgen.version import __version__

if TYPE_CHECKING:
    import torch

    from fastgen.models.spec import ModelSpec
    from fastgen.runtime.memory.ledger import Ledger

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_PACKAGES = ("torch", "transformers", "triton")


def info(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Tell of this model too.")] = None,
    recipe: options.Recipe = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    target: options.Target = None,
    quantize: options.Quantize = None,
    token_budget: options.TokenBudget = None,
    max_num_seqs: options.MaxNumSeqs = None,
    kv_cache_memory: options.KvCacheMemory = None,
    block_size: options.BlockSize = None,
    max_model_len: options.MaxModelLen = None,
    num_threads: options.NumThreads = None,
    revision: options.Revision = None,
    allow_config_keys: options.AllowConfigKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Tell versions and device, and of MODEL its recipe and sizes, and the memory that an engine would take."""
    facts = {"versions": _versions(), "device": _device_facts(device or "auto")}
    ledger: Ledger | None = None
    if model is not None:
        spec, facts["model"], torch_dtype = _model_facts(
            model, recipe, dtype or "auto", revision, allow_config_keys or []
        )
        sizes = {
            "token_budget": token_budget,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory": kv_cache_memory,
            "block_size": block_size,
            "max_model_len": max_model_len,
        }
        ledger = _ledger(spec, torch_dtype, device or "auto", target or "auto", quantize, num_threads, sizes)
    if as_json:
        print(json.dumps(facts if ledger is None else facts | {"ledger": ledger.as_json()}))
        return
    for title, section in facts.items():
        print(title)
        for name, value in section.items():
            if value not in (None, []):
                print(f"  {name.replace('_bytes', '').replace('_', ' '):20} {_for_people(name, value)}")
    if ledger is not None:
        print("memory", *str(ledger).splitlines(), sep="\n  ")


def _versions() -> dict[str, str | None]:
    packages = {package: _installed(package) for package in _PACKAGES}
    return {"python": platform.python_version(), "fastgen": __version__, **packages}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_facts(name: str) -> dict[str, Any]:
    from fastgen.compile.host.device import current

    device = current(name)
    facts = {"device": str(device), "name": device.name, "memory_bytes": device.memory_bytes}
    if device.kind == "cpu":
        return {**facts, "cores": device.num_cores, "instruction_sets": list(device.instruction_sets)}
    assert device.capability is not None
    return {**facts, "capability": "{}.{}".format(*device.capability), "sms": device.num_sms}


def _model_facts(
    model: str, recipe: str | None, dtype: str, revision: str | None, allow_config_keys: list[str]
) -> tuple[ModelSpec, dict[str, Any], torch.dtype]:
    from fastgen.models.checkpoint import hub
    from fastgen.models.checkpoint.checkpoint import Checkpoint, checkpoint_dtype
    from fastgen.models.registry import registry
    from fastgen.models.resolve.resolve import resolve
    from fastgen.runtime.config import parse_dtype

    directory = hub.locate(model, revision=revision)
    checkpoint = Checkpoint.open(directory)
    found = registry.find_recipe(checkpoint.config, recipe=recipe, checkpoint_dir=directory)
    config_file = str(directory / "config.json")
    spec = resolve(found, checkpoint.config, config_file=config_file, allow_config_keys=allow_config_keys)
    torch_dtype = checkpoint_dtype(checkpoint.config, checkpoint) if dtype == "auto" else parse_dtype(dtype)
    facts = {
        "directory": str(directory),
        "architecture": spec.architecture,
        "recipe": spec.recipe,
        "recipe_file": str(found.file),
        "parameters": spec.num_parameters,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "weights_bytes": spec.num_parameters * torch_dtype.itemsize,
        "kv_bytes_per_token": spec.kv_bytes_per_token(torch_dtype.itemsize),
        "context": spec.max_positions,
        "vocabulary": spec.vocab_size,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
    }
    return spec, facts, torch_dtype


def _ledger(
    spec: ModelSpec,
    dtype: torch.dtype,
    device_name: str,
    target: str,
    quantize: str | None,
    num_threads: int | None,
    sizes: dict[str, Any],
) -> Ledger:
    """Of an engine that ``fastgen.load`` would make with these arguments."""
    from fastgen.compile.backends.choose import target_facts
    from fastgen.compile.host.device import current
    from fastgen.models.measure import ModelBuild
    from fastgen.runtime.config import resolve_engine_config
    from fastgen.runtime.memory.ledger import MemoryModel
    from fastgen.runtime.targets import parse_quantize

    device = current(device_name)
    facts = target_facts(target, device, num_threads=num_threads)
    memory = MemoryModel(ModelBuild(spec, dtype, facts, parse_quantize(quantize, facts.name)), device)
    return memory.ledger(resolve_engine_config(memory, **sizes))


def _for_people(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if "_bytes" in name:
        unit, size = next(unit for unit in _UNITS if value >= unit[1])
        return f"{value / size:.1f} {unit}"
    return f"{value:,}" if isinstance(value, int) else str(value)
