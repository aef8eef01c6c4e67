"""The kernels of linear layers on a GPU, and what they share: how shapes are cut, and workspaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.backends.shapes import ModelShape
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.linear.finish import Finish
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK, default_split, usual_num_sms
from fastgen.compile.ops.linear.triton import LinearKernel
from fastgen.compile.ops.linear.tuning import tuned_split
from fastgen.compile.spec import KernelSpec


@dataclass
class LinearKernels:
    """Makes the kernels of a model's linear layers. Layers are alike, so each shape is tuned once. Quantized weights
    are dequantized into ``dequantized``, one layer's after the other's, where the library multiplies by them."""

    load: Callable[[KernelSpec], Kernel]
    facts: TargetFacts
    loader: KernelLoader | None
    model: ModelShape
    dequantized: Tensor = field(init=False)
    _workspaces: dict[int, Tensor] = field(default_factory=dict)
    _splits: dict[tuple[FewRowShape, Finish | None, int], SplitK | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numel = self.model.max_quantized_numel if self.model.weight_format else 0
        self.dequantized = torch.empty(numel, dtype=self.model.dtype, device=self.model.device)

    def kernel(self, shape: FewRowShape, needed_by: tuple[str, ...], finish: Finish | None = None) -> LinearKernel:
        """Returns the kernels of a layer, which compute the op that follows too where they can."""
        return LinearKernel(
            shape,
            self.load,
            self._workspace,
            partial(self._split, shape, finish),
            dequantized=self.dequantized,
            finish=finish,
            needed_by=needed_by,
        )

    def workspaces(self) -> list[Tensor]:
        """Returns dequantized weights, and parts of split features."""
        return [self.dequantized, *self._workspaces.values()]

    def _split(self, shape: FewRowShape, finish: Finish | None, num_rows: int) -> SplitK | None:
        key, arch = (shape, finish, num_rows), self.facts.arch
        if key not in self._splits:
            self._splits[key] = (
                default_split(shape, num_rows, arch, usual_num_sms(arch))
                if self.loader is None
                else tuned_split(shape, num_rows, self.loader, self.model.device, finish)
            )
        return self._splits[key]

    def _workspace(self, numel: int) -> Tensor:
        if numel not in self._workspaces:
            self._workspaces[numel] = torch.empty(numel, dtype=torch.float32, device=self.model.device)
        return self._workspaces[numel]
