"""Measures how linear layers for few rows are best cut on this device, and whether a library is faster: see
:mod:`fastgen.compile.build.autotune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.build.autotune import Way
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK, candidate_splits, usual_num_sms
from fastgen.compile.ops.linear.triton import FewRowKernel, FewRowSpecs, LinearKernel, dequantize_spec, few_row_specs
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.spec import torch_dtype
from fastgen.compile.weights.quantized import QuantizedWeight, quantized

_READ_BYTES = 128 << 20  # of weights, in copies used in turn, so that caches do not hold them


def tuned_split(shape: FewRowShape, num_rows: int, loader: KernelLoader, device: torch.device) -> SplitK | None:
    """Returns how the kernel for ``num_rows`` rows is cut; ``None`` where the library that torch calls is faster.

    ``device`` holds the layer's weights.
    """
    arch = loader.builder.arch
    splits = candidate_splits(shape, num_rows, arch, usual_num_sms(arch))
    ways = []
    for split in splits:
        specs = few_row_specs(shape, num_rows, split)
        specs = replace(
            specs,
            main=overlapped(specs.main, arch),
            reduce=None if specs.reduce is None else overlapped(specs.reduce, arch),
        )
        kernels = (specs.main,) if specs.reduce is None else (specs.main, specs.reduce)
        start = partial(_start_kernels, shape, num_rows, specs, loader, device)
        ways.append(Way({"by": "kernel", **vars(split)}, kernels, start))
    if shape.library_serves:
        first = () if shape.weight == "plain" else (dequantize_spec(shape.in_features, shape.weight, shape.dtype),)
        ways.append(Way({"by": "library"}, first, partial(_start_library, shape, num_rows, loader, device)))
    kept = "" if shape.weight == "plain" else f"{shape.weight}, "
    problem = f"few_row_linear {shape.out_features} x {shape.in_features}, {kept}{shape.dtype} to "
    problem += f"{shape.out_dtype or shape.dtype}, {'with' if shape.bias else 'without'} bias, {num_rows} rows"
    place = loader.tuning.choose(problem, ways, may_measure=device.type != "meta")
    return splits[place] if place < len(splits) else None


def _start_kernels(
    shape: FewRowShape, num_rows: int, specs: FewRowSpecs, loader: KernelLoader, device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    reduce = None if specs.reduce is None else loader.load(specs.reduce)
    workspace = torch.empty(specs.workspace_numel(num_rows), device=device) if reduce else None
    kernel = FewRowKernel(loader.load(specs.main), reduce, workspace)
    x, weights, bias = _inputs(shape, num_rows, device)
    out = torch.empty(num_rows, shape.out_features, dtype=torch_dtype(shape.out_dtype or shape.dtype), device=device)

    def run() -> None:
        for weight in weights:
            kernel(x, weight, bias, out)

    return run, out


def _start_library(
    shape: FewRowShape, num_rows: int, loader: KernelLoader, device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    x, weights, bias = _inputs(shape, num_rows, device)
    dequantized = torch.empty(shape.out_features * shape.in_features, dtype=x.dtype, device=device)
    linear = LinearKernel(shape, loader.load, torch.empty, lambda rows: None, dequantized=dequantized)
    out = torch.empty(num_rows, shape.out_features, dtype=x.dtype, device=device)

    def run() -> None:
        for weight in weights:
            linear(x, weight, bias, out)

    return run, out


def _inputs(
    shape: FewRowShape, num_rows: int, device: torch.device
) -> tuple[Tensor, Sequence[Tensor | QuantizedWeight], Tensor | None]:
    """Returns ``x``, copies of one weight, and the bias; the same values each time."""
    generator, dtype = torch.Generator(device).manual_seed(0), torch_dtype(shape.dtype)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    plain = drawn(shape.out_features, shape.in_features)
    weight = plain if shape.weight == "plain" else quantized(plain, shape.weight)
    num_bytes = weight.size_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
    num_copies = 1 if device.type == "cpu" else 1 + _READ_BYTES // num_bytes
    weights = [weight, *(deepcopy(weight) for _ in range(num_copies - 1))]
    return drawn(num_rows, shape.in_features), weights, drawn(shape.out_features) if shape.bias else None
