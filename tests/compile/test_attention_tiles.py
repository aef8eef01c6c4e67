"""The default tiles of attention on NVIDIA's GPUs, and the assembler's options. Nothing is built here."""

from __future__ import annotations

import pytest

from fastgen.compile.ops.attention.tiling import chunk_tiling
from fastgen.compile.ops.attention.triton import attention_specs
from tests.compile.attention_cases import SHIPPED


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_prompts_fetch_the_next_keys_while_they_compute(arch: str) -> None:
    """Triton uses (n - 1) // 2 of n stages for keys and values, and these kernels need two."""
    for name, shape in SHIPPED.items():
        if shape.dtype != "fp32":
            assert (chunk_tiling(shape, arch).num_stages - 1) // 2 == 2, name


@pytest.mark.parametrize("name", SHIPPED)
def test_registers_are_asked_for_as_many_programs_as_are_planned_for(name: str) -> None:
    """Else the assembler takes more, or spills some for one program more."""
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100"):
        specs = attention_specs(SHIPPED[name], max_num_seqs=256, arch=arch)
        for spec, tiling in ((specs.chunks, specs.chunk), (specs.decodes, specs.decode)):
            threads, registers = 32 * tiling.num_warps * tiling.programs_per_sm, spec.options["maxnreg"]
            assert isinstance(registers, int)
            assert registers * threads <= 65536
            assert registers == 255 or (registers + 8) * threads > 65536
    assert "maxnreg" not in attention_specs(SHIPPED[name], max_num_seqs=256, arch="gfx942").chunks.options
