"""Which generated kernels a model needs: its layers are made without memory, and asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.norm import norm_spec
from fastgen.compile.ops.packed_weight import WeightFormat
from fastgen.compile.spec import KernelSpec, dtype_name
from fastgen.compile.tape import tape_spec
from fastgen.compile.target import Target
from fastgen.compile.thread_pool import thread_pool_spec
from fastgen.models.builder import build
from fastgen.models.spec import LatentAttentionSpec, ModelSpec, NormSpec


def kernel_specs(
    model: ModelSpec,
    loader: KernelLoader,
    dtype: torch.dtype,
    *,
    weight_format: WeightFormat | None = None,
    block_size: int | None = None,
) -> list[KernelSpec]:
    """Each kernel that ``model`` needs on the loader's target once, by name, with all recipe nodes that ask for it.

    ``dtype`` is that of the weights, ``weight_format`` what matrices are kept in, where that differs; ``block_size`` is
    in tokens, by default an engine's. With the kernels of ``cpp`` come the libraries that run them. Layers ask the
    ``cpp`` target only, so far; for ``triton`` these are the norms.
    """
    if loader.builder.target == "triton":
        return _merge(_norms(model, dtype_name(dtype)))
    target = Target(loader, max_rows=1)
    build(
        model,
        dtype=dtype,
        device=torch.device("meta"),
        max_model_len=model.max_positions or 1,
        target=target,
        weight_format=weight_format,
        **({} if block_size is None else {"block_size": block_size}),
    )
    pool = replace(thread_pool_spec(), needed_by=("every kernel that runs on several threads",))
    return sorted([*target.specs(), pool, tape_spec()], key=lambda spec: spec.name)


def _merge(specs: Iterator[KernelSpec]) -> list[KernelSpec]:
    nodes: dict[KernelSpec, dict[str, None]] = {}
    for spec in specs:
        nodes.setdefault(spec, {}).update(dict.fromkeys(spec.needed_by))
    merged = (replace(spec, needed_by=tuple(needed_by)) for spec, needed_by in nodes.items())
    return sorted(merged, key=lambda spec: spec.name)


def _norms(model: ModelSpec, dtype: str) -> Iterator[KernelSpec]:
    """Norms of rows of the residual stream, and of latent attention. Norms of heads are part of the rotary kernel."""

    def kernel(norm: NormSpec, added: float | None = None) -> KernelSpec:
        return norm_spec(
            "triton",
            norm.kind,
            norm.size,
            dtype,
            norm.eps,
            weight=norm.weight is not None,
            bias=norm.bias is not None,
            offset=norm.offset,
            residual=added is not None,
            scale=1.0 if added is None else added,
            needed_by=(f"{model.recipe}: {norm.node.path}",),
        )

    if model.embedding.norm is not None:
        yield kernel(model.embedding.norm)
    added: float | None = None  # the scale of what the next norm adds to the stream first: the branch before it
    for branch in (branch for layer in model.layers for branch in layer.branches):
        for norm in (branch.norm, *(part.norm for part in branch.parts)):
            if norm is not None:
                yield kernel(norm, added)
                added = None
        for part in (part.part for part in branch.parts):
            if isinstance(part, LatentAttentionSpec):
                yield from (kernel(norm) for norm in (part.q_norm, part.kv_norm) if norm is not None)
        if branch.output_norm is not None:
            yield kernel(branch.output_norm)
        added = branch.scale
        if branch.sum_norm is not None:
            yield kernel(branch.sum_norm, added)
            added = None
    if model.final_norm is not None:
        yield kernel(model.final_norm, added)
