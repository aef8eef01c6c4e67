"""A target: who computes the ops of an engine. ``torch`` alone is the reference; others bring generated kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.loader import KernelLoader, Progress
from fastgen.compile.capture.recording import recorder
from fastgen.compile.spec import KernelSpec


@dataclass(frozen=True)
class TargetFacts:
    """What sizes depend on, of a target that may be elsewhere: its ``name``; the ``arch`` that kernels are built for;
    of a CPU the threads that they run on, of a GPU its multiprocessors."""

    name: str = "torch"
    arch: str = ""
    num_threads: int = 1
    num_sms: int = 0

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a model of ``dtype`` computes in between its weights: on CPUs products are summed in fp32 anyway."""
        return torch.float32 if self.name == "cpp" else dtype


class Target:
    """What the layers of one model are built for.

    Layers ask for their kernels while they are made; :meth:`build` then builds all of them, several at a time, and
    from there on they can be called. A target without a ``loader`` has no kernels: layers compute by torch.
    ``max_rows`` bounds the rows of a step, ``max_num_seqs`` its sequences; a GPU has ``num_sms``.
    """

    def __init__(
        self, loader: KernelLoader | None = None, *, max_rows: int = 0, max_num_seqs: int = 0, num_sms: int = 0
    ):
        self.loader, self.max_rows, self.max_num_seqs, self.num_sms = loader, max_rows, max_num_seqs, num_sms
        self._asked: dict[KernelSpec, _AskedFor] = {}

    @property
    def name(self) -> str:
        return "torch" if self.loader is None else self.loader.builder.target

    @property
    def kernel_loader(self) -> KernelLoader:
        assert self.loader is not None, "torch has no kernels"
        return self.loader

    @property
    def arch(self) -> str:
        return self.kernel_loader.builder.arch

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of :meth:`TargetFacts.activation_dtype`."""
        return TargetFacts(self.name).activation_dtype(dtype)

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The kernel that :meth:`build` will build."""
        asked = self._asked.setdefault(spec, _AskedFor(spec))
        asked.spec = replace(spec, needed_by=tuple(dict.fromkeys((*asked.spec.needed_by, *spec.needed_by))))
        return asked

    def specs(self) -> list[KernelSpec]:
        """All that was asked for, by name, with every recipe node that did."""
        return sorted((asked.spec for asked in self._asked.values()), key=lambda spec: spec.name)

    def build(self, progress: Progress | None = None) -> None:
        """Build and load what was asked for. Raises :class:`fastgen.errors.KernelError`."""
        if self.loader is None:
            return
        self.loader.build(self.specs(), progress)
        for asked in self._asked.values():
            asked.kernel = self.loader.load(asked.spec)


class _AskedFor:
    """A kernel before and after it is built."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.kernel: Kernel | None = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if self.kernel is None and (listener := recorder()) is not None:  # a step is described before kernels exist
            listener.launch(self, grid, arguments)
            return
        assert self.kernel is not None, f"{self.spec.name} is called before it is built"
        self.kernel(grid, *arguments)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        assert self.kernel is not None, f"{self.spec.name} is bound before it is built"
        return self.kernel.bind(grid, *arguments)


# The reference.
TORCH = Target()
