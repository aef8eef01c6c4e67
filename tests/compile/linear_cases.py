"""Linear layers in C++ and their reference arithmetic: formats, instruction sets, random weights."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.ops.linear.reference import linear, linear_int4, linear_int8, linear_int8_weight_only
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import quantize_channels, quantize_groups
from fastgen.compile.weights.packed import TILED, PackedWeight, WeightFormat, formats_of
from tests.compile.arches import ARCHES, EMULATED, HERE, NATIVE, loader

FORMATS = formats_of(HERE)
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_dot": torch.bfloat16, "fp16": torch.float16}
ONCE = [
    *((arch, each) for arch in EMULATED for each in TILED),
    *((HERE, each) for each in FORMATS),
    # the best set has the lanes and the dots of those between
    *((arch, each) for arch in NATIVE[1:] if arch not in ("avx512", "avx512vnni") for each in ("fp32", "int8")),
]
# What experts add to a plain layer is the same on every instruction set, so these are enough for the fast tests.
ROUTED_ONCE = [
    *((arch, "int4") for arch in EMULATED),
    *((HERE, each) for each in FORMATS if each in ("fp32", "bf16", "int8", "int4")),
]
ALL = [(arch, each) for arch in ARCHES for each in formats_of(arch)]


def kernels(fast: list[tuple[str, WeightFormat]]) -> list[Any]:
    """Returns all instruction sets and formats as parameters of a test, those of ``fast`` for the fast tests."""
    return [
        pytest.param(each, id="-".join(each), marks=() if each in fast else pytest.mark.slow)
        for each in [*fast, *(each for each in ALL if each not in fast)]
    ]


KERNELS = kernels(ONCE)
# Of the sum of the products' magnitudes. In int8 only the last three operations are rounded, in both alike.
TOLERANCE = {"int8": 1e-7, "int4": 1e-6}
MAX_ROWS, MAX_IN = 300, 5000


class Layer:
    """Holds the kernels of one format for one instruction set, and their reference arithmetic."""

    def __init__(self, arch: str, weight_format: WeightFormat):
        self.arch, self.format = arch, weight_format
        self.kernel = LinearKernel(loader(arch).load(linear_spec(weight_format, arch)), MAX_ROWS, MAX_IN)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        packed = PackedWeight(self.format, *weight.shape, self.arch)
        packed.write(0, weight)
        if bias is not None:
            packed.bias[: len(bias)] = bias
        return packed

    def run(self, x: Tensor, packed: PackedWeight) -> Tensor:
        out = torch.full((len(x), packed.out_features), torch.nan)
        self.kernel(x, packed, out)
        return out

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.format == "int8":
            return linear_int8(x, quantize_channels(weight), bias)
        if self.format == "int4":
            return linear_int4(x, quantize_groups(weight), bias)
        if self.format == "int8_weight_only":
            return linear_int8_weight_only(x, quantize_channels(weight), bias)
        if self.format == "bf16_dot":
            x = x.bfloat16()
        return linear(x.double(), weight.to(FLOATS[self.format]).double(), None if bias is None else bias.double())

    def assert_right(self, found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, where: str) -> None:
        """Returns whether ``found`` is what the reference makes of these."""
        products = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
        error = (found.double() - self.reference(x, weight, bias).double()).abs() / products.clamp(min=1e-30)
        assert not (error > TOLERANCE.get(self.format, 1e-6)).any(), (where, error.max().item())
        assert not found.isnan().any(), where


def draw(seed: int, num_rows: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws rows and weights of very different magnitudes, so that a misplaced value shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features, generator=generator)
    x *= torch.logspace(-2, 2, num_rows)[:, None]
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-2, 1, out_features)[torch.randperm(out_features, generator=generator), None]
    return x, weight, torch.randn(out_features, generator=generator)


SANITIZED = """
#include <cstdlib>
#include <vector>
template <class T>
static T* exactly(size_t count) {  // so that one past the end is found
    T* memory = static_cast<T*>(std::aligned_alloc(alignof(T), count * sizeof(T)));
    for (size_t i = 0; i < count; ++i) memory[i] = T(i % 7) - T(3);
    return memory;
}
static void run(int64_t num_rows, int64_t in_features, int64_t out_features, int64_t num_groups) {
    const int64_t num_panels = num_groups * ((out_features + PANEL - 1) / PANEL);
    const int64_t num_steps = (in_features + UNIT - 1) / UNIT * UNIT / K_STEP, choices_per_row = 2;
    const int64_t x_group_stride = in_features, y_group_stride = out_features;
    const int64_t x_rows = ROUTED ? num_rows : num_rows * num_groups;
    const int64_t y_rows = ROUTED ? num_rows * choices_per_row : num_rows * num_groups;
    const int64_t x_stride = x_rows / num_rows * in_features, y_stride = (ROUTED ? 1 : num_groups) * out_features;
    float *x = exactly<float>(x_rows * in_features), *y = exactly<float>(y_rows * out_features);
    uint8_t* weights = exactly<uint8_t>(num_panels * num_steps * PANEL_BYTES_PER_STEP);
    float *scale = exactly<float>(num_panels * PANEL), *bias = exactly<float>(num_panels * PANEL);
    const int64_t num_k = num_steps * K_STEP, is_prepared = 0;
    const int64_t used_bytes = K_STEP == 2 ? X_PARTS * 2 * num_k : K_STEP == 4 ? num_k + 8 : num_k / 32 * 40;
    const int64_t row_bytes = ((used_bytes / 64 + 1) | 1) * 64;
    const int64_t prepared_rows = !HAS_TILES ? x_rows : (ROUTED ? y_rows : x_rows) + 15;
    uint8_t* workspace = exactly<uint8_t>(prepared_rows * row_bytes);
    int64_t *order = exactly<int64_t>(y_rows), *first_rows = exactly<int64_t>(num_groups + 1);
    for (int64_t group = 0, place = 0; group < num_groups; ++group) {  // of squares, so some groups are empty
        first_rows[group] = place;
        for (int64_t choice = 0; choice < y_rows; ++choice) {
            if (choice * choice % num_groups == group) order[place++] = choice;
        }
        first_rows[group + 1] = place;
    }
    CALL;
    free(x), free(y), free(weights), free(scale), free(bias), free(workspace), free(order), free(first_rows);
}
int main() {
    fastgen_set_num_threads(3);
    for (int64_t num_groups : {1, 3}) {
        for (int64_t num_rows : {1, 2, 5, 12, 13, 25, 101}) {
            for (int64_t in_features : {1, 33, 130, 1024, 2100}) {
                for (int64_t out_features : {1, 16, 33, 200}) run(num_rows, in_features, out_features, num_groups);
            }
        }
    }
    std::puts("done");
}
"""


def sanitize(spec: KernelSpec, directory: Path) -> None:
    """Runs the kernel of :func:`linear_spec` for many sizes under the address and undefined-behaviour sanitizers."""
    arguments, tiles = ", ".join(argument.name for argument in spec.arguments), spec.parameters["tiles"]
    main = SANITIZED.replace("CALL", f"{spec.name}({arguments})").replace("HAS_TILES", "true" if tiles else "false")
    main = main.replace("UNIT", str(tiles or "K_STEP"))
    if not tiles:
        main = main.replace("X_PARTS", "1")
    (directory / "pool.cpp").write_text(render(thread_pool_spec()))
    (directory / "main.cpp").write_text(
        '#include <cstdio>\n#include <type_traits>\nextern "C" int fastgen_set_num_threads(int);\n'
        + render(spec)
        + main.replace("ROUTED", "true" if spec.parameters["routed"] else "false")
    )
    flags = [flag for flag in CppBuilder(str(spec.parameters["arch"])).flags if flag != "-shared"]
    checks = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["g++", *flags, *checks, "main.cpp", "pool.cpp", "-o", "main", "-pthread"]
    subprocess.run(command, cwd=directory, check=True)
    done = subprocess.run(["./main"], cwd=directory, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")
