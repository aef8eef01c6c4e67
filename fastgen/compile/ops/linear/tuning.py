"""Measures how linear layers for few rows are best cut on this device, and whether a library is faster: see
:mod:`fastgen.compile.build.autotune`.

A layer is measured with the op that follows it, which some ways compute too, and for which others launch more kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.build.autotune import Way
from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.linear.finish import Activate, AddAndNorm, Finish
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK, candidate_splits, usual_num_sms
from fastgen.compile.ops.linear.triton import FewRowKernel, LinearKernel, dequantize_spec, few_row_specs
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.spec import KernelSpec, torch_dtype
from fastgen.compile.weights.quantized import QuantizedWeight, quantized

_READ_BYTES = 128 << 20  # of weights, in copies used in turn, so that caches do not hold them
_NUM_POSITIONS = 64  # of the rotary table


def tuned_split(
    shape: FewRowShape, num_rows: int, loader: KernelLoader, device: torch.device, finish: Finish | None = None
) -> SplitK | None:
    """Returns how the kernel for ``num_rows`` rows is cut; ``None`` where the library that torch calls is faster.

    ``device`` holds the layer's weights. ``finish`` is the op that follows.
    """
    arch = loader.builder.arch
    splits = candidate_splits(shape, num_rows, arch, usual_num_sms(arch))
    trial = _Trial(shape, num_rows, finish, loader, device)
    alone = trial.specs_alone()
    ways = []
    for split in splits:
        specs = few_row_specs(shape, num_rows, split, finish=finish)
        main = overlapped(specs.main, arch)
        kernels = (main,) if specs.reduce is None else (main, overlapped(specs.reduce, arch))
        start = partial(trial.start_kernels, kernels, specs.workspace_numel(num_rows), finishes=specs.finishes)
        ways.append(Way({"by": "kernel", **vars(split)}, (*kernels, *(() if specs.finishes else alone)), start))
    if shape.library_serves:
        first = () if shape.weight == "plain" else (dequantize_spec(shape.in_features, shape.weight, shape.dtype),)
        dequantizing = tuple(overlapped(spec, arch) for spec in first)
        ways.append(Way({"by": "library"}, (*dequantizing, *alone), trial.start_library))
    kept = "" if shape.weight == "plain" else f"{shape.weight}, "
    problem = f"few_row_linear {shape.out_features} x {shape.in_features}, {kept}{shape.dtype} to "
    problem += f"{shape.out_dtype or shape.dtype}, {'with' if shape.bias else 'without'} bias, {num_rows} rows"
    problem += "" if finish is None else f", then {finish}"
    place = loader.tuning.choose(problem, ways, may_measure=device.type != "meta")
    return splits[place] if place < len(splits) else None


class _Trial:
    """A layer and the op that follows it, with drawn operands. Each way gets the same values."""

    def __init__(
        self, shape: FewRowShape, num_rows: int, finish: Finish | None, loader: KernelLoader, device: torch.device
    ):
        self._shape, self._num_rows, self._finish = shape, num_rows, finish
        self._loader, self._device, self._dtype = loader, device, torch_dtype(shape.dtype)

    def specs_alone(self) -> tuple[KernelSpec, ...]:
        """Returns the op's own kernels, in the order of their launches."""
        finish, dtype = self._finish, self._shape.dtype
        if finish is None:
            return ()
        if isinstance(finish, Activate):
            specs = [activation_spec(finish.kind, self._out_size(), dtype, gated=finish.gated)]
        elif isinstance(finish, AddAndNorm):
            specs = [norm_spec(norm) for norm in (finish.first, finish.norm) if norm is not None]
        else:
            specs = [qkv_spec(dtype, **vars(finish))]
        return tuple(overlapped(spec, self._loader.builder.arch) for spec in specs)

    def start_kernels(
        self, specs: Sequence[KernelSpec], workspace_numel: int, *, finishes: bool
    ) -> tuple[Callable[[], None], Tensor]:
        """Prepares kernels that compute the layer, and with ``finishes`` the op that follows too."""
        main, *others = (self._loader.load(spec) for spec in specs)
        workspace = torch.empty(workspace_numel, device=self._device) if others else None
        kernel = FewRowKernel(main, others[0] if others else None, workspace)
        if not finishes:
            return self._start_one_by_one(kernel)
        x, weights, bias = self._inputs()
        out, operands = self._empty(self._out_size()), self._operands(len(weights))

        def run() -> None:
            for weight, others_given in zip(weights, operands, strict=True):
                kernel(x, weight, bias, out, **others_given)

        return run, out[:, : self._compared()]

    def start_library(self) -> tuple[Callable[[], None], Tensor]:
        """Prepares the library's product, which the op's own kernels follow."""
        shape = self._shape
        numel = shape.out_features * shape.in_features
        dequantized = torch.empty(numel, dtype=self._dtype, device=self._device)
        return self._start_one_by_one(
            LinearKernel(shape, self._load, torch.empty, lambda rows: None, dequantized=dequantized)
        )

    def _load(self, spec: KernelSpec) -> Kernel:
        return self._loader.load(overlapped(spec, self._loader.builder.arch))

    def _start_one_by_one(self, layer: FewRowKernel | LinearKernel) -> tuple[Callable[[], None], Tensor]:
        x, weights, bias = self._inputs()
        y, out, operands = (
            self._empty(self._shape.out_features),
            self._empty(self._out_size()),
            self._operands(len(weights)),
        )
        follow, result = self._alone(y, out)

        def run() -> None:
            for weight, others_given in zip(weights, operands, strict=True):
                layer(x, weight, bias, y)
                follow(others_given)

        return run, result[:, : self._compared()]

    def _alone(self, y: Tensor, out: Tensor) -> tuple[Callable[[dict[str, Tensor]], None], Tensor]:
        """Returns the launches of the op's own kernels on the layer's outputs ``y``, which take its other operands, and
        the tensor they fill."""
        finish = self._finish
        kernels = [self._loader.load(spec) for spec in self.specs_alone()]
        if finish is None:
            return lambda operands: None, y
        if isinstance(finish, Activate):
            activation = ActivationKernel(kernels[0])
            return lambda operands: activation(y, out), out
        if not isinstance(finish, AddAndNorm):
            qkv = QkvKernel(kernels[0])
            return lambda operands: qkv(y, **operands), y
        *first, last = (NormKernel(kernel) for kernel in kernels)

        def add_and_norm(operands: dict[str, Tensor]) -> None:
            for norm in first:
                norm(y, operands.get("first_norm_weight"), operands.get("first_norm_bias"), y)
            last(y, operands.get("norm_weight"), operands.get("norm_bias"), out, operands["residual"])

        return add_and_norm, out

    def _out_size(self) -> int:
        """Returns the features of a result."""
        halved = isinstance(self._finish, Activate) and self._finish.gated
        return self._shape.out_features // (2 if halved else 1)

    def _compared(self) -> int:
        """Returns how many features of a result are compared: of queries, keys and values the queries, since the others
        are in the cache."""
        finish = self._finish
        if finish is None or isinstance(finish, (Activate, AddAndNorm)):
            return self._out_size()
        return finish.num_heads * finish.head_dim

    def _operands(self, count: int) -> list[dict[str, Tensor]]:
        """Returns what the op takes beside the layer's outputs, for each of ``count`` layers. Each has a residual
        stream of its own: rounding errors of sums would grow from layer to layer, until equal results seem different.
        """
        first = self._first_operands()
        residuals = [{"residual": first["residual"].clone()} if "residual" in first else {} for _ in range(count)]
        return [first | own for own in residuals]

    def _first_operands(self) -> dict[str, Tensor]:
        finish, num_rows, device = self._finish, self._num_rows, self._device
        if finish is None or isinstance(finish, Activate):
            return {}
        generator = torch.Generator(device).manual_seed(1)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        if isinstance(finish, AddAndNorm):
            names = [argument.name for argument in finish.arguments(self._shape.dtype) if argument.name != "out"]
            size = self._shape.out_features
            return {name: drawn(*((num_rows,) if name == "residual" else ()), size).to(self._dtype) for name in names}
        cache = (num_rows, 1, finish.num_kv_heads, finish.head_dim)
        numbers = torch.arange(num_rows, device=device)
        return {
            "positions": (numbers % _NUM_POSITIONS).int(),
            "slots": numbers,
            **{name: torch.zeros(cache, dtype=self._dtype, device=device) for name in ("k_cache", "v_cache")},
            **({"cos_sin": drawn(_NUM_POSITIONS, finish.rotary_dim)} if finish.rotary_dim else {}),
        }

    def _empty(self, num_features: int) -> Tensor:
        dtype = torch_dtype(self._shape.out_dtype or self._shape.dtype)
        return torch.empty(self._num_rows, num_features, dtype=dtype, device=self._device)

    def _inputs(self) -> tuple[Tensor, Sequence[Tensor | QuantizedWeight], Tensor | None]:
        """Returns ``x``, copies of one weight, and the bias."""
        shape, device = self._shape, self._device
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=self._dtype)

        # Outputs have about the size of inputs: residual streams grow by each of them.
        plain = drawn(shape.out_features, shape.in_features) * shape.in_features**-0.5
        weight = plain if shape.weight == "plain" else quantized(plain, shape.weight)
        num_bytes = weight.size_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
        num_copies = 1 if device.type == "cpu" else 1 + -(-_READ_BYTES // num_bytes)
        weights = [weight, *(deepcopy(weight) for _ in range(num_copies - 1))]
        bias = drawn(shape.out_features) if shape.bias else None
        return drawn(self._num_rows, shape.in_features), weights, bias
