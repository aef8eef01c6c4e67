"""The Triton kernels of paged attention, built for GPUs that are not here: registers, instructions, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import chunk_tiling, decode_tiling
from fastgen.compile.ops.attention.triton import attention_specs
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec
from tests.compile.attention_cases import SHIPPED, shape_of
from tests.compile.sass import exponentials_within_products, instructions, loops
from tests.fast import cases


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of kernels, which several tests look at."""
    return tmp_path_factory.mktemp("kernels")


def report(spec: KernelSpec, arch: str, directory: Path) -> dict[str, Any]:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory))
    (entry,) = loader.build([spec])
    return dict(entry.report)


def check_build(spec: KernelSpec, arch: str, directory: Path) -> dict[str, Any]:
    found = report(spec, arch, directory)
    assert found["spill_bytes"] == 0, f"{arch} {spec}: {found}"
    assert found["shared_bytes"] <= found["shared_limit_bytes"], f"{arch} {spec}: {found}"
    return found


@pytest.mark.parametrize(("arch", "head_dim"), cases([("sm_80", 128), ("sm_90", 128)], fast=[("sm_90", 128)]))
def test_prompts_use_tensor_cores_and_spill_nothing(arch: str, head_dim: int, built: Path) -> None:
    shape = AttentionShape(32, 8, head_dim, 64, "bf16", head_dim**-0.5)
    found = check_build(attention_specs(shape, max_num_seqs=256, arch=arch).chunks, arch, built)
    assert found["matrix_instructions"].get("wgmma" if arch == "sm_90" else "mma", 0) > 0


@pytest.mark.slow  # only tuning tries such tiles
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_compute_exponentials_while_the_next_product_runs(head_dim: int, block_size: int, built: Path) -> None:
    """With tiles that are computed ahead, in the loop over tiles that every row sees: behind the first product of the
    next tile's keys, and before the wait for these products. Otherwise a tile's exponentials stand behind the wait."""
    shape, found = AttentionShape(32, 8, head_dim, block_size, "bf16", head_dim**-0.5), {}
    for ahead in (True, False):
        tiling = replace(chunk_tiling(shape, "sm_90"), ahead=ahead)
        spec = attention_specs(shape, max_num_seqs=256, arch="sm_90", chunk=tiling).chunks
        loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(built))
        (entry,) = loader.build([spec])
        assert entry.report["spill_bytes"] == 0
        assert entry.report["shared_bytes"] <= entry.report["shared_limit_bytes"]
        bodies = loops(instructions(entry.source.with_suffix(".cubin")))
        found[ahead] = max(map(exponentials_within_products, bodies))
    # a thread has 32 scores of a tile of 128 x 64, and 2 rows to be shrunk; with small heads products end early
    assert found[True] >= (32 if head_dim == 128 else 24)
    assert found[False] == 0


def test_decodes_fit_as_many_programs_as_they_are_planned_for(built: Path) -> None:
    shape = AttentionShape(32, 8, 128, 64, "bf16", 128**-0.5)
    check_residency(shape, "sm_90", built)


def test_an_arrival_releases_what_was_stored_and_acquires_what_is_read(built: Path) -> None:
    """All threads have stored their part when one of them counts the arrival, and they wait for its answer before they
    read. The answer makes the multiprocessor forget what it has cached."""
    spec = attention_specs(AttentionShape(32, 8, 128, 64, "bf16", 128**-0.5), max_num_seqs=256, arch="sm_90").decodes
    (entry,) = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(built)).build([spec])
    ptx = entry.source.with_suffix(".ptx").read_text(encoding="utf-8")
    found = re.findall(r"\b(bar\.sync|(?:st|ld|atom)\.global[.\w]*)", ptx)
    place = found.index("atom.global.gpu.acq_rel.add.u32")
    assert [found[place - 1], found[place + 1]] == ["bar.sync", "bar.sync"]
    assert not any(each.startswith("atom") for each in found[:place] + found[place + 1 :])
    assert not any(".nc" in each for each in found), "a load beside the coherent caches"
    code = [text for _, text in instructions(entry.source.with_suffix(".cubin"))]
    around = [text for text in code if re.search(r"\b(BAR|MEMBAR|ATOMG|CCTL|LDG|STG)\b", text)]
    arrival = next(index for index, text in enumerate(around) if "ATOMG" in text)
    for text, expected in zip(
        around[arrival - 2 : arrival + 3],
        ("BAR.SYNC", "MEMBAR.ALL.GPU", "ATOMG.E.ADD.STRONG.GPU", "CCTL.IVALL", "BAR.SYNC"),
        strict=True,
    ):
        assert expected in text, around[arrival - 2 : arrival + 3]


def check_residency(shape: AttentionShape, arch: str, directory: Path) -> None:
    specs = attention_specs(shape, max_num_seqs=256, arch=arch)
    found = check_build(specs.decodes, arch, directory)
    max_warps = {"sm_86": 48, "sm_89": 48, "gfx942": 32}.get(arch, 64)
    assert found["occupancy"] * max_warps / found["num_warps"] >= specs.decode.programs_per_sm - 0.05, f"{arch} {found}"


@pytest.mark.parametrize(
    ("name", "arch", "kernel"),
    cases(
        [
            ("small blocks, D 64", "sm_80", "decodes"),
            ("Gemma 2, small blocks", "sm_80", "decodes"),
            ("Gemma 2, small blocks", "sm_90", "chunks"),
        ],
        fast=[("Gemma 2, small blocks", "sm_90", "chunks")],
    ),
)
def test_keys_gathered_from_small_blocks_spill_nothing(name: str, arch: str, kernel: str, built: Path) -> None:
    check_build(getattr(attention_specs(SHIPPED[name], max_num_seqs=256, arch=arch), kernel), arch, built)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_default_on_every_target(name: str, arch: str, built: Path) -> None:
    specs = attention_specs(SHIPPED[name], max_num_seqs=256, arch=arch)
    chunks = check_build(specs.chunks, arch, built)
    assert chunks["matrix_instructions"] or SHIPPED[name].dtype == "fp32"
    check_residency(SHIPPED[name], arch, built)
    check_build(specs.plan, arch, built)


# Specs


def test_features_are_compiled_in_only_where_needed() -> None:
    plain = render(attention_specs(shape_of(), max_num_seqs=4, arch="sm_90").chunks)
    for word in ("WINDOW", "SOFTCAP", "slope", "sinks_ptr", "acc_1"):
        assert word not in plain
    full = shape_of(sliding_window=5, softcap=1.0, alibi="plain", sinks=True, head_dim=80)
    everything = render(attention_specs(full, max_num_seqs=4, arch="sm_90").chunks)
    for word in ("WINDOW", "SOFTCAP", "slope", "sinks_ptr", "acc_1"):
        assert word in everything


def test_impossible_shapes_are_refused() -> None:
    for changes in (
        {"num_heads": 3},
        {"num_kv_heads": 0},
        {"block_size": 0},
        {"sliding_window": 0},
        {"scale": 0.0},
        {"v_dim": 17, "values_in_keys": True},
        {"q_stride": 63},
    ):
        with pytest.raises(ValueError, match="AttentionShape"):
            shape_of(**changes)
    with pytest.raises(ValueError, match="700 features, and on a GPU at most 576 fit"):
        chunk_tiling(shape_of(head_dim=700, dtype="bf16"), "sm_90")


def test_an_unknown_architecture_gets_the_tiles_that_fit_everywhere() -> None:
    shape = shape_of(head_dim=256, dtype="bf16")
    assert chunk_tiling(shape, "sm_120") == chunk_tiling(shape, "sm_89")
    assert decode_tiling(shape, "sm_120") == decode_tiling(shape, "sm_89")
