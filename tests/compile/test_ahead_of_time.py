"""Kernels of shipped recipes, built for GPUs that are not here: what must hold of each, and of the results kept."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.results import commit
from fastgen.compile.build.cache import Entry, KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.triton import attention_specs
from fastgen.compile.ops.linear.tiling import FewRowShape, default_split
from fastgen.compile.ops.linear.triton import few_row_specs
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QUANTIZED
from fastgen.models.registry.registry import list_recipes
from tests.compile import ahead_of_time
from tests.compile.ahead_of_time import (
    OLDEST,
    PAGE,
    RESULTS,
    ROOT,
    Results,
    matrix_instruction,
    models,
    page,
    problems,
    source,
    sources_of_today,
    wanted,
)
from tests.compile.kernel_sources import small
from tests.compile.norms import norm_spec
from tests.recipe_tools.published import CONFIGS

GOOD = {"spill_bytes": 0, "shared_bytes": 100, "shared_limit_bytes": 100, "registers": 9, "occupancy": 0.5}


def chunks(arch: str, head_dim: int, dtype: str = "bf16") -> KernelSpec:
    return attention_specs(AttentionShape(8, 2, head_dim, 16, dtype, 0.1), max_num_seqs=256, arch=arch).chunks


def linear(arch: str, num_rows: int) -> KernelSpec:
    shape = FewRowShape(4096, 4096, "bf16")
    return few_row_specs(shape, num_rows, default_split(shape, num_rows, arch, 132)).main


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_and_products_of_16_rows_must_have_tensor_core_instructions(head_dim: int) -> None:
    assert matrix_instruction("sm_80", chunks("sm_80", head_dim)) == "mma"
    assert matrix_instruction("sm_90", chunks("sm_90", head_dim)) == "wgmma"
    for num_rows in (16, 32, 64):
        assert matrix_instruction("sm_80", linear("sm_80", num_rows)) == "mma"
        assert matrix_instruction("sm_90", linear("sm_90", num_rows)) == "wgmma"
    assert matrix_instruction("sm_90", chunks("sm_90", head_dim, "fp32")) is None
    assert matrix_instruction("gfx942", chunks("gfx942", head_dim)) is None
    assert matrix_instruction("sm_90", norm_spec("triton", "rms", 64, "bf16", 1e-5)) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"spill_bytes": 8}, ["spills 8 bytes"]),
        ({"shared_bytes": 101}, ["takes 101 of 100 bytes of shared memory"]),
        ({"shared_bytes": 101, "shared_limit_bytes": None}, []),
        ({"matrix_instructions": {"mma": 4}}, ["has no wgmma"]),
    ],
)
def test_what_is_wrong_with_a_build(changed: Mapping[str, Any], said: list[str]) -> None:
    found = {**GOOD, "matrix_instructions": {"wgmma": 4}, **changed}
    assert problems("sm_90", chunks("sm_90", 64), found) == said


@pytest.mark.slow
def test_kernels_of_every_recipe_and_weight_format_are_wanted_each_once() -> None:
    """Each format needs kernels that look up rows, multiply few rows, and dequantize weights for the library."""
    hopper = wanted("sm_90", models(config for _, config in CONFIGS.values()))
    names = {listed.recipe.name for listed in list_recipes()}
    assert {name for recipes in hopper.values() for name in recipes} == names
    assert len({spec.digest for spec in hopper}) == len(hopper) > 300
    by_format: dict[str, set[str]] = defaultdict(set)
    recipes: dict[str, set[str]] = defaultdict(set)
    for spec, needed_by in hopper.items():
        stored = {str(value) for value in spec.parameters.values()} & set(QUANTIZED["triton"])
        for weight_format in stored:
            by_format[weight_format].add(spec.op)
            recipes[weight_format] |= set(needed_by)
    assert by_format.keys() == set(QUANTIZED["triton"])
    for weight_format, ops in by_format.items():
        assert ops >= {"embedding", "few_row_linear", "dequantize"}, weight_format
        assert recipes[weight_format] == names, weight_format


def test_results_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = chunks("sm_90", 64), chunks("sm_90", 128)
    needed = {first: ["llama"], second: ["llama", "opt"]}
    results = Results(tmp_path / "found.json")
    assert set(results.begin("sm_90", needed)) == {first, second}
    results.add("sm_90", second, needed[second], {**GOOD, "matrix_instructions": {}})
    results.write()
    assert json.loads(results.file.read_text())["kernels"]["sm_90"][second.digest]["problems"] == ["has no wgmma"]
    again = Results(results.file)
    assert again.begin("sm_90", needed) == [first]
    monkeypatch.setattr(ahead_of_time, "commit", lambda: "another")
    later = Results(results.file)
    later.begin("sm_90", needed)
    later.add("sm_90", first, needed[first], {**GOOD, "matrix_instructions": {}})
    later.write()
    runs = json.loads(results.file.read_text())["runs"]
    assert [each["commit"] for each in runs] == [commit(), "another"]
    assert {"date", "commit", "processor", "cores"} == runs[0].keys()
    # another source, another Triton
    monkeypatch.setattr(ahead_of_time, "body_hash", lambda spec: "another source, and as long")
    assert set(Results(results.file).begin("sm_90", needed)) == {first, second}
    monkeypatch.undo()
    monkeypatch.setattr(TritonBuilder, "versions", lambda self: {"triton": "99"})
    assert set(Results(results.file).begin("sm_90", needed)) == {first, second}


def test_a_table_is_put_in_its_place(tmp_path: Path) -> None:
    results, spec = Results(tmp_path / "found.json"), chunks("sm_90", 64)
    results.begin("sm_90", {spec: ["llama"]})
    results.add("sm_90", spec, ["llama"], {**GOOD, "spill_bytes": 4, "matrix_instructions": {"wgmma": 1}})
    results.write()
    today = {"sm_90": {spec.digest: source(spec), "changed since": "one source", "new": "another"}}
    text = page(PAGE.read_text(encoding="utf-8"), results, today)
    assert "| `sm_90` | 3 | 1 | 1 | 0 | 0 | 9 | 0 KiB |" in text
    assert page(text, results, today) == text
    later = {"sm_90": {spec.digest: "an edited template"}}
    assert "| `sm_90` | 1 | 0 | 1 | 0 | 0 | 9 | 0 KiB |" in page(text, results, later)


# ---- the results that are kept


def test_nothing_is_wrong_with_what_was_built() -> None:
    results = Results(RESULTS)
    wrong = {
        f"{arch} {each['name']}": each["problems"]
        for arch, kernels in results.data["kernels"].items()
        for each in kernels.values()
        if "problems" in each
    }
    assert not wrong
    assert set(results.data["kernels"]) == set(TRITON_ARCHES)


def test_the_oldest_triton_allowed_built_all_kernels_of_hopper() -> None:
    data = json.loads(OLDEST.read_text())
    (required,) = re.findall(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert data["versions"]["sm_90"]["triton"].startswith(required)
    built = data["kernels"]["sm_90"].values()
    assert len(built) == data["distinct"]["sm_90"]
    assert not [each for each in built if "problems" in each or each["spill_bytes"]]
    assert f"built all {len(built):,} kernels that `sm_90` needs" in " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.mark.slow  # renders all kernels of all published models
def test_the_page_says_how_many_of_the_kernels_are_of_todays_sources() -> None:
    """Fails after a change of kernels until ``python -m tests.compile.ahead_of_time --render`` has counted anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, Results(RESULTS), sources_of_today()) == text


# ---- built now


def check(arch: str, specs: list[KernelSpec], directory: Path) -> list[Entry]:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory), num_jobs=1)
    entries = loader.build(specs)
    for spec, entry in zip(specs, entries, strict=True):
        assert not problems(arch, spec, dict(entry.report)), f"{spec}: {entry.report}"
    return entries


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_86", "sm_100", "gfx942"))]
)
def test_some_kernels_are_built_as_they_must_be(arch: str, tmp_path: Path) -> None:
    attention, _ = check(arch, [chunks(arch, 64), linear(arch, 16)], tmp_path)
    if arch != "gfx942":
        (ptx,) = attention.directory.glob("*.ptx")
        still_under_way = re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx.read_text())
        assert "3" in still_under_way  # the next tile's keys and values, and where those after it lie


@pytest.mark.slow  # some 150 kernels for each target
@pytest.mark.parametrize("arch", TRITON_ARCHES)
def test_every_recipe_s_kernels_are_built_as_they_must_be(arch: str, tmp_path: Path) -> None:
    """At small sizes, where recipes share kernels; the stored results are of all sizes."""
    check(arch, list(wanted(arch, models(small(config) for _, config in CONFIGS.values()))), tmp_path)
