"""Which instruction sets need kernels of their own, and so tests of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fastgen.compile.ops.activation.cpp import activation_spec
from fastgen.compile.ops.add.cpp import add_spec
from fastgen.compile.ops.attention.cpp import attention_spec
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.experts.cpp import combine_spec, route_spec
from fastgen.compile.ops.latent.cpp import latent_spec
from fastgen.compile.ops.qkv.cpp import qkv_spec
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.ranks.cpp import all_reduce_spec, row_maxima_spec, sum_products_spec
from fastgen.compile.ops.sampling.cpp import sampling_spec
from fastgen.compile.ops.softcap.cpp import softcap_spec
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec
from tests.compile.arches import HERE, WIDTHS

NORM = HeadNorm("rms", 1e-6)
CACHE: dict[str, Any] = {"block_size": 16, "cache_dtype": "bf16", "rotary_dim": 6}
HEADS: dict[str, Any] = {**CACHE, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
LATENT: dict[str, Any] = {**CACHE, "num_heads": 5, "nope_dim": 5, "rope_dim": 6, "kv_rank": 16, "interleaved": False}
SPECS: dict[str, Callable[[str], KernelSpec]] = {
    "activation": lambda arch: activation_spec("gelu", arch, gated=True),
    "add": lambda arch: add_spec(arch, 0.5),
    "all_reduce": all_reduce_spec,
    "attention": lambda arch: attention_spec(AttentionShape(6, 2, 32, 16, "fp32", 0.2, sliding_window=37), arch),
    "combine": lambda arch: combine_spec(arch, top_k=2, shared=True, gated=True),
    "latent": lambda arch: latent_spec(arch, **LATENT, norm=NORM),
    "qkv": lambda arch: qkv_spec(arch, **HEADS | {"cache_dtype": "fp16"}, q_norm=NORM, k_norm=NORM),
    "row_maxima": row_maxima_spec,
    "route": lambda arch: route_spec(arch, 8, top_k=2, scoring="softmax", normalize=True),
    "sampling": sampling_spec,
    "softcap": lambda arch: softcap_spec(30.0, arch),
    "sum_products": lambda arch: sum_products_spec(arch, routed=True),
}


def source(spec: KernelSpec, arch: str) -> str:
    """Returns the code without the instruction set's name, and without its flags, which dots of bytes and bf16 read."""
    code = re.sub(r"//.*|#define FASTGEN_HAS_.*", "", render(spec))
    return re.sub(rf"{arch}(?![a-z0-9])", "ARCH", code)


@pytest.mark.parametrize("op", SPECS)
def test_ops_without_dots_have_one_source_for_all_instruction_sets_of_a_width(op: str) -> None:
    wide = {source(SPECS[op](arch), arch) for arch in ("amx", "avx512bf16", "avx512vnni", "avx512")}
    assert len(wide) == 1
    assert wide.isdisjoint(source(SPECS[op](arch), arch) for arch in ("avx2", "portable"))
    assert "dot4(" not in re.sub(r"INLINE i32v dot4\(", "", wide.pop())


def test_fast_tests_run_the_best_set_and_each_width() -> None:
    assert {HERE, "portable"} <= set(WIDTHS)
