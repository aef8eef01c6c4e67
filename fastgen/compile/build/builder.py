"""The interface of builders, and of the kernels that they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastgen.compile.build.cache import Entry
from fastgen.compile.build.launches import recorder
from fastgen.compile.spec import KernelSpec, Target

# The architecture that runs Triton kernels in Python on a CPU.
INTERPRET = "interpret"


class BuildFailure(Exception):  # noqa: N818 (never leaves this package: the loader turns it into a KernelError)
    """A compiler refused a source. ``log`` is its whole output, ``script`` a program that reproduces the error."""

    def __init__(self, first_line: str, log: str, script: str):
        super().__init__(first_line)
        self.log, self.script = log, script


class OutdatedBuildError(RuntimeError):
    """An entry's binary is not the one that the compiler would build here today."""


class Kernel(Protocol):
    """A kernel ready to run. It compiles nothing and allocates nothing."""

    spec: KernelSpec

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Runs it on the spec's arguments in their order: tensors for addresses, numbers for scalars.

        ``grid`` is the number of programs that Triton starts along each axis; C++ kernels ignore it.
        Raises :class:`fastgen.errors.KernelError`.
        """

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        """Returns a launch to be repeated with the same arguments, which are checked now and kept alive. It is never
        recorded. Raises :class:`fastgen.errors.KernelError`.
        """


class BuiltKernel(ABC):
    """A kernel of either target: a call launches it, unless this thread records launches."""

    def __init__(self, spec: KernelSpec, source: Path):
        self.spec, self.source = spec, source

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if (recording := recorder()) is not None:
            recording.launch(self, grid, arguments)
        else:
            self.launch(grid, *arguments)

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        """See :class:`Kernel`."""
        return partial(self.launch, grid, *arguments)

    @abstractmethod
    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Runs it now; see :class:`Kernel`."""


class Builder(Protocol):
    """Builds and loads the kernels of one target for one architecture."""

    target: Target
    arch: str
    # Tells if kernels are functions of the host, so that one native call can launch several.
    launches_natively: bool
    # Tells if kernels run on a GPU.
    is_for_gpu: bool
    # The directory that :meth:`accompany` wrote in the bundle that kernels come from; else ``None``.
    modules: Path | None

    def versions(self) -> Mapping[str, str]:
        """Returns the versions and settings of the tools, which decide with the source what is built."""

    def built_by(self) -> Mapping[str, str]:
        """Returns :meth:`versions` and a hash of whatever else the compiler's own key holds; part of the cache's key.
        It may differ between two installations of one version.
        """

    def mismatch(self, versions: Mapping[str, str]) -> str | None:
        """Returns why binaries built with these :meth:`versions` cannot be loaded here, as a clause; ``None`` if they
        can.
        """

    def build(self, spec: KernelSpec, source: Path) -> Mapping[str, Any]:
        """Compiles ``source`` into its own directory and returns a report. May be called from several threads at once.

        Raises :class:`BuildFailure`.
        """

    def end_builds(self) -> None:
        """Releases resources of building, such as processes; called after a batch of builds."""

    def accompany(self, built: Sequence[tuple[KernelSpec, Entry]], directory: Path) -> None:
        """Writes to a new ``directory`` what would otherwise be compiled when these kernels are loaded, if anything."""

    def load(self, spec: KernelSpec, entry: Entry) -> Kernel:
        """Raises ``OSError``, ``AttributeError`` or ``RuntimeError`` where the binary cannot be loaded here. The
        latter is an :class:`OutdatedBuildError` where it must be built again.
        """
