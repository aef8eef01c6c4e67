"""Golden sources: what the kernels of every shipped recipe are rendered to, kept in ``golden/`` beside this file.

A change of a template, a recipe or a tiling shows there as a diff, to be looked at. Each recipe is taken at a published
configuration, all made small in the same way, so that recipes share kernels, and each distinct source is kept once:

```
golden/<target>/rms_norm_h256_bf16_….py     the specs that are rendered so, one a line, then the source
golden/<target>/recipes.json                which of the files each recipe needs
```

``python -m tests.compile.golden`` writes all of it anew. It needs neither a compiler nor a GPU and comes out the same
on every machine: numbers that the mathematics library might round differently are left out of the configurations.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch

from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.render import SUFFIXES, render_body
from fastgen.compile.spec import KernelSpec
from fastgen.models.kernels import kernel_specs
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from tests.recipe_tools.published import CONFIGS

TARGETS: Final = ("sm_90", "avx512bf16", "portable")
PLACE: Final = Path(__file__).with_name("golden")
COMMAND: Final = "python -m tests.compile.golden"
_INDEX: Final = "recipes.json"
_SHOWN_LINES: Final = 300
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


def sources(target: str) -> dict[str, str]:
    """What is to lie in the directory of ``target``: texts by file name."""
    by_recipe = {name: _specs(config, target) for name, (_, config) in CONFIGS.items()}
    by_body: dict[str, set[KernelSpec]] = defaultdict(set)
    for spec in sorted({spec for specs in by_recipe.values() for spec in specs}, key=lambda spec: spec.digest):
        by_body[render_body(spec)].add(spec)
    names = [next(iter(specs)).name for specs in by_body.values()]
    files: dict[KernelSpec, str] = {}
    texts: dict[str, str] = {}
    for body, specs in by_body.items():
        first = min(specs, key=lambda spec: spec.digest)
        stem = first.name if names.count(first.name) == 1 else f"{first.name}-{first.digest}"
        file = f"{stem}{SUFFIXES[first.target]}"
        comment = "#" if first.target == "triton" else "//"
        texts[file] = "".join(f"{comment} {line}\n" for line in sorted(map(str, specs))) + "\n" + body
        files |= dict.fromkeys(specs, file)
    index = {name: sorted({files[spec] for spec in specs}) for name, specs in sorted(by_recipe.items())}
    return {_INDEX: json.dumps(index, indent=1) + "\n", **texts}


def kept(target: str) -> dict[str, str]:
    """What lies there."""
    return {file.name: file.read_text(encoding="utf-8") for file in (PLACE / target).glob("*.*")}


def difference(before: dict[str, str], after: dict[str, str]) -> str:
    """A unified diff of two directories, cut off where it gets long; empty where they are the same."""
    lines = [
        line
        for name in sorted(before.keys() | after.keys())
        for line in difflib.unified_diff(
            before.get(name, "").splitlines(),
            after.get(name, "").splitlines(),
            name if name in before else "(none)",
            name if name in after else "(none)",
            lineterm="",
        )
    ]
    left_out = len(lines) - _SHOWN_LINES
    return "\n".join([*lines[:_SHOWN_LINES], *([f"… and {left_out} lines more"] if left_out > 0 else [])])


def write() -> None:
    """Brings everything in :data:`PLACE` up to date."""
    for target in TARGETS:
        texts = sources(target)
        shutil.rmtree(PLACE / target, ignore_errors=True)
        (PLACE / target).mkdir(parents=True)
        for name, text in texts.items():
            (PLACE / target / name).write_text(text, encoding="utf-8")
        print(f"{target}: {len(texts) - 1} sources, {sum(map(len, texts.values())) / 2**20:.2f} MiB")


def _specs(config: dict[str, Any], target: str) -> list[KernelSpec]:
    reduced = small(config)
    builder = CppBuilder(target, compiler="none") if target in CPP_ARCHES else TritonBuilder(target)
    return kernel_specs(resolve(find_recipe(reduced), reduced), KernelLoader(builder, num_jobs=1), torch.bfloat16)


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same features in small sizes. Where queries do not share their keys' heads, they still do not."""
    num_heads = next(config[key] for key in ("num_attention_heads", "n_head") if key in config)
    num_layers = next(config[key] for key in ("num_hidden_layers", "n_layer") if key in config)
    reduced = {key: _SMALL.get(key, value) if value is not None else None for key, value in config.items()}
    reduced |= {key: min(config[key], most) for key, most in _SMALLER.items() if config.get(key) is not None}
    for key in ("num_key_value_heads", "num_kv_heads"):
        if config.get(key) is not None:
            reduced[key] = {num_heads: _NUM_HEADS, 1: 1}.get(config[key], 2)
    by_layer = [key for key, value in config.items() if isinstance(value, list) and len(value) == num_layers]
    return reduced | {key: config[key][:_NUM_LAYERS] for key in by_layer}


if __name__ == "__main__":
    write()
