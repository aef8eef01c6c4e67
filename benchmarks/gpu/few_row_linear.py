"""Few-row linear layers on a GPU, beside cuBLAS and this machine's own copy bandwidth.

    python benchmarks/gpu/few_row_linear.py --json few_row_linear.json

First a numeric gate: every format must equal the torch reference, else nothing is measured. Then the layers of a
Llama-2-7B shape at several numbers of rows: 16-bit weights in each way of cutting that the kernels list, weights in few
bits in the default one, and torch's own bf16 product. Rates count the weights alone, read once. Each replay goes
through weights that together exceed every cache. Without a GPU, `--toy` with TRITON_INTERPRET=1 runs the gate alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from attention import machine_limits
from elementwise import num_copies, rotated_seconds, write_results
from torch import Tensor

from fastgen.compile import device as devices
from fastgen.compile.build_triton import TritonBuilder, triton_arch
from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.few_row_linear import (
    FewRowFormat,
    FewRowLinear,
    FewRowShape,
    FewRowWeight,
    SplitK,
    candidate_splits,
    few_row_linear,
    few_row_specs,
    few_row_weight,
)
from fastgen.compile.spec import torch_dtype

GATE_TOLERANCE = 4e-2  # of bf16 answers of size 1 to 4
FORMATS: tuple[FewRowFormat, ...] = get_args(FewRowFormat)
LAYERS = {"qkv": (12288, 4096), "output": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008)}
TOY = FewRowShape(48, 104, "fp16", bias=True)


class Subject:
    """A layer's kernels, cut as ``split`` says, for ``num_rows`` rows."""

    def __init__(self, shape: FewRowShape, num_rows: int, split: SplitK, loader: KernelLoader, where: torch.device):
        specs = few_row_specs(shape, num_rows, split)
        reduce = specs.reduce and loader.load(specs.reduce)
        workspace = torch.empty(specs.workspace_numel(num_rows), device=where) if reduce else None
        self.kernel = FewRowLinear(loader.load(specs.main), reduce, workspace)
        dtype = torch_dtype(shape.dtype)
        self.x = torch.randn(num_rows, shape.in_features, dtype=dtype, device=where)
        self.bias = torch.randn(shape.out_features, dtype=dtype, device=where) if shape.bias else None
        self.out = torch.empty(num_rows, shape.out_features, dtype=dtype, device=where)

    def __call__(self, weight: FewRowWeight) -> None:
        self.kernel(self.x, weight, self.bias, self.out)

    def difference(self, weight: FewRowWeight) -> float:
        """The largest, between the answer and the torch reference's."""
        self(weight)
        return float((self.out.float() - few_row_linear(self.x, weight, self.bias)).abs().max())


def weight_of(shape: FewRowShape, where: torch.device) -> Tensor:
    weight = torch.randn(shape.out_features, shape.in_features, device=where) * shape.in_features**-0.5
    return weight.to(torch_dtype(shape.dtype))


def gate(shape: FewRowShape, loader: KernelLoader, num_sms: int, where: torch.device) -> float:
    """The largest difference over formats, cuts and row tiles. Raises where it is too large."""
    torch.manual_seed(1)
    worst, arch = 0.0, loader.builder.arch
    for weight_format in FORMATS:
        here = replace(shape, weight=weight_format)
        weight = few_row_weight(weight_of(here, where), weight_format)
        for num_rows in (1, 17, 64):
            for split in candidate_splits(here, num_rows, arch, num_sms):
                difference = Subject(here, num_rows, split, loader, where).difference(weight)
                if not difference <= GATE_TOLERANCE:
                    raise SystemExit(
                        f"{here} with {split} differs from the torch reference by {difference:.1e}: nothing is measured"
                    )
                worst = max(worst, difference)
    return worst


def measure(
    name: str, shape: FewRowShape, num_rows: int, limits: dict[str, float], loader: KernelLoader, device: devices.Device
) -> list[dict[str, Any]]:
    """A row for each way of cutting; for weights in few bits, the default one alone."""
    where, arch, num_sms = device.torch_device, loader.builder.arch, device.num_sms or 1
    first = few_row_weight(weight_of(shape, where), shape.weight)
    copies = range(1, num_copies(first.size_bytes))
    weights = [first, *(FewRowWeight(shape.weight, first.codes.clone(), first.scale) for _ in copies)]
    cases = []

    def note(what: str, time: float, split: SplitK | None) -> None:
        rate = first.size_bytes / time
        case = {"layer": name, "weight": shape.weight, "num_rows": num_rows, "by": what}
        case |= {"split": split and asdict(split), "seconds": time, "bytes_per_s": rate}
        cases.append(case | {"fraction_of_copy": rate / limits["copy_bytes_per_s"]})

    splits = candidate_splits(shape, num_rows, arch, num_sms)
    for split in splits if shape.weight == "plain" else splits[:1]:
        subject = Subject(shape, num_rows, split, loader, where)
        runs = [lambda weight=weight, subject=subject: subject(weight) for weight in weights]
        note("default" if split == splits[0] else "candidate", rotated_seconds(runs), split)
    if shape.weight == "plain":
        x = torch.randn(num_rows, shape.in_features, dtype=first.codes.dtype, device=where)
        note("torch", rotated_seconds([lambda weight=weight: F.linear(x, weight.codes) for weight in weights]), None)
    return cases


def describe(case: dict[str, Any]) -> str:
    split = case["split"]
    cut = " {block_n} × {block_k}, {num_splits} splits, {num_stages} stages".format(**split) if split else ""
    return (
        f"{case['layer']:11} {case['weight']:5} {case['num_rows']:2} rows: {case['seconds'] * 1e6:6.1f} µs, "
        f"{case['fraction_of_copy']:.2f} of a copy's rate: {case['by']}{cut}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--toy", action="store_true", help="only the numeric gate, interpreted on a CPU")
    options = parser.parse_args(arguments)
    if options.toy:
        found = gate(TOY, KernelLoader(TritonBuilder("interpret")), 4, torch.device("cpu"))
        print(f"numeric gate passed: differs by {found:.1e} at most")
        return 0
    if not torch.cuda.is_available():
        print(
            "no GPU here: few-row linear is measured on a machine that has one; --toy runs the numeric gate",
            file=sys.stderr,
        )
        return 2
    device = devices.current("cuda")
    loader = KernelLoader(TritonBuilder(triton_arch(device)))
    difference = gate(FewRowShape(4096, 4096, "bf16", bias=True), loader, device.num_sms or 1, device.torch_device)
    limits = machine_limits()
    print(f"{device.name}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s; gate passed at {difference:.1e}")
    cases = []
    for name in options.layers:
        for weight_format in options.formats:
            for num_rows in options.rows:
                shape = FewRowShape(*LAYERS[name], "bf16", weight_format)
                found = measure(name, shape, num_rows, limits, loader, device)
                print(*map(describe, found), sep="\n", flush=True)
                cases += found
    if options.json:
        write_results(options.json, device, limits=limits, gate_difference=difference, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
