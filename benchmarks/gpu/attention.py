"""Paged attention on a GPU: causal prefill and decode, beside what the machine can do and torch's own flash attention.

    python benchmarks/gpu/attention.py --json attention.json

First a numeric gate: a mixed batch must equal the torch reference, else nothing is measured. Then each case, as a
fraction of this machine's own bf16 GEMM rate (prefill) or copy bandwidth (decode), beside torch's flash attention on
contiguous keys and values. Times are medians of replays of a CUDA graph; the plan, which all layers of a step share, is
timed by itself. Without a GPU, `--toy` with TRITON_INTERPRET=1 runs the gate alone, at toy sizes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fastgen.compile import device as devices
from fastgen.compile.build_triton import TritonBuilder, triton_arch
from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.attention import AttentionPlan, PagedAttention, paged_attention
from fastgen.compile.ops.attention_specs import AttentionShape, attention_specs
from fastgen.compile.spec import torch_dtype

GATE_TOLERANCE = 2e-2  # of bf16 answers of size 1
TOY = AttentionShape(4, 2, 16, 16, "fp16", 0.25)


@dataclass(frozen=True)
class Sequences:
    """A step's sequences: ``count`` of them, each with ``cached`` tokens and ``new`` ones."""

    count: int
    cached: int
    new: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.new

    def flops(self, shape: AttentionShape) -> float:
        """Of the two products, counting the keys that each query sees and no more."""
        seen = sum(self.cached + i + 1 for i in range(self.new))
        return 2.0 * self.count * seen * shape.num_heads * (shape.head_dim + shape.v_dim)

    def kv_bytes(self, shape: AttentionShape) -> float:
        """Keys and values, each read once."""
        features = shape.num_kv_heads * (shape.head_dim + shape.v_dim)
        return float(self.count * (self.cached + self.new) * features * torch_dtype(shape.dtype).itemsize)


class Subject:
    """The kernels and one batch of ``sequences``, in blocks scattered over the cache."""

    def __init__(self, shape: AttentionShape, sequences: list[Sequences], loader: KernelLoader, device: devices.Device):
        rows = [(each.cached, each.new) for each in sequences for _ in range(each.count)]
        self.shape, self.num_tokens = shape, sum(new for _, new in rows)
        where, dtype = device.torch_device, torch_dtype(shape.dtype)
        specs = attention_specs(shape, max_num_seqs=len(rows), arch=loader.builder.arch)
        loader.build([specs.plan, specs.chunks, specs.decodes, specs.combine])
        self.plan = AttentionPlan(
            specs,
            loader.load,
            token_budget=self.num_tokens,
            max_num_seqs=len(rows),
            num_sms=device.num_sms or 4,
            device=where,
        )
        self.attention = PagedAttention(specs, loader.load, self.plan)
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
        """The largest, between the answer and the torch reference's."""
        self()
        inputs = (self.q, self.k_cache, self.v_cache, self.tables, self.starts, self.seq_lens)
        expected = paged_attention(*inputs, scale=self.shape.scale, sliding_window=None)
        return float((self.out.float() - expected.float()).abs().max())


def gate(shape: AttentionShape, loader: KernelLoader, device: devices.Device) -> float:
    """The largest difference over a mixed batch: chunks, decodes, a long decode. Raises where it is too large."""
    long = 40 if shape is TOY else 5000
    batch = [Sequences(2, 3, 21), Sequences(3, 17, 1), Sequences(1, long, 1)]
    difference = Subject(shape, batch, loader, device).difference()
    if not difference <= GATE_TOLERANCE:
        raise SystemExit(f"the kernels differ from the torch reference by {difference:.1e}: nothing is measured")
    return difference


def seconds(run: Callable[[], Any]) -> float:
    """The median time of a call, replayed from a CUDA graph so that launching from Python is not part of it."""
    return float(triton.testing.do_bench_cudagraph(run, rep=100, return_mode="median")) / 1e3


def machine_limits() -> dict[str, float]:
    """What this GPU reaches: bytes read and written a second by a copy, and FLOP/s of a large bf16 GEMM."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {
        "copy_bytes_per_s": 2 * source.numel() / seconds(lambda: target.copy_(source)),
        "gemm_flops_per_s": 2 * 8192**3 / seconds(lambda: a @ b),
    }


def flash(shape: AttentionShape, sequences: Sequences) -> Callable[[], Tensor]:
    """Torch's flash attention on the same sizes, keys and values contiguous."""
    size = (sequences.count, shape.num_kv_heads, sequences.cached + sequences.new, shape.head_dim)
    dtype = torch_dtype(shape.dtype)
    k, v = (torch.randn(size, dtype=dtype, device="cuda") for _ in range(2))
    q = torch.randn(size[0], shape.num_heads, sequences.new, shape.head_dim, dtype=dtype, device="cuda")

    def run() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=sequences.new > 1, scale=shape.scale, enable_gqa=True
            )

    return run


def measure(
    shape: AttentionShape,
    sequences: Sequences,
    limits: dict[str, float],
    loader: KernelLoader,
    device: devices.Device,
) -> dict[str, Any]:
    subject = Subject(shape, [sequences], loader, device)
    ours, plan = seconds(subject), seconds(subject.run_plan)
    theirs = seconds(flash(shape, sequences)) if sequences.cached == 0 or sequences.new == 1 else None
    decode = sequences.new == 1
    work = sequences.kv_bytes(shape) if decode else sequences.flops(shape)
    limit = limits["copy_bytes_per_s" if decode else "gemm_flops_per_s"]
    return {
        **asdict(sequences),
        "seconds": ours,
        "plan_seconds": plan,
        "rate": work / ours,
        "unit": "B/s" if decode else "FLOP/s",
        "fraction_of_limit": work / ours / limit,
        "flash_seconds": theirs,
    }


def describe(row: dict[str, Any]) -> str:
    beside = f", torch flash {row['flash_seconds'] * 1e6:,.0f} µs" if row["flash_seconds"] else ""
    return (
        f"{row['count']:4} × {row['cached']:6} cached + {row['new']:5} new: {row['seconds'] * 1e6:9,.0f} µs, "
        f"{row['rate'] / 1e12:7.2f} T{row['unit']}, {row['fraction_of_limit']:.2f} of the limit{beside}"
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs="*", default=[4096, 8192, 16384], help="lengths of one chunk each")
    parser.add_argument(
        "--decodes",
        nargs="*",
        default=["1x16384", "1x65536", "8x8192", "13x4096", "32x1024", "32x4096", "256x512", "256x2048"],
        help="sequences x cached tokens",
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--toy", action="store_true", help="only the numeric gate, interpreted on a CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    decodes = [[int(number) for number in text.split("x")] for text in options.decodes]
    if options.toy:
        loader = KernelLoader(TritonBuilder("interpret"))
        print(f"numeric gate passed: differs by {gate(TOY, loader, devices.current('cpu')):.1e} at most")
        return 0
    if not torch.cuda.is_available():
        print(
            "no GPU here: attention is measured on a machine that has one; --toy runs the numeric gate", file=sys.stderr
        )
        return 2
    device = devices.current("cuda")
    loader = KernelLoader(TritonBuilder(triton_arch(device)))
    shape = AttentionShape(
        options.num_heads,
        options.num_kv_heads,
        options.head_dim,
        options.block_size,
        "bf16",
        options.head_dim**-0.5,
    )
    difference = gate(shape, loader, device)
    limits = machine_limits()
    print(f"{device.name}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, ", end="")
    print(f"bf16 GEMM {limits['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s; gate passed at {difference:.1e}")
    rows = []
    for case in [Sequences(1, 0, n) for n in options.prompts] + [Sequences(s, c - 1, 1) for s, c in decodes]:
        rows.append(measure(shape, case, limits, loader, device))
        print(describe(rows[-1]), flush=True)
    if options.json:
        found = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device.name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "shape": asdict(shape),
            "limits": limits,
            "gate_difference": difference,
            "cases": rows,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
