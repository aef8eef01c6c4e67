"""Measures paged attention, causal prefill and decode, beside the machine's limits and torch's own flash attention.

First a numeric gate for each block size: a mixed batch must equal the torch reference in fp32. Prefill is reported as a
fraction of the GEMM rate, decode as a fraction of the copy bandwidth, for every tiling that tuning would try. Torch's
flash attention gets contiguous keys and values; flash-attn and FlashInfer are measured where they are installed. The
plan, which all layers of a step share, is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gates import excess, gate, run_repeatedly
from benchmarks.gpu.measuring import Bench, Row, Rows
from fastgen.compile.ops.attention.reference import paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling, chunk_tilings, decode_tilings
from fastgen.compile.ops.attention.triton import AttentionKernel, AttentionPlan, AttentionSpecs, attention_specs
from fastgen.compile.spec import torch_dtype

# Rounding to 16 bits may change this much: in bf16 a part of 2^-9, of the answer and of the weights before.
ABSOLUTE, RELATIVE = 8e-3, 1.6e-2
TOY = AttentionShape(4, 2, 16, 16, "fp16", 0.25)


@dataclass(frozen=True)
class Sequences:
    """Describes a step's sequences: ``count`` of them, each with ``cached`` and ``new`` tokens."""

    count: int
    cached: int
    new: int

    def __str__(self) -> str:
        return f"{self.count} × {self.cached} cached + {self.new} new"

    def flops(self, shape: AttentionShape) -> float:
        """Returns the FLOPs of both products, counting only the keys that each query sees."""
        seen = sum(self.cached + i + 1 for i in range(self.new))
        return 2.0 * self.count * seen * shape.num_heads * (shape.head_dim + shape.v_dim)

    def kv_bytes(self, shape: AttentionShape) -> int:
        """Returns the bytes of keys and values, each read once."""
        features = shape.num_kv_heads * (shape.head_dim + shape.v_dim)
        return self.count * (self.cached + self.new) * features * torch_dtype(shape.dtype).itemsize


# Makes another library's attention of the same sizes.
Make = Callable[[AttentionShape, Sequences, torch.device], Callable[[], Any]]
PREFILLS = tuple(Sequences(1, 0, length) for length in (4096, 8192, 16384))
DECODES = tuple(
    Sequences(count, length - 1, 1)
    for count, length in (
        *((1, 16384), (1, 65536), (8, 8192), (13, 4096)),
        *((32, 1024), (32, 4096), (256, 512), (256, 2048)),
    )
)


BLOCK_SIZES = (64, 16, 32, 128)  # tokens; the first one with every tiling and beside other libraries
FEW = (PREFILLS[1], DECODES[1], DECODES[5], DECODES[6])


def measure(bench: Bench) -> Rows:
    sizes = (TOY.block_size,) if bench.toy else BLOCK_SIZES
    cases = (Sequences(1, 0, 20), Sequences(2, 16, 1)) if bench.toy else (*PREFILLS, *DECODES)
    shape = TOY if bench.toy else AttentionShape(32, 8, 128, 64, "bf16", 128**-0.5)
    for block_size in sizes:
        here = replace(shape, block_size=block_size)
        row = bench.attempt_gate(f"blocks of {block_size}", partial(check, here, bench))
        yield row
        if "error" in row:
            continue
        for case in cases if block_size == sizes[0] else FEW:
            yield from _measure_tilings(here, case, bench, every=block_size == sizes[0] and case in (*cases[:1], *FEW))


def _measure_tilings(shape: AttentionShape, sequences: Sequences, bench: Bench, *, every: bool) -> Rows:
    """Yields a row of the default tiling, beside other libraries, and with ``every`` one of each other candidate."""
    arch, is_decode = bench.loader.builder.arch, sequences.new == 1
    tilings = (decode_tilings if is_decode else chunk_tilings)(shape, arch)
    for tiling in tilings if every else tilings[:1]:
        cut = {"decode" if is_decode else "chunk": tiling}
        case = f"{sequences}, blocks of {shape.block_size}"
        if tiling != tilings[0]:
            case += f", {tiling.block_m} × {tiling.block_n}, {tiling.num_warps} warps, {tiling.num_stages} stages"
            case += f", {tiling.programs_per_sm} programs" if is_decode or tiling.programs_per_sm > 1 else ""
            case += f"{', ahead' if tiling.ahead else ''}{', in turn' if tiling.persistent else ''}"
        others = OTHERS if (tiling == tilings[0] and shape.block_size == BLOCK_SIZES[0]) or bench.toy else ()
        yield bench.attempt(case, partial(measure_case, shape, sequences, bench, cut, others))


def build(
    shapes: Iterable[AttentionShape], sequences: list[Sequences], bench: Bench, cut: dict[str, Tiling] | None = None
) -> None:
    """Builds all kernels for batches of these sizes, several at a time."""
    num_seqs, arch = sum(each.count for each in sequences), bench.loader.builder.arch
    found = [_specs(shape, num_seqs, arch, cut) for shape in shapes]
    bench.loader.build([kernel for specs in found for kernel in (specs.plan, specs.chunks, specs.decodes)])


def _specs(shape: AttentionShape, num_seqs: int, arch: str, cut: dict[str, Tiling] | None) -> AttentionSpecs:
    """Returns the kernels as engines launch them."""
    return attention_specs(shape, max_num_seqs=num_seqs, arch=arch, **(cut or {})).overlapped(arch)


def measure_case(
    shape: AttentionShape,
    sequences: Sequences,
    bench: Bench,
    cut: dict[str, Tiling] | None = None,
    others: Sequence[tuple[str, Make]] = (),
) -> Row:
    subject = Subject(shape, [sequences], bench, cut)
    decode = sequences.new == 1
    num_caches = bench.num_copies(sequences.kv_bytes(shape)) if decode else 1
    ours, plan = bench.rotated_seconds(subject.on_caches(num_caches)), bench.seconds(subject.run_plan)
    work = sequences.kv_bytes(shape) if decode else sequences.flops(shape)
    limit = bench.limits.copy_bytes_per_s if decode else bench.limits.gemm_flops_per_s
    fraction = "fraction_of_copy" if decode else "fraction_of_gemm"
    return {
        "seconds": ours,
        fraction: work / ours / limit,
        "plan_seconds": plan,
        "bytes_per_s" if decode else "flops_per_s": work / ours,
        "others_seconds": {
            name: bench.attempt(name, partial(_seconds_of, make, shape, sequences, bench)) for name, make in others
        },
        "kv_bytes": sequences.kv_bytes(shape),
        "shape": asdict(shape),
        "tiling": {kind: asdict(tiling) for kind, tiling in (cut or {}).items()},
    }


class Subject:
    """Holds the kernels and one batch of ``sequences``, in blocks scattered over the cache."""

    def __init__(
        self, shape: AttentionShape, sequences: list[Sequences], bench: Bench, cut: dict[str, Tiling] | None = None
    ):
        rows = [(each.cached, each.new) for each in sequences for _ in range(each.count)]
        self.shape, self.num_tokens = shape, sum(new for _, new in rows)
        where, dtype, loader = bench.where, torch_dtype(shape.dtype), bench.loader
        build([shape], sequences, bench, cut)
        specs = _specs(shape, len(rows), loader.builder.arch, cut)
        self.plan = AttentionPlan(
            specs,
            loader.load,
            token_budget=self.num_tokens,
            max_num_seqs=len(rows),
            num_sms=bench.num_sms,
            device=where,
        )
        self.attention = AttentionKernel(specs, loader.load, self.plan)
        num_blocks = [-(-(cached + new) // shape.block_size) for cached, new in rows]
        order = (1 + torch.randperm(sum(num_blocks))).int().split(num_blocks)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(where)
        size = (1 + sum(num_blocks), shape.block_size, shape.num_kv_heads)
        self.k_cache = torch.randn(*size, shape.head_dim, dtype=dtype, device=where)
        self.v_cache = torch.randn(*size, shape.v_dim, dtype=dtype, device=where)
        self.starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).int().to(where)
        self.seq_lens = torch.tensor([cached + new for cached, new in rows]).int().to(where)
        self.q = torch.randn(self.num_tokens, shape.num_heads, shape.head_dim, dtype=dtype, device=where)
        self.out = torch.empty(self.num_tokens, shape.num_heads, shape.v_dim, dtype=dtype, device=where)
        self.run_plan()

    def run_plan(self) -> None:
        self.plan(self.starts, self.seq_lens)

    def __call__(self) -> None:
        self._attend(self.k_cache, self.v_cache)

    def _attend(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.attention(self.q, k_cache, v_cache, self.tables, self.starts, self.seq_lens, self.out)

    def on_caches(self, count: int) -> list[Callable[[], None]]:
        """Returns calls that do the same, each on keys and values of its own, which the device's caches do not hold."""
        more = [(self.k_cache.clone(), self.v_cache.clone()) for _ in range(count - 1)]
        return [partial(self._attend, *each) for each in ((self.k_cache, self.v_cache), *more)]

    def difference(self, runs: int) -> float:
        """Returns the largest difference from the torch reference in fp32, in units of what is allowed, after some
        runs. The blocks that no sequence has are NaN, and so are the parts and the output before each run.
        """
        self.k_cache[0], self.v_cache[0] = torch.nan, torch.nan
        parts = (self.plan.part, self.plan.part_best, self.plan.part_total)
        run_repeatedly("attention", self, runs, [self.out, *parts])
        q, k_cache, v_cache = (each.float() for each in (self.q, self.k_cache, self.v_cache))
        expected = paged_attention(
            q, k_cache, v_cache, self.tables, self.starts, self.seq_lens, scale=self.shape.scale, sliding_window=None
        )
        return excess(self.out, expected, ABSOLUTE, RELATIVE)


def gated(bench: Bench) -> list[Sequences]:
    """Returns a mixed batch for the gate: chunks, decodes, a long decode."""
    return [Sequences(2, 3, 21), Sequences(3, 17, 1), Sequences(1, 40 if bench.toy else 5000, 1)]


def check(shape: AttentionShape, bench: Bench) -> float:
    """Returns the largest difference over the batch of :func:`gated`. Raises where it is too large."""
    torch.manual_seed(1)
    return gate("attention", Subject(shape, gated(bench), bench).difference(bench.gate_runs))


def _seconds_of(make: Make, shape: AttentionShape, sequences: Sequences, bench: Bench) -> Row:
    return {"seconds": bench.seconds(make(shape, sequences, bench.where))}


def torch_flash(shape: AttentionShape, sequences: Sequences, where: torch.device) -> Callable[[], Tensor]:
    """Measures torch's flash attention on the same sizes, with contiguous keys and values."""
    q, k, v = (each.transpose(1, 2).contiguous() for each in _contiguous(shape, sequences, where))
    backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    if where.type == "cpu":
        backends.append(torch.nn.attention.SDPBackend.MATH)

    def run() -> Tensor:
        with torch.nn.attention.sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=sequences.new > 1, scale=shape.scale, enable_gqa=True
            )

    return run


def flash_attn(shape: AttentionShape, sequences: Sequences, where: torch.device) -> Callable[[], Tensor]:
    """Measures the flash-attn package, likewise."""
    from flash_attn import flash_attn_func

    q, k, v = _contiguous(shape, sequences, where)
    return partial(flash_attn_func, q, k, v, softmax_scale=shape.scale, causal=True)


def flashinfer(shape: AttentionShape, sequences: Sequences, where: torch.device) -> Callable[[], Tensor]:
    """Measures FlashInfer's paged attention over consecutive blocks, planned beforehand."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    count, length, block_size = sequences.count, sequences.cached + sequences.new, shape.block_size
    num_blocks = -(-length // block_size)
    q = _contiguous(shape, sequences, where)[0].flatten(0, 1)
    size = (count * num_blocks, 2, block_size, shape.num_kv_heads, shape.head_dim)
    cache = torch.randn(size, dtype=q.dtype, device=where)
    steps = torch.arange(count + 1, dtype=torch.int32, device=where)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=where), "NHD")
    wrapper.plan(
        steps * sequences.new,
        steps * num_blocks,
        torch.arange(count * num_blocks, dtype=torch.int32, device=where),
        torch.full((count,), (length - 1) % block_size + 1, dtype=torch.int32, device=where),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        block_size,
        causal=True,
        sm_scale=shape.scale,
        q_data_type=q.dtype,
    )
    return partial(wrapper.run, q, cache)


OTHERS: tuple[tuple[str, Make], ...] = (
    ("torch flash", torch_flash),
    ("flash-attn", flash_attn),
    ("FlashInfer", flashinfer),
)


def _contiguous(shape: AttentionShape, sequences: Sequences, where: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, ``[count, length, heads, features]``."""
    count, new, length = sequences.count, sequences.new, sequences.cached + sequences.new
    dtype = torch_dtype(shape.dtype)

    def drawn(tokens: int, heads: int, features: int) -> Tensor:
        return torch.randn(count, tokens, heads, features, dtype=dtype, device=where)

    k, v = (drawn(length, shape.num_kv_heads, features) for features in (shape.head_dim, shape.v_dim))
    return drawn(new, shape.num_heads, shape.head_dim), k, v
