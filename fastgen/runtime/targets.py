"""Which target an engine runs on, and on how many threads."""

from __future__ import annotations

import logging
from functools import cache
from typing import cast, get_args

import torch

from fastgen.compile.build_cpp import CppBuilder, cpp_arch, find_compiler
from fastgen.compile.device import Device
from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.packed_weight import WeightFormat
from fastgen.compile.target import Target
from fastgen.compile.thread_pool import load_thread_pool
from fastgen.errors import CompilerNotFoundError, InvalidArgumentError
from fastgen.runtime.config import EngineConfig
from fastgen.runtime.model_runner import PROMPT_LOGITS_ROWS

_NAMES = ("auto", "torch", "cpp", "triton")
_QUANTIZED = ("int8", "int4", "int8_weight_only")
_INTERPRETED_SMS = 2  # as many as make attention share its work out
_log = logging.getLogger(__name__)


def choose_target(name: str, device: Device, config: EngineConfig, *, num_threads: int | None) -> Target:
    """The target of that name, its threads at hand; ``"auto"`` is ``"triton"`` on a GPU, and on a CPU ``"cpp"`` where
    there is a compiler, else ``"torch"``. On a CPU ``"triton"`` interprets its kernels, to look at what they do.

    Sets the process's threads: kernels' pool and torch's would spin beside each other, so one of them gets one thread.
    Raises :class:`InvalidArgumentError` for another name or one that the device cannot run, and
    :class:`CompilerNotFoundError` where ``"cpp"`` was asked for and cannot be built.
    """
    if name not in _NAMES:
        raise InvalidArgumentError(f"target={name!r}: expected one of {', '.join(map(repr, _NAMES))}")
    if name == "cpp" and device.kind != "cpu":
        raise InvalidArgumentError(f"target='cpp' runs on a CPU, and device={str(device)!r} is asked for")
    if name == "triton" or (name == "auto" and device.kind == "cuda"):
        from fastgen.compile.build_triton import TritonBuilder, triton_arch

        return Target(
            KernelLoader(TritonBuilder(triton_arch(device))),
            max_rows=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            num_sms=device.num_sms or _INTERPRETED_SMS,
        )
    if name == "torch":
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return Target()
    try:
        loader = KernelLoader(CppBuilder(cpp_arch(device)))
    except CompilerNotFoundError as error:
        if name == "cpp":
            raise
        _say_once(f"{error}; until then torch computes, several times more slowly")
        return choose_target("torch", device, config, num_threads=num_threads)
    load_thread_pool(loader).resize(num_threads or device.num_cores)
    torch.set_num_threads(1)
    return Target(loader, max_rows=max(config.token_budget, PROMPT_LOGITS_ROWS))


def kernel_targets() -> tuple[str, ...]:
    """Those besides ``"torch"`` whose kernels this machine's CPU can run."""
    try:
        find_compiler()
    except CompilerNotFoundError:
        return ()
    return ("cpp",)


def parse_quantize(quantize: str | None, target: Target) -> WeightFormat | None:
    """The format that ``quantize=`` asks for, ``None`` for the model's dtype.

    Raises :class:`InvalidArgumentError` for another one, and where the target cannot multiply it.
    """
    if quantize is None:
        return None
    if quantize not in _QUANTIZED:
        raise InvalidArgumentError(f"quantize={quantize!r}: expected one of {', '.join(map(repr, _QUANTIZED))}")
    if target.name != "cpp":
        raise InvalidArgumentError(f"quantize={quantize!r} needs kernels for a CPU (target='cpp'), not {target.name}")
    assert quantize in get_args(WeightFormat)
    return cast(WeightFormat, quantize)


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
