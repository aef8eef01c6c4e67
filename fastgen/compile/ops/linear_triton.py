"""Linear layers on the ``triton`` target: few rows by kernels of our own, many by the library that torch calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.compile.build import Kernel
from fastgen.compile.ops.few_row_linear import (
    MAX_ROWS,
    FewRowLinear,
    FewRowShape,
    FewRowWeight,
    SplitK,
    default_split,
    few_row_specs,
    row_tile,
    usual_num_sms,
)
from fastgen.compile.recording import library_call
from fastgen.compile.spec import KernelSpec

_TILES = (16, 32, 64)


def row_tiles(shape: FewRowShape, arch: str) -> list[tuple[int, SplitK]]:
    """The numbers of rows that kernels are made for, and how each is cut where nothing was measured."""
    return [(rows, default_split(shape, rows, arch, usual_num_sms(arch))) for rows in _TILES]


class TritonLinear:
    """``x Wᵀ + b`` for any number of rows, the weights as they are stored.

    Which kernel computes a call depends on its number of rows alone. ``split_for(rows)`` says how those for up to so
    many rows are cut, ``None`` where the library is to compute them. ``get_workspace(numel)`` gives room in fp32 for
    the parts of features that are split; calls run one after the other, so they may share it.
    """

    def __init__(
        self,
        shape: FewRowShape,
        load: Callable[[KernelSpec], Kernel],
        get_workspace: Callable[[int], Tensor],
        split_for: Callable[[int], SplitK | None],
        *,
        needed_by: tuple[str, ...] = (),
    ):
        assert shape.weight == "plain", f"{shape}: weights in few bits are packed for few rows only"
        self._widens = shape.out_dtype not in ("", shape.dtype)
        self._few: dict[int, FewRowLinear] = {}
        for rows in _TILES:
            if (split := split_for(rows)) is None:
                assert not self._widens, f"{shape}: the library rounds to the weights' dtype"
                continue
            specs = few_row_specs(shape, rows, split, needed_by=needed_by)
            reduce, workspace = None, None
            if specs.reduce is not None:
                reduce, workspace = load(specs.reduce), get_workspace(specs.workspace_numel(rows))
            self._few[rows] = FewRowLinear(load(specs.main), reduce, workspace)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``x [T, in]``, ``weight [out, in]``, ``bias [out]``, ``out [T, out]``, contiguous."""
        few = self._few.get(row_tile(len(x))) if len(x) <= MAX_ROWS else None
        if few is not None:
            few(x, FewRowWeight("plain", weight, None), bias, out)
        elif self._widens:  # the library would round to the weights' dtype
            for start in range(0, len(x), MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                self(x[rows], weight, bias, out[rows])
        elif bias is None:
            library_call(torch.mm, x, weight.t(), out=out)
        else:
            library_call(torch.addmm, bias, x, weight.t(), out=out)
