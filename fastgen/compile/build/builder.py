"""What the two targets have in common: how a builder is spoken to, and what a built kernel can do."""

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


class BuildFailure(Exception):  # noqa: N818 (never leaves this package: the loader makes a KernelError of it)
    """A compiler refused a source. ``log`` is all that it said, ``script`` a program that makes it say so again."""

    def __init__(self, first_line: str, log: str, script: str):
        super().__init__(first_line)
        self.log, self.script = log, script


class Kernel(Protocol):
    """A kernel ready to run. It compiles nothing and allocates nothing."""

    spec: KernelSpec

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Runs it on the spec's arguments in their order: tensors for addresses, numbers for scalars.

        ``grid`` says how many programs Triton starts along each axis; the ``cpp`` target has none and ignores it.
        Raises :class:`fastgen.errors.KernelError`.
        """

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[], None]:
        """A launch that is made again and again with the same arguments, which are checked now and kept alive. It is
        never recorded. Raises :class:`fastgen.errors.KernelError`.
        """


class BuiltKernel(ABC):
    """What both targets' kernels share: a call launches, unless this thread records what would be launched."""

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
    # Of the bundle that kernels come from, what :meth:`accompany` put there; else ``None``.
    modules: Path | None

    def versions(self) -> Mapping[str, str]:
        """All that decides, beside the source, what is built; part of the cache's key."""

    def mismatch(self, versions: Mapping[str, str]) -> str | None:
        """Why what was built with these :meth:`versions` cannot be loaded here, as a clause; ``None`` if it can."""

    def build(self, spec: KernelSpec, source: Path) -> Mapping[str, Any]:
        """Compiles ``source`` into its own directory and returns a report. May be called from several threads at once.

        Raises :class:`BuildFailure`.
        """

    def end_builds(self) -> None:
        """Gives back what building held on to, such as processes; called when a batch of builds is done."""

    def accompany(self, built: Sequence[tuple[KernelSpec, Entry]], directory: Path) -> None:
        """Makes ``directory`` of what would else be compiled when these kernels are loaded, if there is any."""

    def load(self, spec: KernelSpec, entry: Entry) -> Kernel:
        """Raises ``OSError``, ``AttributeError`` or ``RuntimeError`` where the binary cannot be loaded here."""
