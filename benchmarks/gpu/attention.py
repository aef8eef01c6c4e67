"""Measures paged attention, causal prefill and decode, beside the machine's limits and torch's own flash attention.

First a numeric gate: a mixed batch must equal the torch reference. Prefill is reported as a fraction of the GEMM rate,
decode as a fraction of the copy bandwidth. Torch's flash attention gets contiguous keys and values; flash-attn and
FlashInfer are measured where they are installed. The plan, which all layers of a step share, is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import Bench, GateError, Row, Rows
from fastgen.compile.ops.attention.reference import paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.triton import AttentionKernel, AttentionPlan, attention_specs
from fastgen.compile.spec import torch_dtype

GATE_TOLERANCE = 2e-2  # of bf16 answers of size 1
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

    def kv_bytes(self, shape: AttentionShape) -> float:
        """Returns the bytes of keys and values, each read once."""
        features = shape.num_kv_heads * (shape.head_dim + shape.v_dim)
        return float(self.count * (self.cached + self.new) * features * torch_dtype(shape.dtype).itemsize)


PREFILLS = tuple(Sequences(1, 0, length) for length in (4096, 8192, 16384))
DECODES = tuple(
    Sequences(count, length - 1, 1)
    for count, length in (
        *((1, 16384), (1, 65536), (8, 8192), (13, 4096)),
        *((32, 1024), (32, 4096), (256, 512), (256, 2048)),
    )
)


def measure(bench: Bench) -> Rows:
    if bench.toy:
        yield {"case": "numeric gate", "difference": gate(TOY, bench)}
        yield measure_case(TOY, Sequences(1, 0, 20), bench)
        yield measure_case(TOY, Sequences(2, 16, 1), bench)
        return
    shapes = [AttentionShape(32, 8, 128, block_size, "bf16", 128**-0.5) for block_size in (64, 16)]
    for shape in shapes:
        yield {"case": f"numeric gate, blocks of {shape.block_size}", "difference": gate(shape, bench)}
    for case in (*PREFILLS, *DECODES):
        yield bench.attempt(str(case), partial(measure_case, shapes[0], case, bench))
    for case in (PREFILLS[1], DECODES[5], DECODES[6]):
        yield bench.attempt(f"{case}, blocks of 16", partial(measure_case, shapes[1], case, bench))


def build(shapes: Iterable[AttentionShape], sequences: list[Sequences], bench: Bench) -> None:
    """Builds all kernels for batches of these sizes, several at a time."""
    num_seqs, arch = sum(each.count for each in sequences), bench.loader.builder.arch
    found = [attention_specs(shape, max_num_seqs=num_seqs, arch=arch) for shape in shapes]
    bench.loader.build(
        [kernel for specs in found for kernel in (specs.plan, specs.chunks, specs.decodes, specs.combine)]
    )


def measure_case(shape: AttentionShape, sequences: Sequences, bench: Bench) -> Row:
    subject = Subject(shape, [sequences], bench)
    ours, plan = bench.seconds(subject), bench.seconds(subject.run_plan)
    decode = sequences.new == 1
    work = sequences.kv_bytes(shape) if decode else sequences.flops(shape)
    limit = bench.limits.copy_bytes_per_s if decode else bench.limits.gemm_flops_per_s
    fraction = "fraction_of_copy" if decode else "fraction_of_gemm"
    return {
        "case": str(sequences),
        "seconds": ours,
        fraction: work / ours / limit,
        "plan_seconds": plan,
        "bytes_per_s" if decode else "flops_per_s": work / ours,
        "others_seconds": {
            name: bench.attempt(name, partial(_seconds_of, make, shape, sequences, bench)) for name, make in OTHERS
        },
        "shape": asdict(shape),
    }


class Subject:
    """Holds the kernels and one batch of ``sequences``, in blocks scattered over the cache."""

    def __init__(self, shape: AttentionShape, sequences: list[Sequences], bench: Bench):
        rows = [(each.cached, each.new) for each in sequences for _ in range(each.count)]
        self.shape, self.num_tokens = shape, sum(new for _, new in rows)
        where, dtype, loader = bench.where, torch_dtype(shape.dtype), bench.loader
        build([shape], sequences, bench)
        specs = attention_specs(shape, max_num_seqs=len(rows), arch=loader.builder.arch)
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
        inputs = (self.q, self.k_cache, self.v_cache, self.tables, self.starts, self.seq_lens)
        self.attention(*inputs, self.out)

    def difference(self) -> float:
        """Returns the largest difference between the output and the torch reference's."""
        self()
        inputs = (self.q, self.k_cache, self.v_cache, self.tables, self.starts, self.seq_lens)
        expected = paged_attention(*inputs, scale=self.shape.scale, sliding_window=None)
        return float((self.out.float() - expected.float()).abs().max())


def gated(bench: Bench) -> list[Sequences]:
    """Returns a mixed batch for the gate: chunks, decodes, a long decode."""
    return [Sequences(2, 3, 21), Sequences(3, 17, 1), Sequences(1, 40 if bench.toy else 5000, 1)]


def gate(shape: AttentionShape, bench: Bench) -> float:
    """Returns the largest difference over the batch of :func:`gated`. Raises where it is too large."""
    torch.manual_seed(1)
    difference = Subject(shape, gated(bench), bench).difference()
    if not difference <= GATE_TOLERANCE:
        raise GateError(f"attention differs from the torch reference by {difference:.1e}")
    return difference


Make = Callable[[AttentionShape, Sequences, torch.device], Callable[[], Any]]


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
