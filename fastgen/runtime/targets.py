"""Which target an engine runs on, and on how many threads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from fastgen.compile.backends.target import Target, TargetFacts
from fastgen.compile.build.bundle import SealedLoader, bundle_beside, bundle_target, find_beside, load_bundle
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch, find_compiler
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import Device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.weights.formats import QUANTIZED, QuantizedFormat
from fastgen.errors import CompilerNotFoundError, InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.runtime.config import EngineConfig
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS

_NAMES = ("auto", "torch", "cpp", "triton")
_INTERPRETED_SMS = 2  # as many as make attention share its work out
_log = logging.getLogger(__name__)


def choose_target(
    name: str, device: Device, config: EngineConfig, *, num_threads: int | None, sealed: SealedLoader | None = None
) -> Target:
    """The target of that name, its threads at hand; ``"auto"`` is ``"triton"`` on a GPU, and on a CPU ``"cpp"`` where
    there is a compiler, else ``"torch"``. On a CPU ``"triton"`` interprets its kernels, to look at what they do. Where
    there is a ``sealed`` bundle, its kernels run, and ``"auto"`` is its target.

    Sets the process's threads: kernels' pool and torch's would spin beside each other, so one of them gets one thread.
    Raises :class:`InvalidArgumentError` for another name or one that the device cannot run, and
    :class:`CompilerNotFoundError` where ``"cpp"`` was asked for and cannot be built.
    """
    facts = target_facts(name, device, num_threads=num_threads, sealed=sealed is not None)
    if sealed is not None and name not in ("auto", sealed.builder.target):
        raise InvalidArgumentError(
            f"target={name!r} is asked for, and the sealed bundle {sealed.bundle.directory} has kernels for "
            f"{sealed.builder.target!r}; leave target= out, or sealed="
        )
    loader = sealed or _building_loader(facts)
    if loader is None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return Target()
    if loader.builder.target == "triton":
        return Target(
            loader,
            max_rows=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            num_sms=facts.num_sms,
        )
    load_thread_pool(loader).resize(num_threads or device.num_cores)
    torch.set_num_threads(1)
    return Target(loader, max_rows=max(config.token_budget, PROMPT_LOGITS_ROWS))


def target_facts(
    name: str, device: Device, *, num_threads: int | None, sealed: bool = False, sealed_arch: str | None = None
) -> TargetFacts:
    """Of what :func:`choose_target` chooses, with the same errors; nothing is built or loaded. Where kernels are
    ``sealed`` no compiler is needed, and on a CPU they may be for another ``sealed_arch`` than its own."""
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
            _say_once(f"{error}; until then torch computes, several times more slowly")
            return TargetFacts()
    arch = sealed_arch if sealed_arch in CPP_ARCHES else cpp_arch(device)
    return TargetFacts("cpp", arch, num_threads=num_threads or device.num_cores)


def _building_loader(facts: TargetFacts) -> KernelLoader | None:
    """Of that target; none for torch's."""
    if facts.name == "triton":
        from fastgen.compile.build.triton import TritonBuilder

        return KernelLoader(TritonBuilder(facts.arch))
    return KernelLoader(CppBuilder(facts.arch)) if facts.name == "cpp" else None


def sealed_loader(
    sealed: bool | str | Path, weights: Path, device: Device, about: Mapping[str, str]
) -> SealedLoader | None:
    """Returns a loader of the bundle that ``sealed=`` names: ``True`` names the one in the directory of the
    ``weights``, a path that one, ``False`` none. It must be ``about`` the same model and flags.

    Raises :class:`fastgen.errors.BundleError`.
    """
    if sealed is False:
        return None
    place = bundle_beside(weights, device, about) if sealed is True else Path(sealed).expanduser()
    return load_bundle(place, device, about)


def sealed_target(name: str, sealed: bool | str | Path, weights: Path, device: Device) -> tuple[str, str | None]:
    """The target of that name; of ``"auto"`` that of the bundle which ``sealed=`` asks for, where there is one. And the
    architecture of the bundle, if it is one of that target."""
    if sealed is False:
        return name, None
    place = find_beside(weights, device) if sealed is True else Path(sealed).expanduser()
    found = bundle_target(place) if place else None
    return found if found and name in ("auto", found[0]) else (name, None)


def bundle_flags(
    options: LoadOptions, dtype: torch.dtype, *, block_size: int, max_num_seqs: int | None
) -> dict[str, str]:
    """Returns what a bundle is about: the model and the flags by which ``fastgen kernels build`` writes it, with the
    ``dtype`` and the sizes that ``options`` came to."""
    given = {
        "model": options.model,
        "recipe": options.recipe if isinstance(options.recipe, (str, Path)) else None,
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": options.quantize,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "revision": options.revision,
        "allow_config_key": " ".join(options.allow_config_keys) or None,
    }
    return {key: str(value) for key, value in given.items() if value is not None}


def kernel_targets() -> tuple[str, ...]:
    """Those besides ``"torch"`` whose kernels this machine's CPU can run."""
    try:
        find_compiler()
    except CompilerNotFoundError:
        return ()
    return ("cpp",)


def parse_quantize(quantize: str | None, target: str) -> QuantizedFormat | None:
    """The format that ``quantize=`` asks for, ``None`` for the model's dtype.

    Raises :class:`InvalidArgumentError` for one that the ``target`` cannot multiply.
    """
    if quantize is None:
        return None
    for known in QUANTIZED[target]:
        if known == quantize:
            return known
    others = [
        f"target={name!r} knows {', '.join(map(repr, known))}" for name, known in QUANTIZED.items() if name != target
    ]
    raise InvalidArgumentError(
        f"quantize={quantize!r}: target={target!r} knows {', '.join(map(repr, QUANTIZED[target]))} "
        f"({'; '.join(others)})"
    )


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
