"""Measures mixtures of experts: routing, sorting, both grouped products and the sum, beside the machine's limits.

First a numeric gate: a mixture must equal its torch reference. Then shapes of published models are timed at several
numbers of tokens, on random logits. The products' limit is the larger of two times: that of their FLOPs at the
machine's own bf16 GEMM rate, and that of reading the chosen experts' weights at its copy bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.gates import excess, gate, run_repeatedly
from benchmarks.gpu.measuring import Bench, Limits, Row, Rows
from fastgen.compile.ops.activation.reference import activate_and_multiply
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.experts.reference import combine, route, sort_by_expert
from fastgen.compile.ops.experts.tiling import grouped_tiling
from fastgen.compile.ops.experts.triton import (
    CombineKernel,
    GroupedLinearKernel,
    RouteKernel,
    SortKernel,
    combine_spec,
    grouped_linear_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.linear.reference import grouped_linear
from fastgen.compile.spec import torch_dtype

# bf16 answers, rounded after each of three products, may differ by this; the second is a part of answers above 1.
ABSOLUTE, RELATIVE = 2e-2, 1.6e-2


@dataclass(frozen=True)
class Shape:
    """Describes a mixture with ``inner`` features in an expert, gated by SiLU."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    dtype: str = "bf16"


SHAPES = (
    Shape("8 of 14336, 2 a token", 4096, 14336, 8, 2),
    Shape("128 of 768, 8 a token", 2048, 768, 128, 8),
    Shape("256 of 512, 8 a token", 2048, 512, 256, 8),
)
TOKENS = (1, 32, 256, 2048, 8192)
TOY = Shape("toy", 48, 32, 5, 2, "fp16")


class Subject:
    """Holds one mixture on ``num_tokens`` tokens: its steps by name, in order."""

    def __init__(self, shape: Shape, num_tokens: int, bench: Bench):
        loader, where = bench.loader, bench.where
        self.shape, self.num_tokens = shape, num_tokens
        hidden, inner, num_experts, top_k = shape.hidden, shape.inner, shape.num_experts, shape.top_k
        dtype, num_choices = torch_dtype(shape.dtype), num_tokens * top_k
        self.options: dict[str, Any] = {"top_k": top_k, "scoring": "softmax", "normalize": True}
        tiling = grouped_tiling(shape.dtype, loader.builder.arch, num_choices / num_experts)
        specs = [
            route_spec(num_experts, **self.options),
            sort_spec(num_experts, tiling.block_m),
            grouped_linear_spec(hidden, 2 * inner, shape.dtype, tiling, top_k=top_k),
            activation_spec("silu", inner, shape.dtype, gated=True),
            grouped_linear_spec(inner, hidden, shape.dtype, tiling, scatters=True),
            combine_spec(hidden, top_k, shape.dtype),
        ]
        loader.build(specs)
        routing, sorting, inward, activation, down, summing = (loader.load(spec) for spec in specs)
        router, activate, add = RouteKernel(routing), ActivationKernel(activation), CombineKernel(summing)
        sort = SortKernel(sorting, max_choices=num_choices, device=where)
        to_inner, to_hidden = GroupedLinearKernel(inward), GroupedLinearKernel(down)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device=where) * scale).to(dtype)

        self.x, self.logits = normal(num_tokens, hidden), torch.randn(num_tokens, num_experts, device=where)
        self.inward = normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.down = normal(num_experts, hidden, inner, scale=inner**-0.5)
        experts = torch.zeros(num_tokens, top_k, dtype=torch.int32, device=where)
        weights = torch.zeros(num_tokens, top_k, device=where)
        both, made, outputs = (normal(num_choices, size) for size in (2 * inner, inner, hidden))
        self.out = torch.empty_like(self.x)
        self.outputs = [experts, weights, both, made, outputs, self.out]
        self.steps: dict[str, Callable[[], object]] = {
            "route": lambda: router(self.logits, None, experts, weights),
            "sort": lambda: sort(experts),
            "inward": lambda: to_inner(self.x, self.inward, None, sort.tiles, num_choices, both),
            "activation": lambda: activate(both, made),
            "down": lambda: to_hidden(made, self.down, None, sort.tiles, num_choices, outputs),
            "combine": lambda: add(outputs, weights, self.out),
        }

    def __call__(self) -> None:
        for step in self.steps.values():
            step()

    def difference(self, runs: int) -> float:
        """Returns the largest difference from the torch reference in fp32, in units of what is allowed, after some
        runs."""
        run_repeatedly("the mixture", self, runs, self.outputs)
        experts, weights = route(self.logits, None, **self.options)
        order, counts = sort_by_expert(experts, self.shape.num_experts)
        x, inward, down = (each.float() for each in (self.x, self.inward, self.down))
        both = grouped_linear(x[order // self.shape.top_k], inward, None, counts)
        outputs = grouped_linear(activate_and_multiply(both, "silu"), down, None, counts)
        return excess(self.out, combine(outputs, order, weights), ABSOLUTE, RELATIVE)

    def least_seconds(self, limits: Limits) -> float:
        """Returns the least time of the products, by the machine's limits."""
        weights = self.shape.hidden * self.shape.inner * 3
        experts, _ = route(self.logits, None, **self.options)
        used = len(experts.unique())
        computing = 2 * self.num_tokens * self.shape.top_k * weights / limits.gemm_flops_per_s
        reading = used * weights * self.x.dtype.itemsize / limits.copy_bytes_per_s
        return max(computing, reading)


def check(shape: Shape, num_tokens: int, bench: Bench) -> float:
    """Returns the largest difference from the reference. Raises where it is too large."""
    torch.manual_seed(1)
    return gate("the mixture", Subject(shape, num_tokens, bench).difference(bench.gate_runs))


def measure(bench: Bench) -> Rows:
    shapes, all_tokens = ((TOY,), (9,)) if bench.toy else (SHAPES, TOKENS)
    num_gated = 9 if bench.toy else 100
    for shape in shapes:
        row = bench.attempt_gate(shape.name, partial(check, shape, num_gated, bench))
        yield row
        if "error" in row:
            continue
        for num_tokens in all_tokens:
            yield bench.attempt(f"{shape.name} × {num_tokens}", partial(measure_case, shape, num_tokens, bench))


def measure_case(shape: Shape, num_tokens: int, bench: Bench) -> Row:
    subject = Subject(shape, num_tokens, bench)
    subject()
    found = {name: bench.seconds(step) for name, step in subject.steps.items()}
    return {
        "seconds": bench.seconds(subject),
        "fraction_of_limit": subject.least_seconds(bench.limits) / (found["inward"] + found["down"]),
        "seconds_of": found,
    }
