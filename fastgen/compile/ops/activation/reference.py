"""Pointwise activations of the feed-forward part, plain and gated, by the names ``config.json`` files use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": _squared_relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
}


def activate(x: Tensor, kind: str) -> Tensor:
    """``act(x)``, elementwise; ``kind`` is a key of :data:`ACTIVATIONS`."""
    return ACTIVATIONS[kind](x)


def activate_and_multiply(gate_up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` (Shazeer, 2020) for ``gate_up [T, 2F]`` with the gate in the first half; ``[T, F]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


def activation_spec(kind: str, arch: str, *, gated: bool, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The C++ kernel of :func:`activate`, or where it is ``gated`` of :func:`activate_and_multiply`, for rows of any
    length in fp32. ``kind`` is a key of :data:`ACTIVATIONS`; those of one function share a kernel.
    """
    function = ACTIVATIONS[kind]
    first_name = next(name for name, other in ACTIVATIONS.items() if other is function)
    return KernelSpec(
        "activation",
        "cpp",
        {"kind": "tanh_gelu" if function is _tanh_gelu else first_name, "gated": gated, "arch": arch},
        (
            Argument("x", "fp32", "in"),
            Argument("out", "fp32", "out"),
            *(Argument(name, "i64", "scalar") for name in ("num_rows", "num_features", "x_stride")),
        ),
        needed_by=needed_by,
    )


class ActivationKernel:
    """Launches a kernel of :func:`activation_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._width = 2 if kernel.spec.parameters["gated"] else 1

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, F]``, or ``[T, 2F]`` with the gate in the first half, rows contiguous in themselves; ``[T, F]``."""
        out = x.new_empty(len(x), x.shape[1] // self._width)
        self._kernel((), x, out, *out.shape, x.stride(0))
        return out
