"""The profile of a step, the small cases for sanitizers, and the archive of prebuilt kernels: what needs no GPU."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import part, prebuilt, sanitize
from benchmarks.gpu.gates import GateError, excess, gate, run_repeatedly
from benchmarks.gpu.measuring import make_bench
from benchmarks.gpu.step_profile import Event, moved_bytes, rows_of
from fastgen.compile.build.autotune import Tuning
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK
from fastgen.compile.ops.linear.triton import few_row_specs
from fastgen.compile.ops.sampling.triton import sampling_specs
from tests.compile.norms import norm_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))


# ---- the profile


def test_times_gaps_and_bytes_are_those_of_one_step() -> None:
    events = [Event("norm", 0.0, 1.0), Event("nvjet_128", 3.0, 5.0), Event("norm", 5.5, 6.5), Event("gemm", 6.5, 8.5)]
    *kernels, step = rows_of("batch 1", events, 2, {"norm": 4e9, "library": 1e9}, make_bench(toy=True))
    library, norm = kernels
    assert library == {
        "case": "batch 1: library",
        "seconds": 2.0,
        "end_seconds": 3.0,
        "gap_seconds": 1.0,
        "launches": 1.0,
        "bytes": 1e9,
        "fraction_of_copy": pytest.approx(1 / 3),
    }
    assert norm["case"] == "batch 1: norm"
    assert (norm["seconds"], norm["end_seconds"], norm["gap_seconds"]) == (1.0, 1.25, 0.25)
    assert norm["fraction_of_copy"] == 3.2
    sums = {"seconds": 3.0, "end_seconds": 4.25, "gap_seconds": 1.25, "launches": 2.0, "bytes": 5e9}
    assert step == {"case": "batch 1: step", **sums}


def test_of_parts_of_a_linear_layer_only_those_of_the_batch_are_moved() -> None:
    """A workspace has room for as many rows as a tile."""
    split = SplitK(block_n=64, block_k=32, num_splits=3, num_warps=4, num_stages=3)
    specs = few_row_specs(FewRowShape(128, 96, "fp32"), 2, split)
    x, weight, out, workspace = torch.zeros(2, 96), torch.zeros(128, 96), torch.zeros(2, 128), torch.zeros(3 * 16 * 128)
    parts = 4 * 3 * 2 * 128
    assert specs.reduce is not None
    assert moved_bytes(specs.main, (2, 3), (x, weight, workspace, 2)) == 4 * (2 * 96 + 128 * 96) + parts
    assert moved_bytes(specs.reduce, (2, 1), (workspace, out, 2)) == parts + 4 * 2 * 128


def test_sampling_moves_the_logits_of_the_batch() -> None:
    specs = sampling_specs(1000)
    slices = specs.scan.parameters["slices"]
    assert isinstance(slices, int)
    for spec in (specs.scan, specs.draw):
        assert 4 * 3 * 1000 <= moved_bytes(spec, (3 * slices,), ()) < 4 * 3 * (1000 + slices * 1024)
    assert moved_bytes(specs.choose, (3,), ()) == 0


def test_a_kernel_that_waits_for_another_costs_what_it_ends_later() -> None:
    events = [Event("linear", 0.0, 4.0), Event("norm", 1.0, 5.0), Event("scan", 2.0, 3.0), Event("linear", 5.0, 6.0)]
    rows = rows_of("x", events, 1, {"linear": 1, "norm": 1, "scan": 1}, make_bench(toy=True))
    found = {row["case"]: row for row in rows}
    ends = {name: found[f"x: {name}"]["end_seconds"] for name in ("linear", "norm", "scan", "step")}
    assert ends == {"linear": 5.0, "norm": 1.0, "scan": 0.0, "step": 6.0}


@pytest.mark.slow
def test_kernels_of_a_toy_s_step_are_listed() -> None:
    said: list[dict[str, Any]] = []
    assert part.run("profile", toy=True, say=said.append), said
    rows = said[1:]
    assert not [row for row in rows if "error" in row]
    for case in ("batch 1, context 6", "batch 2, context 8"):
        of_case = [row for row in rows if row["case"].startswith(case)]
        step = of_case[-1]
        assert step["case"] == f"{case}: step"
        assert step["launches"] == pytest.approx(sum(row["launches"] for row in of_case[:-1]))
        assert any("attention" in row["case"] and row["bytes"] > 0 for row in of_case)


# ---- gates


def test_differences_are_relative_to_what_is_expected() -> None:
    expected = torch.tensor([0.0, 100.0])
    assert excess(torch.tensor([0.01, 100.0]), expected, 0.02, 0.01) == pytest.approx(0.5)
    assert excess(torch.tensor([0.0, 101.02]), expected, 0.02, 0.01) == pytest.approx(1.0, rel=1e-4)
    assert excess(torch.tensor([torch.nan, 100.0]), expected, 0.02, 0.01) == torch.inf
    with pytest.raises(GateError, match=r"a kernel differs from the torch reference by inf"):
        gate("a kernel", torch.inf)


def test_a_gate_finds_memory_that_is_not_written_and_answers_that_change() -> None:
    out, state = torch.zeros(3), torch.ones(2)
    run_repeatedly("a kernel", lambda: (out[:2].fill_(1.0), state.mul_(2)), 5, [out], read=[state])
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2].isnan()
    assert state.tolist() == [2.0, 2.0]
    calls: list[int] = []
    with pytest.raises(GateError, match="a race gives other bits in run 3 than in the first"):
        run_repeatedly("a race", lambda: out.fill_(float(calls.append(1) or len(calls) == 3)), 5, [out])


# ---- sanitizers


@pytest.mark.slow  # a process that interprets every kind of kernel
def test_the_small_cases_run_every_kind_of_kernel() -> None:
    said: list[dict[str, Any]] = []
    assert part.run("sanitize", toy=True, say=said.append), said
    (row,) = said[1:]
    assert row["kernels"] >= 25


def test_reports_on_our_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    report = "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at {}+0x40 in norm.py:3\n"
    monkeypatch.setattr(sanitize, "run_cases", lambda command: (report.format("gemm_kernel"), {"rms_norm_h64"}))
    assert sanitize.checked("compute-sanitizer", "initcheck") == {"kernels": 1, "reports_on_libraries": 1}
    monkeypatch.setattr(sanitize, "run_cases", lambda command: (report.format("rms_norm_h64"), {"rms_norm_h64"}))
    with pytest.raises(RuntimeError, match=r"1 reports, the first: .*Uninitialized __global__ memory read"):
        sanitize.checked("compute-sanitizer", "initcheck")


def test_without_the_sanitizer_the_part_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_PLACES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImportError, match="compute-sanitizer is not installed"):
        sanitize.sanitizer()


# ---- prebuilt kernels


def test_the_kernels_of_every_part_are_found_without_a_gpu() -> None:
    loader = prebuilt.Collector(TritonBuilder("sm_90"))
    loader.tuning = prebuilt.CollectingTuning(loader)
    prebuilt.collect(loader, ["attention", "elementwise", "sampling"])
    ops = {spec.op for spec in loader.specs}
    assert ops >= {"attention_plan", "attention", "rms_norm", "activation", "embedding"}
    assert ops >= {"sampling_scan", "sampling_draw", "sampling_choose"}
    attention = [spec for spec in loader.specs if spec.op == "attention"]
    assert {spec.parameters["P"] for spec in attention} == {16, 32, 64, 128}
    assert len({(spec.parameters["block_n"], tuple(spec.options.items())) for spec in attention}) > 5


def test_so_are_those_of_an_engine_and_of_its_tuning() -> None:
    loader = prebuilt.Collector(TritonBuilder("sm_90"))
    loader.tuning = prebuilt.CollectingTuning(loader)
    prebuilt.collect(loader, [prebuilt.MODEL])
    splits = {
        (spec.parameters.get("splits"), spec.parameters["block_n"])
        for spec in loader.specs
        if spec.op == "few_row_linear"
    }
    assert len(splits) > 5
    assert {spec.op for spec in loader.specs} >= {"attention", "qkv", "sampling_choose", "embedding"}


def test_an_archive_is_a_kernel_cache(tmp_path: Path) -> None:
    loader = prebuilt.Collector(TritonBuilder("sm_90"))
    loader.tuning = Tuning(loader)
    spec = norm_spec("triton", "rms", 64, "bf16", 1e-5)
    loader.load(spec)
    assert prebuilt.write(loader, tmp_path / "prebuilt.tar.xz", lambda done, total: None) == 1
    place = tmp_path / "unpacked"
    place.mkdir(mode=0o700)
    with tarfile.open(tmp_path / "prebuilt.tar.xz") as archive:
        archive.extractall(place, filter="data")
    there = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(place))
    there.fence.close()
    (entry,) = there.build([spec])
    assert entry.directory.parent == place


@pytest.mark.slow
def test_the_script_says_how_large_it_is_and_how_to_unpack_it(tmp_path: Path) -> None:
    output = tmp_path / "prebuilt.tar.xz"
    command = [sys.executable, "-m", "benchmarks.gpu.prebuilt", "--parts", "sampling", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{output}: " in done.stdout
    assert "MiB" in done.stdout
    assert 'tar -xJf prebuilt.tar.xz -C "$FASTGEN_CACHE"' in done.stdout
