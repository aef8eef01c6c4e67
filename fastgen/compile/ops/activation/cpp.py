"""The C++ kernel of :mod:`~fastgen.compile.ops.activation.reference`, plain and gated."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.spec import Argument, KernelSpec


def activation_spec(kind: str, arch: str, *, gated: bool, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel of :func:`~fastgen.compile.ops.activation.reference.activate`, or with ``gated`` of
    :func:`~fastgen.compile.ops.activation.reference.activate_and_multiply`, for rows of any length in fp32.

    ``kind`` is a key of :data:`~fastgen.compile.ops.activation.reference.ACTIVATIONS`; names of one function share a
    kernel.
    """
    function = ACTIVATIONS[kind]
    first_name = next(name for name, other in ACTIVATIONS.items() if other is function)
    return KernelSpec(
        "activation",
        "cpp",
        {"kind": "tanh_gelu" if function is ACTIVATIONS["gelu_new"] else first_name, "gated": gated, "arch": arch},
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
        """Takes ``x [T, F]``, or ``[T, 2F]`` with the gate in the first half; each row is contiguous. Returns ``[T,
        F]``.
        """
        out = x.new_empty(len(x), x.shape[1] // self._width)
        self._kernel((), x, out, *out.shape, x.stride(0))
        return out
