"""The device of tests of Triton kernels: interpreted, or with ``pytest --device cuda`` compiled, on a GPU.

Cases, references and tolerances are the same. On a GPU the tensors of a test stay on the host. Each launch gets copies
of their memory between guards, :data:`REPEATS` times, and must give the same bits each time and leave the guards alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.build.builder import BuiltKernel, Kernel
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder, triton_arch
from fastgen.compile.host.device import current
from fastgen.compile.spec import KernelSpec

DEVICE = os.environ.get("FASTGEN_TEST_DEVICE", "cpu")
REPEATS = 20
_GUARD_BYTES = 4096
_GUARD = 0xFF  # NaN in every float format, -1 in integers
# Lists that several programs append to: the order of their entries is any.
_UNORDERED = ("list_keys", "list_ids", "masses")


def triton_loader(directory: Path) -> KernelLoader:
    """Returns a loader of Triton kernels for :data:`DEVICE`. Interpreted kernels lie in ``directory``, compiled ones in
    the user's cache."""
    if DEVICE == "cpu":
        return KernelLoader(TritonBuilder("interpret"), cache=KernelCache(directory))
    return CopyingLoader(TritonBuilder(kernel_arch()), torch.device(DEVICE))


def kernel_arch() -> str:
    """Returns the architecture that :func:`triton_loader` builds for."""
    return triton_arch(current(DEVICE))


class CopyingLoader(KernelLoader):
    """Loads kernels that take tensors of the host and compute on ``device``."""

    def __init__(self, builder: TritonBuilder, device: torch.device, cache: KernelCache | None = None):
        super().__init__(builder, cache=cache)
        self._device, self._copying = device, dict[KernelSpec, Kernel]()

    def load(self, spec: KernelSpec) -> Kernel:
        if spec not in self._copying:
            kernel = super().load(spec)
            assert isinstance(kernel, BuiltKernel)
            self._copying[spec] = CopyingKernel(kernel, self._device)
        return self._copying[spec]


class CopyingKernel(BuiltKernel):
    """Runs ``kernel`` several times on copies of what it is given."""

    def __init__(self, kernel: BuiltKernel, device: torch.device):
        super().__init__(kernel.spec, kernel.source)
        self._kernel, self._device = kernel, device

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        copies: dict[int, _Copy] = {}
        given: list[Any] = []
        for declared, value in zip(self.spec.arguments, arguments, strict=True):
            if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
                given.append(value.to(self._device) if isinstance(value, Tensor) else value)
                continue
            address = value.untyped_storage().data_ptr()
            if address not in copies:
                copies[address] = _Copy(value, self._device)
            copy = copies[address]
            copy.is_ordered &= declared.name not in _UNORDERED
            given.append(copy.view(value))
        first: list[Tensor] = []
        for turn in range(REPEATS):
            for copy in copies.values():
                copy.fill()
            self._kernel.launch(grid, *given)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._check(list(copies.values()), first, turn)
        for copy in copies.values():
            copy.take_back()

    def _check(self, copies: Sequence[_Copy], first: list[Tensor], turn: int) -> None:
        for place, copy in enumerate(copies):
            assert copy.is_guarded(), f"{self.spec.name} wrote outside the memory of its arguments"
            if turn == 0:
                first.append(copy.content.clone())
            elif copy.is_ordered:
                same = torch.equal(copy.content, first[place])
                assert same, f"{self.spec.name} gave other bits in run {turn + 1} than in the first"


class _Copy:
    """The whole memory of a tensor, on a device and between guards."""

    def __init__(self, tensor: Tensor, device: torch.device):
        self._source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._before = self._source.to(device, copy=True)
        size = len(self._before)
        self._memory = torch.empty(size + 2 * _GUARD_BYTES, dtype=torch.uint8, device=device)
        self.content = self._memory[_GUARD_BYTES : _GUARD_BYTES + size]
        self.is_ordered = True

    def fill(self) -> None:
        self._memory.fill_(_GUARD)
        self.content.copy_(self._before)

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the tensor as it lies in the copy."""
        offset = _GUARD_BYTES // tensor.itemsize + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device=self._memory.device)
        return empty.set_(self._memory.untyped_storage(), offset, tensor.shape, tensor.stride())

    def is_guarded(self) -> bool:
        around = torch.cat([self._memory[:_GUARD_BYTES], self._memory[_GUARD_BYTES + len(self._before) :]])
        return bool((around == _GUARD).all())

    def take_back(self) -> None:
        self._source.copy_(self.content)
