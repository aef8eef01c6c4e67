"""Describes the device. Only this module and system.py query the system; the others take a :class:`Device`."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fastgen.compile.host.system import memory_bytes, read_cgroup, read_text
from fastgen.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

# The vector and matrix extensions that matter to arithmetic on weights, by the names Linux gives them.
_INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
# The features that a CPU needs for its matrix unit to be used.
AMX = ("amx_tile", "amx_bf16", "amx_int8")
_ARCH_PRCTL = 158  # Linux's numbers on x86-64: of the call,
_REQUEST_PERMISSION = 0x1023  # of what is asked for,
_TILE_DATA = 18  # and of the registers
_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Device:
    """One device, within the limits of this process.

    A CPU has ``num_cores`` (physical cores that this process may run on) and ``instruction_sets``; an NVIDIA GPU has
    ``capability`` (major, minor) and ``num_sms``. ``memory_bytes`` is the memory the device has, not what is free.

    A CPU's matrix unit is among its instruction sets only if the system lets this process use it. ``amx_refusal`` says
    why it does not.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    index: int | None = None
    num_cores: int = 0
    instruction_sets: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    num_sms: int = 0
    amx_refusal: str = ""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    def __str__(self) -> str:
        return str(self.torch_device)


def current(device: str = "auto") -> Device:
    """Describes ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"`` for a GPU where there is one.

    Raises :class:`InvalidArgumentError` for any other name and for a GPU that is not there.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", device) if isinstance(device, str) else None
    if match is None:
        raise InvalidArgumentError(f"device={device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:<index>'")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return _cpu()
    return _cuda(device, int(match[1] or 0))


def free_memory_bytes(device: Device) -> int | None:
    """Returns the memory that this process could take now, within its limits, in bytes; ``None`` if it is not known."""
    if device.kind == "cuda":
        return int(torch.cuda.mem_get_info(device.index)[0])
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(_MEMORY_INFO), re.MULTILINE)
    if available is None:
        return None
    free_bytes = int(available[1]) << 10
    limit, used = read_cgroup("memory.max"), read_cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        # Pages of files that were read count as used, but are given up when memory is needed.
        files = re.search(r"^inactive_file (\d+)$", read_cgroup("memory.stat"), re.MULTILINE)
        free_bytes = min(free_bytes, int(limit) - int(used) + (int(files[1]) if files else 0))
    return max(0, free_bytes)


def return_freed_memory() -> None:
    """Returns freed memory to the system where the C library keeps it, as glibc does for large allocations."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def being_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device``, if it is a GPU, this thread's current one within the block: Triton loads and launches kernels
    there, and events are recorded there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def accumulate_in_fp32() -> None:
    """Makes this process's matrix products on GPUs add up in fp32. By default cuBLAS may add the partial sums of bf16
    and fp16 products, which it computes in several parts, in these dtypes."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of the host's ``tensor`` on ``device``, for everything that is launched from now on.

    It is copied from pinned memory: with other memory the host would wait for all earlier launches.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _cuda(name: str, index: int) -> Device:
    if torch.version.cuda is None and torch.version.hip is None:
        raise InvalidArgumentError(f"device={name!r}: this torch ({torch.__version__}) is built without GPU support")
    num_devices = torch.cuda.device_count()
    if index >= num_devices:
        raise InvalidArgumentError(f"device={name!r}: this machine shows {num_devices} GPUs")
    found = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        name=found.name,
        memory_bytes=found.total_memory,
        index=index,
        capability=(found.major, found.minor),
        num_sms=found.multi_processor_count,
    )


def _cpu() -> Device:
    facts = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    allowed = _allowed_cpus()
    processors = [processor for processor in _parse_cpu_info(facts) if int(processor["processor"]) in allowed]
    flags = set((processors[0].get("flags") or processors[0].get("Features") or "").split()) if processors else set()
    model_name = processors[0].get("model name", "") if processors else ""
    refusal = _amx_refusal() if flags.issuperset(AMX) else ""
    if refusal:
        flags.difference_update(AMX)
    return Device(
        kind="cpu",
        name=model_name or platform.processor() or platform.machine(),
        memory_bytes=memory_bytes(),
        num_cores=min(_count_cores(processors) or len(allowed), _quota_cores()),
        instruction_sets=tuple(name for name in _INSTRUCTION_SETS if name in flags),
        amx_refusal=refusal,
    )


@cache
def _amx_refusal() -> str:
    """Asks the system, once in a process, for the registers of the matrix unit. Returns why they are refused, or an
    empty text.

    Without this permission the first tile instruction of any thread ends the process.
    """
    reason = f"Linux on x86-64 is needed, and this is {platform.system()} on {platform.machine()}"
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
            return ""
        reason = os.strerror(ctypes.get_errno())
    _log.warning("the CPU has a matrix unit (AMX), but the system does not let this process use it: %s", reason)
    return f"the system refused the matrix unit: {reason}"


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _parse_cpu_info(text: str) -> list[dict[str, str]]:
    """Returns one dict per logical processor, without blocks that describe none (ARM boards end with one)."""
    blocks = [
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        for block in text.split("\n\n")
    ]
    return [block for block in blocks if block.get("processor", "").isdigit()]


def _count_cores(processors: Iterable[dict[str, str]]) -> int:
    """Counts physical cores: hyper-threads share a (package, core) pair. Without these keys each processor
    is a core.
    """
    return len({(p.get("physical id"), p.get("core id", f"processor {p['processor']}")) for p in processors})


def _quota_cores() -> int:
    """Returns the cores of a container's CPU quota, rounded up; a very large number without a quota."""
    quota, _, period = read_cgroup("cpu.max").partition(" ")
    return max(1, math.ceil(int(quota) / int(period))) if quota.isdigit() and period.isdigit() else 1 << 30
