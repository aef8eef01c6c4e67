"""The default tiles of attention on NVIDIA's GPUs, and the assembler's options. Nothing is built here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.attention import tiling
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import chunk_tiling, chunk_tilings
from fastgen.compile.ops.attention.triton import AttentionKernel, AttentionPlan, attention_specs
from fastgen.compile.spec import KernelSpec
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
        for spec, cut in ((specs.chunks, specs.chunk), (specs.decodes, specs.decode)):
            threads, registers = 32 * cut.num_warps * cut.programs_per_sm, spec.options["maxnreg"]
            assert isinstance(registers, int)
            assert registers * threads <= 65536
            assert registers == 255 or (registers + 8) * threads > 65536


def test_prompts_take_tiles_in_turn_where_the_assembler_has_registers_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: shape for name, shape in SHIPPED.items() if shape.dtype != "fp32"}
    monkeypatch.setattr(tiling, "_triton", lambda: (3, 9))
    assert all(chunk_tiling(shape, "sm_90").persistent for shape in shapes.values())
    monkeypatch.setattr(tiling, "_triton", lambda: (3, 6))
    found = {name: chunk_tiling(shape, "sm_90").persistent for name, shape in shapes.items()}
    assert (found["D 64"], found["D 128"], found["small blocks"], found["BLOOM"]) == (True, True, True, True)
    assert (found["D 256"], found["latent"]) == (False, False)
    for shape in shapes.values():
        default, *others = chunk_tilings(shape, "sm_90")
        assert replace(default, persistent=not default.persistent) in others
        assert not any(each.persistent for each in chunk_tilings(shape, "sm_80"))


@pytest.mark.parametrize(
    "feature",
    [{"softcap": 30.0}, {"alibi": "plain"}, {"v_dim": 64}, {"head_dim": 96, "v_dim": 96}],
    ids=str,
)
def test_only_plain_heads_can_compute_the_next_product_ahead(feature: dict[str, Any]) -> None:
    """Other heads have no registers left for it."""
    plain = AttentionShape(8, 2, 128, 16, "bf16", 0.1)
    assert [each.ahead for each in chunk_tilings(plain, "sm_90")].count(True) == 2
    assert not chunk_tiling(plain, "sm_90").ahead, "it was slower on the GPU that was measured"
    assert not any(each.ahead for each in chunk_tilings(replace(plain, **feature), "sm_90"))


def test_attentions_of_one_plan_have_grids_of_their_own() -> None:
    """One takes tiles in turn, another has a program for each tile that a batch could have."""
    grids = {}
    shape = SHIPPED["D 64"]
    default = attention_specs(shape, max_num_seqs=16, arch="sm_90")
    sizes = {"token_budget": 2048, "max_num_seqs": 16, "num_sms": 132}

    def load(spec: KernelSpec) -> Kernel:
        return lambda grid, *arguments: grids.setdefault(spec.parameters.get("kind"), []).append(grid)  # type: ignore[return-value]

    plan = AttentionPlan(default, load, **sizes, device=torch.device("meta"))
    q = torch.empty(2048, 32, 64, dtype=torch.bfloat16, device="meta")
    ints = torch.empty(17, dtype=torch.int32, device="meta")
    for persistent in (True, False):
        cut = replace(default.chunk, persistent=persistent)
        specs = attention_specs(shape, max_num_seqs=16, arch="sm_90", chunk=cut)
        AttentionKernel(specs, load, plan)(q, q, q, ints.view(1, 17), ints, ints[:16], q)
    assert grids["chunks"] == [(4 * 132,), (plan.max_chunk_tiles(2048) * 8,)]
