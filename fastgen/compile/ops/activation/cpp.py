"""The C++ kernel of :mod:`~fastgen.compile.ops.activation.reference`, plain and gated."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.prepared_rows import RowFormat


def activation_spec(
    kind: str,
    arch: str,
    *,
    gated: bool,
    rows: RowFormat | None = None,
    num_features: int | None = None,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel of :func:`~fastgen.compile.ops.activation.reference.activate`, or with ``gated`` of
    :func:`~fastgen.compile.ops.activation.reference.activate_and_multiply`, for rows of any length in fp32.

    ``kind`` is a key of :data:`~fastgen.compile.ops.activation.reference.ACTIVATIONS`; names of one function share a
    kernel. Given ``rows`` it writes results of ``num_features``, the only length then, as linear layers read them.
    """
    function = ACTIVATIONS[kind]
    first_name = next(name for name, other in ACTIVATIONS.items() if other is function)
    parameters: dict[str, Value] = {"row_format": None}
    if rows is not None:
        assert num_features is not None, "a whole row is prepared at once"
        parameters = rows.parameters(num_features) | {"num_features": num_features}
    return KernelSpec(
        "activation",
        "cpp",
        {
            "kind": "tanh_gelu" if function is ACTIVATIONS["gelu_new"] else first_name,
            "gated": gated,
            **parameters,
            "arch": arch,
        },
        (
            Argument("x", "fp32", "in"),
            Argument("out", "fp32" if rows is None else "u8", "out"),
            *(Argument(name, "i64", "scalar") for name in ("num_rows", "num_features", "x_stride")),
        ),
        needed_by=needed_by,
    )


class ActivationKernel:
    """Launches a kernel of :func:`activation_spec`, made for the same ``rows``."""

    def __init__(self, kernel: Kernel, rows: RowFormat | None = None):
        self._kernel, self._rows = kernel, rows
        self._width = 2 if kernel.spec.parameters["gated"] else 1

    def __call__(self, x: Tensor) -> Tensor:
        """Takes ``x [T, F]``, or ``[T, 2F]`` with the gate in the first half; each row is contiguous. Returns ``[T,
        F]``, or prepared rows.
        """
        sizes = (len(x), x.shape[1] // self._width)
        out = x.new_empty(sizes) if self._rows is None else self._rows.empty(*sizes, x.device)
        self._kernel((), x, out, *sizes, x.stride(0))
        return out
