"""The facts about a resolved model that ``fastgen recipe show`` prints, as JSON."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    LatentAttentionSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PartSpec,
    RotarySpec,
    TensorSpec,
    tensors_of,
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def facts_of(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts about a resolved model, as JSON."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = dtype if dtype in _DTYPE_BYTES else "bfloat16"
    contexts = sorted({1, min(1024, spec.max_positions or 1024), spec.max_positions or 1024})
    return {
        "recipe": spec.recipe,
        "architecture": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_positions": spec.max_positions,
        "tied": spec.tied,
        "num_parameters": spec.num_parameters,
        "dtype": dtype,
        "kv_bytes_per_token": spec.kv_bytes_per_token(_DTYPE_BYTES[dtype]),
        "flops_per_token": {str(context): spec.flops_per_token(context) for context in contexts},
        "embedding": _embedding(spec),
        "layers": _layers(spec),
        "final_norm": _norm(spec.final_norm),
        "head": _head(spec),
    }


def _embedding(spec: ModelSpec) -> dict[str, Any]:
    embedding = spec.embedding
    vocab_size, width = embedding.tokens.shape
    parts = [f"{vocab_size:,} × {width}"]
    if embedding.scale != 1:
        parts.append(f"times {embedding.scale:g}")
    if embedding.project:
        parts.append(f"projected to {embedding.project.out_features}")
    if embedding.positions:
        rows = embedding.positions.weight.shape[0]
        parts.append(f"learned positions, {rows:,} rows from {embedding.positions.offset} on")
    if embedding.norm:
        parts.append(f"{_norm(embedding.norm)} norm")
    return {"is": ", ".join(parts), "num_parameters": _count(embedding)}


def _head(spec: ModelSpec) -> dict[str, Any]:
    parts = [f"projected to {spec.head.project.out_features}"] if spec.head.project else []
    parts.append("the token embedding" if spec.head.weight is None else "{:,} × {}".format(*spec.head.weight.shape))
    if spec.head.bias:
        parts.append("bias")
    if spec.head.scale != 1:
        parts.append(f"times {spec.head.scale:g}")
    if spec.head.softcap is not None:
        parts.append(f"capped at {spec.head.softcap:g}")
    return {"is": ", ".join(parts), "num_parameters": _count(spec.head)}


def _layers(spec: ModelSpec) -> list[dict[str, Any]]:
    """Returns the runs of layers that are alike in all but their index."""
    described = [(layer.index, [_branch(branch) for branch in layer.branches]) for layer in spec.layers]
    groups = []
    for branches, run in groupby(described, key=lambda each: each[1]):
        indices = [index for index, _ in run]
        text = str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
        groups.append({"indices": text, "count": len(indices), "branches": branches})
    return groups


def _branch(branch: BranchSpec) -> dict[str, Any]:
    return {
        "name": branch.name,
        "norm": _norm(branch.norm),
        "parts": [_part(part) for part in branch.parts],
        "output_norm": _norm(branch.output_norm),
        "scale": branch.scale,
        "sum_norm": _norm(branch.sum_norm),
        "num_parameters": _count(branch),
    }


def _part(part: PartSpec) -> str:
    own = f"norm {_norm(part.norm)}, then " if part.norm else ""
    match part.part:
        case AttentionSpec():
            return own + _attention(part.part)
        case LatentAttentionSpec():
            return own + _latent_attention(part.part)
        case MlpSpec():
            return own + _mlp(part.part)
        case MoeSpec():
            return own + _moe(part.part)


def _attention(part: AttentionSpec) -> str:
    words = [f"attention: {part.num_heads} heads, {part.num_kv_heads} of K and V, {part.head_dim} wide"]
    if part.q_norm or part.k_norm:
        norm = part.q_norm or part.k_norm
        assert norm is not None
        words.append(f"{_norm(norm.norm)} norm of {'each head' if norm.over == 'head' else 'all heads'}")
    if part.rotary:
        words.append(_rotary(part.rotary, part.head_dim))
    if part.alibi:
        words.append("ALiBi")
    if part.scale != part.head_dim**-0.5:
        words.append(f"scale {part.scale:g}")
    if part.softcap is not None:
        words.append(f"capped at {part.softcap:g}")
    if part.sliding_window is not None:
        words.append(f"window {part.sliding_window:,}")
    return ", ".join(words + _biases({"q, k, v": part.q.bias, "output": part.output.bias}))


def _latent_attention(part: LatentAttentionSpec) -> str:
    words = [
        f"latent attention: {part.num_heads} heads, {part.nope_dim} + {part.rope_dim} wide, values {part.v_head_dim}",
        f"{part.kv_rank} + {part.rope_dim} cached",
        _rotary(part.rotary, part.rope_dim),
        f"scale {part.scale:g}",
    ]
    return ", ".join(words + _biases({"output": part.output.bias}))


def _rotary(rotary: RotarySpec, width: int) -> str:
    words = f"rotary θ {rotary.theta:g}"
    if rotary.dim != width:
        words += f" of {rotary.dim}"
    if rotary.kind != "half":
        words += f" {rotary.kind}"
    if scaling := rotary.scaling:
        words += f" {scaling.kind} × {scaling.factor:g} from {scaling.original_max_positions:,}"
    return words


def _mlp(part: MlpSpec) -> str:
    words = [f"{part.kind} mlp: {part.up.in_features} → {part.up.out_features}, {part.activation}"]
    return ", ".join(words + _biases({"all": part.up.bias}))


def _moe(part: MoeSpec) -> str:
    words = [
        f"{part.router.top_k} of {len(part.experts)} experts by {part.router.scoring}, each {_mlp(part.experts[0])}"
    ]
    return ", ".join(words + ([f"and one for all, {_mlp(part.shared)}"] if part.shared else []))


def _biases(biases: dict[str, TensorSpec | None]) -> list[str]:
    present = [name for name, bias in biases.items() if bias]
    return [f"bias on {' and '.join(present)}"] if present else []


def _norm(norm: NormSpec | None) -> str:
    if norm is None:
        return ""
    return f"{norm.kind} {norm.eps:g}" + ("" if norm.weight else " plain") + (" with bias" if norm.bias else "")


def _count(node: object) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors_of(node))
