"""Turns specs into kernels: renders them, builds those that are not cached (several at a time), loads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from fastgen.compile.build.autotune import Tuning, tuning_here
from fastgen.compile.build.builder import INTERPRET, Builder, BuildFailure, Kernel, OutdatedBuildError
from fastgen.compile.build.cache import Entry, KernelCache
from fastgen.compile.build.fence import Fence
from fastgen.compile.build.reproduce import build_error
from fastgen.compile.build.sources import source_of, text_hash
from fastgen.compile.host.device import Device, current
from fastgen.compile.render import SUFFIXES
from fastgen.compile.spec import KernelSpec
from fastgen.errors import InvalidArgumentError, KernelError

# Called with ``(done, total)`` after each kernel, from any thread, one call at a time.
Progress = Callable[[int, int], None]


def make_builder(target: str) -> Builder:
    """Returns the builder for an architecture: ``sm_90``, ``gfx942`` and the like, ``interpret``, or one of C++'s.

    Raises :class:`InvalidArgumentError` for another name, and the builders' errors.
    """
    # Imported here, since neither target needs the other's tools.
    from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder

    if target in CPP_ARCHES:
        return CppBuilder(target)
    from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder

    try:
        return TritonBuilder(target)
    except ValueError as error:
        known = ", ".join((*TRITON_ARCHES, INTERPRET, *CPP_ARCHES))
        raise InvalidArgumentError(f"target={target!r}: expected such as {known}") from error


def target_of(device: Device) -> str:
    """Returns the architecture to build for on this device, for :func:`make_builder`."""
    if device.kind == "cpu":
        from fastgen.compile.build.cpp import cpp_arch

        return cpp_arch(device)
    from fastgen.compile.build.triton import triton_arch

    return triton_arch(device)


class KernelLoader:
    """The kernels of one engine: one builder (a target and an architecture), one cache, one fence.

    ``num_jobs`` kernels are built at once; by default as many as this process has cores.
    """

    def __init__(
        self,
        builder: Builder,
        *,
        cache: KernelCache | None = None,
        num_jobs: int | None = None,
    ):
        self.builder = builder
        self.cache = cache or KernelCache()
        self.fence = Fence()
        self.num_jobs = num_jobs or current("cpu").num_cores
        self._kernels: dict[KernelSpec, Kernel] = {}

    @cached_property
    def tuning(self) -> Tuning:
        """Returns the choices between several ways to compute the same."""
        return tuning_here(self)

    def load(self, spec: KernelSpec) -> Kernel:
        """Returns the kernel, the same object each time. Raises :class:`KernelError`; see :meth:`build`."""
        if spec not in self._kernels:
            (entry,) = self.build([spec])
            try:
                self._kernels[spec] = self._loaded(spec, entry)
            except (OSError, AttributeError, RuntimeError) as error:
                message = f"kernel {spec.name} is built but cannot be loaded: {error}"
                raise KernelError(message, **_facts(spec), file=str(entry.source)) from error
        return self._kernels[spec]

    def _loaded(self, spec: KernelSpec, entry: Entry) -> Kernel:
        """Loads an entry. It is built again if it is outdated, or if another process has removed it since it was found;
        behind a closed fence it is not.
        """
        try:
            return self.builder.load(spec, entry)
        except OutdatedBuildError:
            if self.fence.closed:
                raise
            self.cache.discard(entry)
        except OSError:
            if self.fence.closed or entry.directory.exists():
                raise
        (entry,) = self.build([spec])
        return self.builder.load(spec, entry)

    def build(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> list[Entry]:
        """Returns the entries of these specs, in order. Each distinct kernel is built once, or not at all if it is
        cached.

        Raises :class:`KernelError` for the first kernel that cannot be built, once running builds have ended. Behind a
        closed fence it raises for a kernel that is not cached.
        """
        wanted = list(specs)
        distinct = list(dict.fromkeys(wanted))
        built_by = dict(self.builder.built_by())
        entries: dict[KernelSpec, Entry] = {}
        one_at_a_time = threading.Lock()

        def build_one(spec: KernelSpec) -> None:
            entry = self._entry(spec, built_by)
            with one_at_a_time:
                entries[spec] = entry
                if progress is not None:
                    progress(len(entries), len(distinct))

        with ThreadPoolExecutor(min(self.num_jobs, len(distinct)) or 1) as pool:
            futures = [pool.submit(build_one, spec) for spec in distinct]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
                self.builder.end_builds()
        return [entries[spec] for spec in wanted]

    def find(self, spec: KernelSpec) -> Entry | None:
        """Returns the entry, if it is cached."""
        return self.cache.find(spec.name, self._key(spec, source_of(spec)[1], dict(self.builder.built_by())))

    def _entry(self, spec: KernelSpec, built_by: Mapping[str, str]) -> Entry:
        heading, body = source_of(spec)
        key = self._key(spec, body, built_by)
        if (entry := self.cache.find(spec.name, key)) is not None:
            return entry
        self.fence.check("build", f"kernel {spec.name}", **_facts(spec))
        source = heading + body

        def make(directory: Path) -> Mapping[str, Any]:
            return self.builder.build(spec, directory / f"{spec.name}{SUFFIXES[spec.target]}")

        try:
            return self.cache.build(spec.name, key, source, make)
        except BuildFailure as failure:
            raise build_error(spec, source, failure, self.cache) from failure

    def _key(self, spec: KernelSpec, body: str, built_by: Mapping[str, str]) -> dict[str, Any]:
        """Returns everything that decides what is built. The heading, which names recipe nodes, is not part of it."""
        if spec.target != self.builder.target:
            raise ValueError(f"{spec}: this loader builds for {self.builder.target}")
        return {
            "suffix": SUFFIXES[spec.target],
            "source": text_hash(body),
            "spec": spec.digest,
            "arch": self.builder.arch,
            "versions": built_by,
        }


def _facts(spec: KernelSpec) -> dict[str, Any]:
    return {"kernel": spec.name, "spec": str(spec), "nodes": spec.needed_by}
