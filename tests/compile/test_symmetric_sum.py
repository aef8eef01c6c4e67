"""Sums over ranks through symmetric memory: by interpreted kernels, ahead-of-time builds, and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen.compile.backends.modules.collectives import SHOTS
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.backends.triton import TritonBackend
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder, triton_arch
from fastgen.compile.host.device import current
from fastgen.compile.host.group_ranks import MeetingPoint, chosen_sums, open_group
from fastgen.compile.host.symmetric_memory import HALF_BYTES, SymmetricMemory
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.ranks.triton import SymmetricSumKernel, symmetric_sum_spec
from fastgen.errors import InvalidArgumentError
from tests.compile.test_group_ranks import captured
from tests.fast import cases


def run_ranks(what: str, count: int, dtype: str, directory: Path) -> list[str]:
    """Runs each rank as a process. Returns what each prints."""
    command = [sys.executable, "-m", "tests.compile.symmetric_rank", what, str(directory)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, str(index), str(count), dtype], **given) for index in range(count)]
    try:
        while any(each.poll() is None for each in ranks) and not any(each.poll() for each in ranks):
            time.sleep(0.05)  # a rank that fails leaves the others waiting
    finally:
        for each in ranks:
            each.kill()
    found = [each.communicate() for each in ranks]
    assert not any(each.returncode for each in ranks), "\n".join(errors for _, errors in found)
    return [text.strip() for text, _ in found]


ALL = [(1, "fp32"), (2, "bf16"), (2, "fp32"), (3, "fp16"), (4, "bf16")]


@pytest.mark.parametrize(("count", "dtype"), cases(ALL, fast=[(2, "bf16")]))
def test_sums_have_the_bits_of_the_order_of_the_ranks(count: int, dtype: str, tmp_path: Path) -> None:
    assert run_ranks("many_sums", count, dtype, tmp_path) == ["added"] * count


@pytest.mark.parametrize("dtype", cases(["bf16", "fp32"], fast=["bf16"]))
def test_what_has_no_room_is_added_by_the_library(dtype: str, tmp_path: Path) -> None:
    expected = {"bf16": [1, 1, 0, 2, 0], "fp32": [1, 1, 0, 2, 0]}
    assert run_ranks("by_size", 2, dtype, tmp_path) == [str(expected[dtype])] * 2


def test_ranks_choose_the_same_and_no_way_that_adds_wrongly(tmp_path: Path) -> None:
    first, second = map(literal_eval, run_ranks("trial", 2, "fp32", tmp_path))
    assert first == second
    assert sorted(first) == [6, 7], "sizes that differ little are tried once, and none without room"


@pytest.mark.parametrize("is_measured", [True, False])
def test_only_sums_that_are_to_be_measured_are(
    is_measured: bool, triton_kernels: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[Any, ...]] = []
    monkeypatch.setattr("fastgen.compile.backends.rank_sums.choose_shots", lambda *arguments: tried.append(arguments))
    backend = TritonBackend(TargetFacts("triton", "interpret"), triton_kernels)
    memory = SymmetricMemory([0], torch.device("cpu"), None, is_measured=is_measured)
    backend.ranks = SimpleNamespace(index=0, count=1, symmetric=memory)  # type: ignore[assignment]
    sums = [backend.all_reduce(1, dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    assert sums[0] is sums[2] is not sums[1], "layers share what was measured"
    backend.choose_sums([1, 8], 64, torch.device("cpu"))
    assert [(each[0], each[2], each[3], each[4].dtype) for each in tried] == (
        [(sums[0], [1, 8], 64, torch.bfloat16), (sums[1], [1, 8], 64, torch.float32)] if is_measured else []
    )
    assert sums[0].shots == ({} if is_measured else SHOTS)


def test_a_wait_for_a_lost_rank_ends(tmp_path: Path) -> None:
    assert run_ranks("ending", 2, "fp32", tmp_path) == ["ended"] * 2


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize(("count", "dtype"), cases([(2, "bf16"), (4, "fp32"), (8, "bf16")], fast=[(8, "bf16")]))
def test_builds_move_whole_units_and_order_memory(count: int, dtype: str, shots: int, tmp_path: Path) -> None:
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path), num_jobs=1)
    (entry,) = loader.build([overlapped(symmetric_sum_spec(count, dtype, shots), "sm_90")])
    assert entry.report["spill_bytes"] == 0
    found = re.findall(
        r"^\s*(?:@%p\d+ )?((?:ld|st|atom)\.[\w.]+|bar\.sync)", entry.source.with_suffix(".ptx").read_text(), re.M
    )
    # Between a release and the first acquire after it the program waits, on both sides a barrier of its threads stands.
    order = [each for each in found if each.startswith(("atom", "bar"))]
    signals = [place for place, each in enumerate(order) if each == "atom.global.sys.release.exch.b32"]
    waits = [place for place, each in enumerate(order) if each == "atom.global.sys.acquire.add.u32"]
    assert len(signals) == len(waits) == shots
    for signal, wait in zip(signals, waits, strict=True):
        assert order[signal - 1] == "bar.sync"
        assert order[wait + 1] == "bar.sync"
        assert signal < wait
    # Others' numbers come in whole units, past the first cache, which does not follow what other devices write.
    from_ranks = [each for each in found if each.startswith("ld.global.cg")]
    assert set(from_ranks) == {"ld.global.cg.v4.b32"}
    assert {each for each in found if each.startswith("ld.global.v")} == {"ld.global.v4.b32"}


def test_how_ranks_add_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_RANK_SUMS", raising=False)
    assert chosen_sums() == "library"
    monkeypatch.setenv("FASTGEN_RANK_SUMS", "measured")
    assert chosen_sums() == "measured"
    monkeypatch.setenv("FASTGEN_RANK_SUMS", "nccl")
    with pytest.raises(
        InvalidArgumentError, match="FASTGEN_RANK_SUMS=nccl: ranks add by one of library, measured, symm"
    ):
        chosen_sums()


@pytest.mark.gpu
def test_a_captured_sum_of_one_rank_through_memory(tmp_path: Path) -> None:
    """Kernels of a CUDA graph reach the memory that torch maps."""
    device = torch.device("cuda", 0)
    ranks = open_group(MeetingPoint("nccl", tmp_path / "meeting", "symmetric"), 0, 1, device)
    assert ranks.symmetric is not None
    loader = KernelLoader(TritonBuilder(triton_arch(current("cuda:0"))))
    kernels = [loader.load(symmetric_sum_spec(1, "bf16", shots)) for shots in (1, 2)]
    add = SymmetricSumKernel(kernels, ranks.symmetric, 0)
    x = torch.zeros(HALF_BYTES // 2, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for shots in (1, 2, 2, 1):
            add(x, shots)
            x.mul_(2)

    graph = captured(step, device)
    for turn in range(1, 4):
        x.fill_(turn)
        graph.replay()
        assert (x == 16 * turn).all()
    graph.reset()
    ranks.abort()
