"""The Triton kernel of :mod:`~fastgen.compile.ops.activation.reference`, plain and gated."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.spec import Argument, KernelSpec, power_of_2

_BLOCK = 1024  # outputs of a program, eight for each of its threads


def activation_spec(
    kind: str,
    num_features: int,
    dtype: str,
    *,
    gated: bool,
    x_stride: int = 0,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel of :func:`~fastgen.compile.ops.activation.reference.activate`, or with ``gated`` of
    :func:`~fastgen.compile.ops.activation.reference.activate_and_multiply`, for ``num_features`` outputs a row of
    ``dtype``.

    ``kind`` is a key of :data:`~fastgen.compile.ops.activation.reference.ACTIVATIONS`; names of one function share a
    kernel. Rows of ``x`` begin ``x_stride`` apart; by default they are contiguous. Computed in fp32; with ``gated`` the
    activation is rounded to ``dtype`` before it is multiplied, as in the reference.
    """
    width = num_features * (2 if gated else 1)
    if x_stride and x_stride < width:
        raise ValueError(f"x_stride={x_stride}: rows of {width} features would overlap")
    block = min(_BLOCK, max(32, power_of_2(num_features)))
    return KernelSpec(
        "activation",
        "triton",
        {
            "kind": function_name(kind),
            "gated": gated,
            "F": num_features,
            "dtype": dtype,
            "x_stride": x_stride or width,
            "block": block,
            "tiles": -(-num_features // block),
        },
        (Argument("x", dtype, "in"), Argument("out", dtype, "out")),
        {"num_warps": max(1, block // 256)},
        needed_by=needed_by,
    )


def function_name(kind: str) -> str:
    """Returns the first name of an activation's function, by which templates know it."""
    return next(name for name, other in ACTIVATIONS.items() if other is ACTIVATIONS[kind])


class ActivationKernel:
    """Launches a kernel of :func:`activation_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._tiles = kernel, kernel.spec.parameters["tiles"]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Takes ``x [T, F]``, or ``[T, 2F]`` with the gate in the first half, with rows as far apart as the kernel was
        made for. Writes ``out [T, F]``, contiguous."""
        assert isinstance(self._tiles, int)
        self._kernel((len(out) * self._tiles,), x, out)
