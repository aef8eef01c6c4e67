"""Measures how paged attention is best cut on this device: see :mod:`fastgen.compile.build.autotune`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.build.autotune import Way
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling, chunk_tilings, decode_tilings
from fastgen.compile.ops.attention.triton import (
    CHUNK_PROGRAMS,
    AttentionKernel,
    AttentionPlan,
    AttentionSpecs,
    attention_specs,
)
from fastgen.compile.spec import torch_dtype

_NUM_DECODES, _KV_BYTES = 16, 256 << 20  # more keys and values than caches hold
_CHUNK = 2048  # tokens of one prompt


def tuned_tilings(
    shape: AttentionShape, max_num_seqs: int, num_sms: int, loader: KernelLoader, device: torch.device
) -> tuple[Tiling, Tiling]:
    """Returns the tilings of chunks and of decodes, which are measured separately. ``device`` will hold the cache."""
    arch = loader.builder.arch
    candidates = {"chunk": chunk_tilings(shape, arch), "decode": decode_tilings(shape, arch)}
    defaults = {kind: tilings[0] for kind, tilings in candidates.items()}
    found = {}
    for kind, tilings in candidates.items():
        ways = []
        for tiling in tilings:
            cut = {**defaults, kind: tiling}
            specs = attention_specs(
                shape, max_num_seqs=max_num_seqs, arch=arch, chunk=cut["chunk"], decode=cut["decode"]
            )
            specs = specs.overlapped(arch)
            start = partial(_start, kind, specs, max_num_seqs, num_sms, loader, device)
            kernels, beside = (specs.chunks, specs.decodes), (specs.plan,)
            ways.append(Way(asdict(tiling), kernels, start, beside))
        # The stride of tokens' queries does not matter for the best tiles, nor that there are more slots than decodes.
        problem = f"attention {kind}s, {replace(shape, q_stride=0)}, "
        problem += f"{CHUNK_PROGRAMS} in turn" if kind == "chunk" else f"{_num_decodes(max_num_seqs)} at once"
        found[kind] = tilings[loader.tuning.choose(problem, ways, may_measure=device.type != "meta")]
    return found["chunk"], found["decode"]


def _num_decodes(max_num_seqs: int) -> int:
    return min(_NUM_DECODES, max_num_seqs)


def _start(
    kind: str, specs: AttentionSpecs, max_num_seqs: int, num_sms: int, loader: KernelLoader, device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """Prepares one layer's attention of one chunk, or of decodes over a KV cache larger than the device's caches."""
    shape, dtype = specs.shape, torch_dtype(specs.shape.dtype)
    count, new, cached = 1, _CHUNK, 0
    if kind == "decode":
        count, new = _num_decodes(max_num_seqs), 1
        a_token = shape.num_kv_heads * (shape.head_dim + shape.v_dim) * dtype.itemsize
        cached = _KV_BYTES // a_token // count if device.type != "cpu" else 20
    elif device.type == "cpu":
        new = 20
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    num_blocks = -(-(cached + new) // shape.block_size)
    tables = torch.arange(1, 1 + count * num_blocks, dtype=torch.int32, device=device).view(count, num_blocks)
    size = (1 + count * num_blocks, shape.block_size, shape.num_kv_heads)
    k_cache = drawn(*size, shape.head_dim)
    v_cache = k_cache[..., : shape.v_dim] if shape.values_in_keys else drawn(*size, shape.v_dim)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * new
    seq_lens = torch.full((count,), cached + new, dtype=torch.int32, device=device)
    q = drawn(count * new, shape.q_stride).as_strided(
        (count * new, shape.num_heads, shape.head_dim), (shape.q_stride, shape.head_dim, 1)
    )
    out = torch.empty(count * new, shape.num_heads, shape.v_dim, dtype=dtype, device=device)
    extras = {
        **({"slopes": drawn(shape.num_heads).abs().to(torch_dtype(shape.alibi_dtype))} if shape.alibi else {}),
        **({"sinks": drawn(shape.num_heads).float()} if shape.sinks else {}),
    }
    plan = AttentionPlan(
        specs, loader.load, token_budget=len(q), max_num_seqs=max_num_seqs, num_sms=num_sms, device=device
    )
    attention = AttentionKernel(specs, loader.load, plan)
    plan(starts, seq_lens)

    def run() -> None:
        attention(q, k_cache, v_cache, tables, starts, seq_lens, out, **extras)

    return run, out
