"""Measures few-row linear layers beside cuBLAS and the machine's own copy bandwidth.

First a numeric gate: every format must equal the torch reference. Then the layers of a Llama-2-7B shape are timed at
several numbers of rows: 16-bit weights with each split that the kernels list, quantized weights with the default split,
and torch's own bf16 product. Rates count the weights alone, read once. Each replay goes through weights that together
exceed every cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gates import excess, gate, run_repeatedly
from benchmarks.gpu.measuring import Bench, Row, Rows
from fastgen.compile.ops.linear.reference import logits
from fastgen.compile.ops.linear.tiling import FewRowFormat, FewRowShape, SplitK, candidate_splits
from fastgen.compile.ops.linear.triton import FewRowKernel, few_row_specs
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight, quantized

ABSOLUTE, RELATIVE = 8e-3, 1.6e-2  # of bf16 answers, rounded once
FORMATS: tuple[FewRowFormat, ...] = ("plain", *get_args(WeightOnlyFormat))
LAYERS = {"qkv": (12288, 4096), "output": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008)}
ROWS = (1, 8, 32, 64)
TOY = FewRowShape(48, 104, "fp16", bias=True)


def measure(bench: Bench) -> Rows:
    gated = TOY if bench.toy else FewRowShape(4096, 4096, "bf16", bias=True)
    right = []
    for weight in FORMATS:
        shape = replace(gated, weight=weight)
        row = bench.attempt_gate(weight, partial(check_format, shape, bench))
        yield row
        right += [] if "error" in row else [weight]
    if bench.toy:
        yield from measure_layer("toy", TOY, 1, bench)
        return
    for name, sizes in LAYERS.items():
        cases = [(FewRowShape(*sizes, "bf16", weight), num_rows) for num_rows, weight in product(ROWS, right)]
        build(
            ((shape, num_rows, split) for shape, num_rows in cases for split in _measured(shape, num_rows, bench)),
            bench,
        )
        for shape, num_rows in cases:
            try:
                yield from measure_layer(name, shape, num_rows, bench)
            except RuntimeError as error:
                yield {"case": f"{name} × {num_rows}, {shape.weight}", "error": str(error)}
            torch.cuda.empty_cache()


def build(cases: Iterable[tuple[FewRowShape, int, SplitK]], bench: Bench) -> None:
    """Builds all kernels several at a time; building each when it is loaded would take minutes."""
    found = [few_row_specs(*case) for case in cases]
    bench.loader.build([kernel for specs in found for kernel in (specs.main, specs.reduce) if kernel is not None])


def _measured(shape: FewRowShape, num_rows: int, bench: Bench) -> list[SplitK]:
    """Returns the splits to measure: the default, and for 16-bit weights all others too."""
    splits = candidate_splits(shape, num_rows, bench.loader.builder.arch, bench.num_sms)
    return splits if shape.weight == "plain" else splits[:1]


def measure_layer(name: str, shape: FewRowShape, num_rows: int, bench: Bench) -> Rows:
    """Yields a row for each split; for quantized weights only the default."""
    first = weight_of(shape, bench.where)
    size_bytes = first.size_bytes if isinstance(first, QuantizedWeight) else first.nbytes
    weights = [first, *(deepcopy(first) for _ in range(1, bench.num_copies(size_bytes)))]

    def row(by: str, time: float, split: SplitK | None) -> Row:
        rate = size_bytes / time
        return {
            "case": f"{name} × {num_rows}, {shape.weight}, {by}",
            "seconds": time,
            "fraction_of_copy": rate / bench.limits.copy_bytes_per_s,
            "bytes_per_s": rate,
            "split": split and asdict(split),
        }

    splits = _measured(shape, num_rows, bench)
    for split in splits:
        subject = Subject(shape, num_rows, split, bench)
        runs: list[Callable[[], object]] = [partial(subject, weight) for weight in weights]
        yield row("default" if split == splits[0] else "candidate", bench.rotated_seconds(runs), split)
    if isinstance(first, Tensor):
        x = torch.randn(num_rows, shape.in_features, dtype=first.dtype, device=bench.where)
        runs = [partial(F.linear, x, weight) for weight in weights if isinstance(weight, Tensor)]
        yield row("torch", bench.rotated_seconds(runs), None)


class Subject:
    """Holds a layer's kernels for ``num_rows`` rows and one ``split``."""

    def __init__(self, shape: FewRowShape, num_rows: int, split: SplitK, bench: Bench):
        loader, where = bench.loader, bench.where
        specs = few_row_specs(shape, num_rows, split)
        reduce = None if specs.reduce is None else loader.load(specs.reduce)
        self.workspace = torch.empty(specs.workspace_numel(num_rows), device=where) if reduce else None
        self.kernel = FewRowKernel(loader.load(specs.main), reduce, self.workspace)
        dtype = torch_dtype(shape.dtype)
        self.x = torch.randn(num_rows, shape.in_features, dtype=dtype, device=where)
        self.bias = torch.randn(shape.out_features, dtype=dtype, device=where) if shape.bias else None
        self.out = torch.empty(num_rows, shape.out_features, dtype=dtype, device=where)

    def __call__(self, weight: Tensor | QuantizedWeight) -> None:
        self.kernel(self.x, weight, self.bias, self.out)

    def difference(self, weight: Tensor | QuantizedWeight, runs: int) -> float:
        """Returns the largest difference from the torch reference in fp32, in units of what is allowed, after some
        runs. The workspace is NaN before each."""
        workspace = [] if self.workspace is None else [self.workspace]
        run_repeatedly("a few-row linear layer", lambda: self(weight), runs, [self.out, *workspace])
        return excess(self.out, logits(self.x, weight, self.bias), ABSOLUTE, RELATIVE)


def weight_of(shape: FewRowShape, where: torch.device) -> Tensor | QuantizedWeight:
    weight = torch.randn(shape.out_features, shape.in_features, device=where) * shape.in_features**-0.5
    weight = weight.to(torch_dtype(shape.dtype))
    return weight if shape.weight == "plain" else quantized(weight, shape.weight)


def check(shape: FewRowShape, bench: Bench) -> float:
    """Returns the largest difference over formats, splits and row tiles. Raises where it is too large."""
    return max(check_format(replace(shape, weight=weight), bench) for weight in FORMATS)


def check_format(shape: FewRowShape, bench: Bench) -> float:
    """Returns the largest difference of one format."""
    torch.manual_seed(1)
    cases = [
        (shape, num_rows, split)
        for num_rows in (1, 17, 64)
        for split in candidate_splits(shape, num_rows, bench.loader.builder.arch, bench.num_sms)
    ]
    build(cases, bench)
    weight, worst = weight_of(shape, bench.where), 0.0
    for _, num_rows, split in cases:
        difference = Subject(shape, num_rows, split, bench).difference(weight, bench.gate_runs)
        worst = max(worst, gate(f"{shape} with {split}", difference))
    return worst
