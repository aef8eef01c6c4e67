"""Reports a built Triton kernel's registers, spills, shared memory, tensor-core instructions and occupancy."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# Matrix instructions: Hopper's, Blackwell's, those from Ampere on; AMD's.
# Excluded are instructions that wait for them: wgmma.fence, .commit_group and .wait_group.
_MATRIX = re.compile(r"^\s*(?:@%?\w+ )?(wgmma(?=\.mma_async)|tcgen05\.mma|mma|v_mfma)[._]", re.MULTILINE)


@dataclass(frozen=True)
class _Multiprocessor:
    """Limits of one multiprocessor (compute unit), from the vendors' tables. A block may have ``max_block_bytes`` of
    the shared memory; ``reserved_bytes`` a block are reserved by the system.
    """

    max_warps: int
    max_blocks: int
    shared_bytes: int
    max_block_bytes: int
    reserved_bytes: int = 1024
    registers: int = 65536


_MULTIPROCESSORS = {
    "80": _Multiprocessor(64, 32, 164 << 10, 163 << 10),
    "86": _Multiprocessor(48, 16, 100 << 10, 99 << 10),
    "89": _Multiprocessor(48, 24, 100 << 10, 99 << 10),
    "90": _Multiprocessor(64, 32, 228 << 10, 227 << 10),
    "100": _Multiprocessor(64, 32, 228 << 10, 227 << 10),
    # four SIMDs, each with 512 vector registers for 64 lanes and room for 8 wavefronts
    "gfx942": _Multiprocessor(32, 32, 64 << 10, 64 << 10, reserved_bytes=0, registers=4 * 512 * 64),
}


def report(asm: Mapping[str, Any], metadata: Any, target: GPUTarget) -> dict[str, Any]:
    """Returns plain data: ``registers`` a thread, ``spill_bytes`` a thread, ``shared_bytes`` a block,
    ``shared_limit_bytes``, ``matrix_instructions`` by name, ``num_warps``, ``occupancy``: the share of a
    multiprocessor's warps that can be resident at once.
    """
    nvidia = target.backend == "cuda"
    registers, spill_bytes = _nvidia(asm) if nvidia else _amd(asm)
    limits = _MULTIPROCESSORS.get(str(target.arch))
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": metadata.shared,
        "shared_limit_bytes": limits and limits.max_block_bytes,
        "matrix_instructions": count_matrix_instructions(asm["ptx" if nvidia else "amdgcn"]),
        "num_warps": metadata.num_warps,
        "occupancy": limits and _occupancy(limits, registers, target.warp_size, metadata.num_warps, metadata.shared),
        "binary_bytes": len(asm["cubin" if nvidia else "hsaco"]),
    }


def count_matrix_instructions(assembly: str) -> dict[str, int]:
    """Counts the instructions for tensor cores, by name."""
    return dict(Counter(_MATRIX.findall(assembly)))


def _nvidia(asm: Mapping[str, Any]) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return numbers["REG"], max(numbers["STACK"], numbers["LOCAL"])


def _amd(asm: Mapping[str, Any]) -> tuple[int, int]:
    numbers = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", asm["amdgcn"], re.MULTILINE)}
    return numbers["vgpr_count"], numbers["private_segment_fixed_size"]


def _occupancy(limits: _Multiprocessor, registers: int, warp_size: int, num_warps: int, shared_bytes: int) -> float:
    a_block = -(-registers // 8) * 8 * warp_size * num_warps  # registers are allocated eight a thread at a time
    num_blocks = min(
        limits.max_blocks,
        limits.max_warps // num_warps,
        limits.registers // a_block if registers else limits.max_blocks,
        limits.shared_bytes // (shared_bytes + limits.reserved_bytes) if shared_bytes else limits.max_blocks,
    )
    return round(num_blocks * num_warps / limits.max_warps, 3)
