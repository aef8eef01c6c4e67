"""Pointwise activations of feed-forward layers, plain and gated, by the names in ``config.json`` files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


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
    "gelu_python": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_python_tanh": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "quick_gelu": _quick_gelu,
}


def activate(x: Tensor, kind: str) -> Tensor:
    """Computes ``act(x)``, elementwise; ``kind`` is a key of :data:`ACTIVATIONS`."""
    return ACTIVATIONS[kind](x)


def activate_and_multiply(gate_up: Tensor, kind: str) -> Tensor:
    """Computes ``act(gate) * up`` (Shazeer, 2020) for ``gate_up [T, 2F]`` with the gate in the first half;
    ``[T, F]``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up
