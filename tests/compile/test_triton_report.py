"""Figures are read out of assembly."""

from __future__ import annotations

from fastgen.compile.build.triton_report import count_matrix_instructions

HOPPER = """
\twgmma.fence.sync.aligned;
\twgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, %p1, 1, 1;
\t@%p2 wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, %p1, 1, 1;
\twgmma.commit_group.sync.aligned;
\twgmma.wait_group.sync.aligned 0;
"""
AMPERE = "\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };\n\tfma.rn.f32 %r1, %r2, %r3, %r4;\n"


def test_products_of_tensor_cores_are_counted_and_not_what_waits_for_them() -> None:
    assert count_matrix_instructions(HOPPER) == {"wgmma": 2}
    assert count_matrix_instructions(AMPERE) == {"mma": 1}
    assert count_matrix_instructions("\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0\n") == {"v_mfma": 1}
