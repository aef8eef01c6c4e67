"""Batches for the Triton attention kernels, and a run of them, interpreted or on a GPU, against the torch reference."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.attention.reference import Alibi, paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling
from fastgen.compile.ops.attention.triton import AttentionKernel, AttentionPlan, AttentionSpecs, attention_specs
from fastgen.compile.spec import torch_dtype
from tests.kernel_device import kernel_arch, triton_loader

UNUSED = 2**30  # a block id that no cache has
CPU = torch.device("cpu")
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3.2e-2}
# Cached and new tokens of each sequence.
Rows = list[tuple[int, int]]
# Shapes of models, with blocks of 64 tokens unless they say otherwise.
SHIPPED = {
    **{f"D {size}": AttentionShape(32, 8, size, 64, "bf16", 0.1) for size in (64, 80, 96, 128, 256)},
    "fp16": AttentionShape(32, 8, 128, 64, "fp16", 0.1),
    "fp32": AttentionShape(32, 8, 128, 64, "fp32", 0.1),
    "small blocks": AttentionShape(32, 8, 128, 16, "bf16", 0.1),
    "small blocks, D 64": AttentionShape(12, 12, 64, 16, "bf16", 0.125, q_stride=2304),
    "Gemma 2, small blocks": AttentionShape(8, 4, 256, 16, "bf16", 0.1, sliding_window=4096, softcap=50.0),
    "GPT-J, small blocks": AttentionShape(16, 16, 256, 16, "bf16", 0.0625, q_stride=12288),
    "Phi 3, small blocks": AttentionShape(32, 32, 96, 16, "bf16", 0.1, sliding_window=2047, q_stride=9216),
    "latent, small blocks": AttentionShape(128, 1, 576, 16, "bf16", 0.1, v_dim=512, values_in_keys=True),
    "window": AttentionShape(32, 8, 128, 64, "bf16", 0.1, sliding_window=4096),
    "window, small blocks": AttentionShape(32, 8, 128, 16, "bf16", 0.1, sliding_window=4096, q_stride=6144),
    "Gemma 2": AttentionShape(16, 8, 256, 64, "bf16", 0.1, sliding_window=4096, softcap=50.0),
    "BLOOM": AttentionShape(32, 32, 128, 64, "bf16", 0.1, alibi="plain", alibi_dtype="bf16"),
    "Falcon": AttentionShape(71, 1, 64, 64, "bf16", 0.1),
    "sinks": AttentionShape(64, 8, 64, 64, "bf16", 0.1, sliding_window=128, sinks=True),
    "latent": AttentionShape(128, 1, 576, 64, "bf16", 0.1, v_dim=512, values_in_keys=True),
    "expanded latent": AttentionShape(32, 32, 192, 64, "bf16", 0.1, v_dim=128),
}


@dataclass(frozen=True)
class Case:
    """Describes a batch for an attention. ``num_sms`` decides how many programs share the decodes."""

    rows: Rows
    shape: AttentionShape
    chunk: Tiling = field(default_factory=lambda: Tiling(32, 16, 4, 1))
    decode: Tiling = field(default_factory=lambda: Tiling(16, 16, 4, 1, programs_per_sm=1))
    num_sms: int = 8
    num_padding: int = 0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows) + self.num_padding


def shape_of(**changes: Any) -> AttentionShape:
    """Returns a small grouped attention in fp32; ``changes`` are fields of :class:`AttentionShape`."""
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4, "dtype": "fp32"}
    return AttentionShape(**{"scale": 0.3, **fields, **changes})


@dataclass
class Batch:
    """Holds the arguments of an attention. Whatever it must not read is NaN or :data:`UNUSED`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    starts: Tensor
    seq_lens: Tensor
    slopes: Tensor | None
    sinks: Tensor | None


def make_batch(case: Case) -> Batch:
    shape, block_size, dtype = case.shape, case.shape.block_size, torch_dtype(case.shape.dtype)
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    seq_lens = [cached + new if new else 0 for cached, new in case.rows]
    num_blocks = [-(-length // block_size) for length in seq_lens]
    free = (1 + torch.randperm(sum(num_blocks), generator=generator)).tolist()
    k_cache = torch.full((1 + sum(num_blocks), block_size, shape.num_kv_heads, shape.head_dim), torch.nan, dtype=dtype)
    v_cache = torch.full((*k_cache.shape[:3], shape.v_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(case.rows), max(1, *num_blocks)), UNUSED, dtype=torch.int32)
    for row, ((cached, _), length) in enumerate(zip(case.rows, seq_lens, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(num_blocks[row])], dtype=torch.int32)
        window = shape.sliding_window or length
        first_block = max(0, cached + 1 - window) // block_size  # those before may have been given away
        tables[row, first_block : len(blocks)] = blocks[first_block:]
        where = torch.arange(min(first_block * block_size, length), length)
        slots = blocks[where // block_size].long(), where % block_size
        k_cache[slots] = normal(len(where), shape.num_kv_heads, shape.head_dim)
        v_cache[slots] = normal(len(where), shape.num_kv_heads, shape.v_dim)
    starts = torch.tensor([0, *(new for _, new in case.rows)]).cumsum(0).int()
    between = torch.full((case.num_tokens, shape.q_stride), torch.nan, dtype=dtype)
    q = between[:, : shape.num_heads * shape.head_dim].view(case.num_tokens, shape.num_heads, shape.head_dim)
    q[: int(starts[-1])] = normal(int(starts[-1]), shape.num_heads, shape.head_dim)
    return Batch(
        q=q,
        k_cache=k_cache,
        v_cache=k_cache[..., : shape.v_dim] if shape.values_in_keys else v_cache,
        tables=tables,
        starts=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slopes=torch.rand(shape.num_heads, generator=generator).to(torch_dtype(shape.alibi_dtype))
        if shape.alibi
        else None,
        sinks=torch.randn(shape.num_heads, generator=generator) if shape.sinks else None,
    )


def reference(batch: Batch, shape: AttentionShape) -> Tensor:
    return paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.tables,
        batch.starts,
        batch.seq_lens,
        scale=shape.scale,
        sliding_window=shape.sliding_window,
        alibi=None if batch.slopes is None else Alibi(batch.slopes, shape.alibi == "scaled"),
        softcap=shape.softcap,
        sinks=batch.sinks,
    )


def specs_of(case: Case, max_num_seqs: int) -> AttentionSpecs:
    return attention_specs(
        case.shape, max_num_seqs=max_num_seqs, arch=kernel_arch(), chunk=case.chunk, decode=case.decode
    )


@cache
def _loader() -> KernelLoader:
    return triton_loader(Path(_directory().name))


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a directory that lasts, since interpreted kernels read their source when they run."""
    return tempfile.TemporaryDirectory()


class Subject:
    """The kernels of a case in buffers for batches as large as its own."""

    def __init__(self, case: Case):
        max_num_seqs = len(case.rows)
        self.case, specs = case, specs_of(case, max_num_seqs)
        sizes = {"token_budget": case.num_tokens, "max_num_seqs": max_num_seqs, "num_sms": case.num_sms}
        self.plan = AttentionPlan(specs, _loader().load, **sizes, device=CPU)
        self.attention = AttentionKernel(specs, _loader().load, self.plan)

    def __call__(self, batch: Batch) -> Tensor:
        """Fills every buffer with poison, then runs: values that are read must have been written for this batch."""
        plan = self.plan
        for lists in (plan.counts, plan.chunk_tiles, plan.decode_tiles, plan.shares, plan.arrivals):
            lists.fill_(-(10**6))
        for parts in (plan.part, plan.part_best, plan.part_total):
            parts.fill_(torch.nan)
        plan(batch.starts, batch.seq_lens)
        return self.attend(batch)

    def attend(self, batch: Batch) -> Tensor:
        """Runs without planning again, as another layer would."""
        out = torch.full((*batch.q.shape[:2], batch.v_cache.shape[-1]), torch.nan, dtype=batch.q.dtype)
        inputs = (batch.q, batch.k_cache, batch.v_cache, batch.tables, batch.starts, batch.seq_lens)
        self.attention(*inputs, out, slopes=batch.slopes, sinks=batch.sinks)
        return out


def worst_difference(cases: list[Case]) -> list[float]:
    """Returns the largest difference of each case's output from the reference; infinite where an output is NaN."""
    found = []
    for case in cases:
        batch = make_batch(case)
        difference = (Subject(case)(batch).float() - reference(batch, case.shape).float()).abs()
        found.append(float(difference.nan_to_num(torch.inf).max()) if difference.numel() else 0.0)
    return found


def differences_of_one_subject(case: Case, batches: list[Rows]) -> list[float]:
    """Returns the differences of many batches in the same buffers, all with as many tokens as ``case``."""
    subject, found = Subject(case), []
    for seed, rows in enumerate(batches):
        padding = case.num_tokens - sum(new for _, new in rows)
        batch = make_batch(replace(case, rows=rows, num_padding=padding, seed=seed))
        difference = (subject(batch).float() - reference(batch, case.shape).float()).abs()
        found.append(float(difference.nan_to_num(torch.inf).max()))
    return found


def plans(case: Case, batches: list[Rows]) -> list[dict[str, list[Any]]]:
    """Returns the work lists that the plan kernel makes for each batch, in the same buffers."""
    plan, found = Subject(case).plan, []
    for rows in batches:
        for name in ("counts", "chunk_tiles", "decode_tiles", "shares"):
            getattr(plan, name).fill_(-(10**6))
        starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).int()
        plan(starts, torch.tensor([cached + new if new else 0 for cached, new in rows]).int())
        names = ("counts", "chunk_tiles", "decode_tiles", "shares")
        found.append({name: getattr(plan, name).tolist() for name in names})
    return found


def draw_rows(rng: Random, kind: str, num_seqs: int, block_size: int) -> Rows:
    """Draws a batch whose lengths lie near the edges of blocks.

    ``kind`` says whether it has decodes, chunks, both, or one decode of a long sequence.
    """
    edges = [0, 0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size, 14, 15, 16, 17, 40]
    new = {
        "decodes": [0, 1, 1, 1, 2, 8],
        "chunks": [9, 16, 17, 33],
        "mixed": [0, 1, 1, 2, 8, 9, 20],
        "long": [1],
    }[kind]
    if kind == "long":
        return [(rng.randint(100, 300), 1)] + [(0, 0)] * (num_seqs - 1)
    return [(rng.choice(edges), rng.choice(new)) for _ in range(num_seqs)]
