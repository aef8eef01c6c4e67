"""The choice of a backend: by name for a device, or by what a kernel loader builds for."""

from __future__ import annotations

import logging
from functools import cache

import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.cpp import CppBackend
from fastgen.compile.backends.reference import ReferenceBackend
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.backends.triton import TritonBackend
from fastgen.compile.build.bundle import SealedLoader
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch, find_compiler
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import Device, accumulate_in_fp32
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.linear.bf16_tuning import bf16_choice
from fastgen.compile.weights.formats import QUANTIZED
from fastgen.errors import CompilerNotFoundError, InvalidArgumentError

_NAMES = ("auto", "torch", "cpp", "triton")
_INTERPRETED_SMS = 2  # enough that attention shares its work out
_log = logging.getLogger(__name__)


def choose_backend(
    facts: TargetFacts,
    device: Device,
    *,
    token_budget: int,
    max_num_seqs: int,
    max_prompt_rows: int,
    num_threads: int | None,
    sealed: SealedLoader | None = None,
) -> Backend:
    """Returns the backend of the target with these ``facts``, its threads running. A ``sealed`` bundle brings its own
    kernels.

    A step has at most ``token_budget`` tokens of ``max_num_seqs`` sequences, and the log-probabilities of prompts are
    computed in pieces of ``max_prompt_rows``. Sets the process's threads: the kernels' pool and torch's would spin
    beside each other, so one of them gets one thread. Raises :class:`InvalidArgumentError` where a bundle is of another
    target.
    """
    if sealed is not None and facts.name != sealed.builder.target:
        raise InvalidArgumentError(
            f"target={facts.name!r} is asked for, and the sealed bundle {sealed.bundle.directory} has kernels for "
            f"{sealed.builder.target!r}; leave target= out, or sealed="
        )
    loader = sealed or _building_loader(facts)
    if device.kind == "cuda":
        accumulate_in_fp32()
    if loader is None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return backend_for(facts)
    if loader.builder.target == "triton":
        return backend_for(facts, loader, max_rows=token_budget, max_num_seqs=max_num_seqs)
    load_thread_pool(loader).resize(num_threads or device.num_cores)
    torch.set_num_threads(1)
    return backend_for(facts, loader, max_rows=max(token_budget, max_prompt_rows), max_num_seqs=max_num_seqs)


def backend_for(
    facts: TargetFacts, loader: KernelLoader | None = None, *, max_rows: int = 0, max_num_seqs: int = 0
) -> Backend:
    """Returns the backend of a target with these ``facts``. It builds kernels if there is a ``loader``."""
    if facts.name == "triton":
        return TritonBackend(facts, loader, max_rows=max_rows, max_num_seqs=max_num_seqs)
    if facts.name == "cpp":
        return CppBackend(facts, loader, max_rows=max_rows, max_num_seqs=max_num_seqs)
    return ReferenceBackend(facts)


def backend_of(loader: KernelLoader, *, max_rows: int, max_num_seqs: int = 0, num_sms: int = 0) -> Backend:
    """Returns the backend of the target that ``loader`` builds for."""
    builder = loader.builder
    facts = TargetFacts(builder.target, builder.arch, num_sms=num_sms)
    return backend_for(facts, loader, max_rows=max_rows, max_num_seqs=max_num_seqs)


def target_facts(
    name: str,
    device: Device,
    *,
    num_threads: int | None,
    dtype: torch.dtype | None = None,
    sealed: bool = False,
    sealed_arch: str | None = None,
    quantize: str | None = None,
    measures: bool = False,
) -> TargetFacts:
    """Returns the facts of the target of that name; ``"auto"`` is ``"triton"`` on a GPU, and on a CPU ``"cpp"`` if
    there is a compiler, else ``"torch"``. On a CPU ``"triton"`` interprets its kernels, to look at what they do.

    ``dtype`` is the model's: see :func:`arch_for`, which ``measures`` too. ``sealed`` kernels need no compiler, and on
    a CPU they may be for another ``sealed_arch`` than its own; nothing is measured for them.

    Raises :class:`InvalidArgumentError` for another name or one that the device cannot run, and
    :class:`CompilerNotFoundError` if ``"cpp"`` is asked for and cannot be built, or ``quantize`` is a format that only
    ``"cpp"`` computes.
    """
    if name not in _NAMES:
        raise InvalidArgumentError(f"target={name!r}: expected one of {', '.join(map(repr, _NAMES))}")
    if name == "cpp" and device.kind != "cpu":
        raise InvalidArgumentError(f"target='cpp' runs on a CPU, and device={str(device)!r} is asked for")
    if name == "triton" or (name == "auto" and device.kind == "cuda"):
        from fastgen.compile.build.triton import triton_arch

        return TargetFacts("triton", triton_arch(device), num_sms=device.num_sms or _INTERPRETED_SMS)
    if name == "torch":
        return TargetFacts()
    if not sealed:
        try:
            find_compiler()
        except CompilerNotFoundError as error:
            if name == "cpp":
                raise
            if quantize in QUANTIZED["cpp"] and quantize not in QUANTIZED["torch"]:
                raise CompilerNotFoundError(
                    f"{error}; without one quantize={quantize!r} cannot be computed, but torch computes "
                    f"{', '.join(map(repr, QUANTIZED['torch']))}"
                ) from None
            _warn_once(f"{error}; until then torch computes, several times more slowly")
            return TargetFacts()
    if sealed:
        arch = sealed_arch if sealed_arch in CPP_ARCHES else cpp_arch(device)
    else:
        arch = arch_for(device, dtype, measures=measures)
    return TargetFacts("cpp", arch, num_threads=num_threads or device.num_cores)


def arch_for(device: Device, dtype: torch.dtype | None, *, measures: bool = False) -> str:
    """Returns the instruction set that kernels of a model in ``dtype`` are built for on a CPU: the best that it has,
    and in bf16 the one by which it multiplies that faster, see :func:`bf16_choice`.
    """
    choice = bf16_choice(device, measures=measures) if dtype == torch.bfloat16 else None
    return cpp_arch(device) if choice is None else choice.arch


def _building_loader(facts: TargetFacts) -> KernelLoader | None:
    """Returns a loader that builds kernels for a target; ``None`` for torch's."""
    if facts.name == "triton":
        from fastgen.compile.build.triton import TritonBuilder

        return KernelLoader(TritonBuilder(facts.arch))
    return KernelLoader(CppBuilder(facts.arch)) if facts.name == "cpp" else None


def kernel_targets(device: Device) -> tuple[str, ...]:
    """Returns the targets besides ``"torch"`` whose kernels ``device`` can run without an interpreter."""
    if device.kind == "cuda":
        return ("triton",)
    try:
        find_compiler()
    except CompilerNotFoundError:
        return ()
    return ("cpp",)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
