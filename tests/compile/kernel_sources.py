"""The kernels of every shipped recipe at small sizes, and what is recorded of their sources.

A change of a template, a recipe or a tiling changes the digests in ``kernel_digests_<target>.txt``, one line a distinct
kernel. About a dozen sources are stored as text as well, in ``sources/``, for people to read.
``python -m tools.kernel_diff HEAD`` shows what changed, ``python -m tests.compile.kernel_sources`` records it. Neither
needs a compiler or a GPU, and both give the same on every machine: numbers that the mathematics library might round
differently are left out of the configurations.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.render import render_body
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QUANTIZED
from fastgen.models.kernels import kernel_specs
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from tests.recipe_tools.published import CONFIGS
from tools.render_kernels import Needed, source_text

ARCHES: Final = {"triton": TRITON_ARCHES, "cpp": CPP_ARCHES}
PLACE: Final = Path(__file__).parent
COMMAND: Final = "python -m tests.compile.kernel_sources"
_UNQUANTIZED: Final = "bf16"
_NUM_LAYERS: Final = 4
_NUM_HEADS: Final = 4
_SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "word_embed_proj_dim"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), _NUM_HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "query_pre_attn_scalar"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 512),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 128),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 16),
    **dict.fromkeys(("rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 32),
    "vocab_size": 1024,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,  # makes tables, no kernels; and logarithms
}
_SMALLER: Final = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}


class Readable(NamedTuple):
    """A stored source: the first kernel, by name, of a recipe on an architecture whose name begins so."""

    arch: str
    recipe: str
    weight_format: str
    name_begins: str


# By the file's name in ``sources/``.
READABLE: Final = {
    "attention_chunks_sm_90.py": Readable("sm_90", "gemma2", _UNQUANTIZED, "attention_chunks_"),
    "attention_decodes_gfx942.py": Readable("gfx942", "llama", _UNQUANTIZED, "attention_decodes_"),
    "few_row_linear_int4_sm_80.py": Readable("sm_80", "llama", "int4_weight_only", "few_row_linear_"),
    "grouped_linear_int8_sm_90.py": Readable("sm_90", "mixtral", "int8_weight_only", "grouped_linear_"),
    "qkv_norm_sm_90.py": Readable("sm_90", "qwen3", _UNQUANTIZED, "qkv_"),
    "rms_norm_residual_sm_90.py": Readable("sm_90", "granite", _UNQUANTIZED, "rms_norm_"),
    "moe_sort_sm_90.py": Readable("sm_90", "deepseek_v3", _UNQUANTIZED, "moe_sort_"),
    "sampling_scan_sm_90.py": Readable("sm_90", "llama", _UNQUANTIZED, "sampling_scan_"),
    "linear_int8_avx512vnni.cpp": Readable("avx512vnni", "llama", "int8", "linear_i"),
    "sort_by_expert.cpp": Readable("avx2", "mixtral", _UNQUANTIZED, "sort_by_expert"),
    "rms_norm_portable.cpp": Readable("portable", "llama", _UNQUANTIZED, "rms_norm_"),
    "embedding_avx512bf16.cpp": Readable("avx512bf16", "gemma", _UNQUANTIZED, "embedding_"),
    "next_decodes.cpp": Readable("portable", "llama", _UNQUANTIZED, "next_decodes"),
}


def needed(arches: Iterable[str], recipes: Iterable[str] = (), formats: Iterable[str] = ()) -> Iterator[Needed]:
    """Yields the kernels of recipes by architecture and weight format, by default of all recipes and formats."""
    recipes, formats = list(recipes) or list(CONFIGS), list(formats)
    for arch in arches:
        target = "cpp" if arch in CPP_ARCHES else "triton"
        builder = CppBuilder(arch, compiler="none") if target == "cpp" else TritonBuilder(arch)
        loader = KernelLoader(builder, num_jobs=1)
        for quantized in (None, *QUANTIZED[target]):
            weight_format = quantized or _UNQUANTIZED
            for recipe in recipes if not formats or weight_format in formats else ():
                for spec in kernel_specs(_model(recipe), loader, torch.bfloat16, weight_format=quantized):
                    yield Needed(recipe, arch, weight_format, spec)


def digests(target: str, arches: Collection[str] = ()) -> str:
    """The index of a target's kernels: a line for each name and source, with all that needs it. By default they are
    those of all architectures.
    """
    users: dict[tuple[str, str], list[Needed]] = defaultdict(list)
    found: dict[KernelSpec, str] = {}
    for each in needed(arches or ARCHES[target]):
        if each.spec not in found:
            text = source_text(each.spec, render_body(each.spec))
            found[each.spec] = hashlib.sha256(text.encode()).hexdigest()[:12]
        users[each.spec.name, found[each.spec]].append(each)
    lines = [
        f"{name} {digest} | {_listed((each.arch for each in by), ARCHES[target])} | "
        f"{_listed((each.weight_format for each in by), (_UNQUANTIZED, *QUANTIZED[target]))} | "
        f"{_listed((each.recipe for each in by), sorted(CONFIGS))}\n"
        for (name, digest), by in sorted(users.items())
    ]
    return "# kernel, digest of its source | architectures | weight formats | recipes that need it\n" + "".join(lines)


def index(target: str) -> Path:
    """The file of a target's digests."""
    return PLACE / f"kernel_digests_{target}.txt"


def readable(chosen: Readable) -> str:
    """The text of a source that is stored for people to read."""
    candidates = needed([chosen.arch], [chosen.recipe], [chosen.weight_format])
    spec = next(each.spec for each in candidates if each.spec.name.startswith(chosen.name_begins))
    comment = "#" if spec.target == "triton" else "//"
    head = f"{comment} {spec}\n{comment} {chosen.recipe} on {chosen.arch}, weights in {chosen.weight_format}\n"
    return head + source_text(spec, render_body(spec))


def write() -> None:
    """Brings the digests and the stored sources up to date."""
    for target in ARCHES:
        index(target).write_text(digests(target), encoding="utf-8")
    directory = PLACE / "sources"
    directory.mkdir(exist_ok=True)
    for file in directory.iterdir():
        file.unlink()
    for name, chosen in READABLE.items():
        (directory / name).write_text(readable(chosen), encoding="utf-8")


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the same features in small sizes. Queries that do not share key heads still do not."""
    num_heads = next(config[key] for key in ("num_attention_heads", "n_head") if key in config)
    num_layers = next(config[key] for key in ("num_hidden_layers", "n_layer") if key in config)
    reduced = {key: _SMALL.get(key, value) if value is not None else None for key, value in config.items()}
    reduced |= {key: min(config[key], most) for key, most in _SMALLER.items() if config.get(key) is not None}
    for key in ("num_key_value_heads", "num_kv_heads"):
        if config.get(key) is not None:
            reduced[key] = {num_heads: _NUM_HEADS, 1: 1}.get(config[key], 2)
    by_layer = [key for key, value in config.items() if isinstance(value, list) and len(value) == num_layers]
    return reduced | {key: config[key][:_NUM_LAYERS] for key in by_layer}


@cache
def _model(recipe: str) -> ModelSpec:
    config = small(CONFIGS[recipe][1])
    return resolve(find_recipe(config), config)


def _listed(values: Iterable[str], known: Iterable[str]) -> str:
    """The distinct values in the order of ``known``; ``all`` where none is missing."""
    found = set(values)
    return " ".join(each for each in known if each in found) if found != set(known) else "all"


if __name__ == "__main__":
    write()
