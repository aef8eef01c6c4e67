"""Linear layers on the ``triton`` target: few rows by kernels of our own, many by the library that torch calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.linear.few_row import (
    MAX_ROWS,
    FewRowLinear,
    FewRowShape,
    SplitK,
    default_split,
    few_row_specs,
    row_tile,
    usual_num_sms,
)
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.quantized import DequantizeKernel, QuantizedWeight, dequantize_spec

_TILES = (16, 32, 64)
# Of 64 rows that read weights in few bits again, before laying them out whole for the library moves fewer bytes.
_MOST_PIECES = 3


def row_tiles(shape: FewRowShape, arch: str) -> list[tuple[int, SplitK]]:
    """The numbers of rows that kernels are made for, and how each is cut where nothing was measured."""
    return [(rows, default_split(shape, rows, arch, usual_num_sms(arch))) for rows in _TILES]


class TritonLinear:
    """``x Wᵀ + b`` for any number of rows, the weights as they are stored.

    Which kernel computes a call depends on its number of rows alone. ``split_for(rows)`` says how those for up to so
    many rows are cut, ``None`` where the library is to compute them. ``get_workspace(numel)`` gives room in fp32 for
    the parts of features that are split; calls run one after the other, so they may share it, and ``whole``: room for a
    weight in the layer's dtype, where weights in few bits are laid out for the library.
    """

    def __init__(
        self,
        shape: FewRowShape,
        load: Callable[[KernelSpec], Kernel],
        get_workspace: Callable[[int], Tensor],
        split_for: Callable[[int], SplitK | None],
        *,
        whole: Tensor | None = None,
        needed_by: tuple[str, ...] = (),
    ):
        self._shape, self._dequantize, self._whole = shape, None, None
        if shape.weight != "plain" and shape.library_serves:
            assert whole is not None, f"{shape}: the library needs room for the whole weight"
            self._whole = whole[: shape.out_features * shape.in_features].view(shape.out_features, shape.in_features)
            spec = dequantize_spec(shape.in_features, shape.weight, shape.dtype, needed_by=needed_by)
            self._dequantize = DequantizeKernel(load(spec))
        self._few: dict[int, FewRowLinear] = {}
        for rows in _TILES:
            if (split := split_for(rows)) is None:
                assert shape.library_serves, f"{shape}: the library cannot compute it"
                continue
            specs = few_row_specs(shape, rows, split, needed_by=needed_by)
            reduce, workspace = None, None
            if specs.reduce is not None:
                reduce, workspace = load(specs.reduce), get_workspace(specs.workspace_numel(rows))
            self._few[rows] = FewRowLinear(load(specs.main), reduce, workspace)

    def __call__(self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
        """``x [T, in]``, ``weight [out, in]``, ``bias [out]``, ``out [T, out]``, contiguous."""
        few = self._few.get(row_tile(len(x))) if len(x) <= MAX_ROWS else None
        if few is not None:
            few(x, weight, bias, out)
        elif len(x) > MAX_ROWS and self._in_pieces(len(x)):
            for start in range(0, len(x), MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                self(x[rows], weight, bias, out[rows])
        else:
            whole = self._laid_out(weight)
            if bias is None:
                library_call(torch.mm, x, whole.t(), out=out)
            else:
                library_call(torch.addmm, bias, x, whole.t(), out=out)

    def _in_pieces(self, num_rows: int) -> bool:
        """Whether kernels for few rows compute more than they take at once."""
        if not self._shape.library_serves:
            return True
        return self._shape.weight != "plain" and MAX_ROWS in self._few and num_rows <= _MOST_PIECES * MAX_ROWS

    def _laid_out(self, weight: Tensor | QuantizedWeight) -> Tensor:
        """As the library reads it; of weights in few bits until the next layer's are."""
        if isinstance(weight, Tensor):
            return weight
        assert self._dequantize is not None
        assert self._whole is not None
        self._dequantize(weight, self._whole)
        return self._whole
