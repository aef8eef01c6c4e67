"""The kernels of one model. Ops ask for them while the ops are made; then all are built at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastgen.compile.build.builder import Kernel
from fastgen.compile.build.launches import recorder
from fastgen.compile.build.loader import KernelLoader, Progress
from fastgen.compile.spec import KernelSpec


class KernelSet:
    """Holds the kernels that were asked for. Without a ``loader`` they can be listed but not built."""

    def __init__(self, loader: KernelLoader | None):
        self._loader = loader
        self._kernels: dict[KernelSpec, _LaterKernel] = {}

    def kernel(self, spec: KernelSpec) -> Kernel:
        """Returns the kernel of ``spec``; it can be called after :meth:`build`."""
        if (later := self._kernels.get(spec)) is None:
            later = self._kernels[spec] = _LaterKernel(spec)
        elif not {*spec.needed_by} <= {*later.spec.needed_by}:
            later.spec = replace(spec, needed_by=tuple(dict.fromkeys((*later.spec.needed_by, *spec.needed_by))))
        return later

    def specs(self) -> list[KernelSpec]:
        """Returns all specs by name, each with every recipe node that needs it."""
        return sorted((later.spec for later in self._kernels.values()), key=lambda spec: spec.name)

    def build(self, progress: Progress | None = None) -> None:
        """Builds and loads all kernels. Raises :class:`fastgen.errors.KernelError`."""
        assert self._loader is not None, "kernels are built by a loader, and this backend was made without one"
        self._loader.build(self.specs(), progress)
        for later in self._kernels.values():
            later.kernel = self._loader.load(later.spec)


class _LaterKernel:
    """A kernel before and after it is built."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.kernel: Kernel | None = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if (
            self.kernel is None and (listener := recorder()) is not None
        ):  # a step can be recorded before kernels are built
            listener.launch(self, grid, arguments)
            return
        assert self.kernel is not None, f"{self.spec.name} is called before it is built"
        self.kernel(grid, *arguments)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        assert self.kernel is not None, f"{self.spec.name} is bound before it is built"
        return self.kernel.bind(grid, *arguments)
