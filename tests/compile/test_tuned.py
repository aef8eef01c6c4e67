"""Tuned choices are listed, exported into the shipped form, and taken by a build for a GPU that is elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fastgen.compile.build import autotune
from fastgen.compile.build.autotune import SHIPPED, Tuning
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.tuned import export, kept, tuning_for
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tuning import tuned_tilings
from fastgen.compile.ops.linear.tiling import FewRowShape, candidate_splits
from fastgen.compile.ops.linear.tuning import tuned_split
from tests.compile.test_autotune import PROBLEM, clock, falling_clock, no_clock, way

META = torch.device("meta")
H200 = "NVIDIA H200"


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


@pytest.fixture
def loader(cache: KernelCache) -> KernelLoader:
    return KernelLoader(TritonBuilder("interpret"), cache=cache, num_jobs=1)


def measure(loader: KernelLoader, device: str, *seconds: float) -> None:
    ways = [way(place, each) for place, each in enumerate(seconds)]
    Tuning(loader, loader.cache.directory, device, clock).choose(PROBLEM, ways, may_measure=True)


def test_what_was_measured_is_listed(loader: KernelLoader, cache: KernelCache) -> None:
    assert kept(cache.directory) == []
    measure(loader, "A GPU", 3.0, 1.0)
    (cache.directory / ".tuning" / "damaged.json").write_text("{")
    (cache.directory / ".tuning" / "nested.json").write_text("[" * 100_000)
    (cache.directory / ".tuning" / "removed.json").symlink_to("nowhere")  # between the listing and the reading
    (row,) = kept(cache.directory)
    assert row == {
        "device": "A GPU",
        "problem": PROBLEM,
        "choice": {"place": 1},
        "seconds": 1.0,
        "default_seconds": 3.0,
    }


def test_what_was_measured_is_exported_and_taken_elsewhere(
    loader: KernelLoader, cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(loader, "A GPU", 3.0, 1.0)
    measure(loader, "Another", 1.0, 3.0)
    file = tmp_path / "tuned.json"
    assert export(cache.directory, file) == {"A GPU": 1, "Another": 1}
    table = json.loads(file.read_text())
    assert table["about"] == json.loads(SHIPPED.read_text())["about"]
    assert table["devices"]["A GPU"] == {PROBLEM: {"place": 1}}
    table["devices"]["A third"] = {PROBLEM: {"place": 0}}
    file.write_text(json.dumps(table))
    export(cache.directory, file)
    assert json.loads(file.read_text()) == table

    monkeypatch.setattr(autotune, "SHIPPED", file)
    elsewhere = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path / "other"))
    ways = [way(0, 1.0), way(1, 1.0)]
    assert tuning_for("A GPU", elsewhere).choose(PROBLEM, ways, may_measure=True) == 1
    assert tuning_for("Another", elsewhere).choose(PROBLEM, ways, may_measure=True) == 0


def test_a_device_of_which_nothing_is_known_gets_defaults_and_a_warning(
    loader: KernelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    found = tuning_for("A GPU", loader)
    assert "no choices are known for 'A GPU', so the defaults are taken" in caplog.text
    assert found.choose(PROBLEM, [way(0, 3.0), way(1, 1.0)], may_measure=True) == 0


def test_a_model_is_built_ahead_by_the_choices_for_the_device(cache: KernelCache, loader: KernelLoader) -> None:
    """On `meta`, as `fastgen kernels build` makes layers."""
    shape = FewRowShape(20, 96, "fp16", out_dtype="fp32")
    loader.tuning = Tuning(loader, cache.directory, H200, falling_clock())
    best = tuned_split(shape, 16, loader, torch.device("cpu"))
    assert best == candidate_splits(shape, 16, "interpret", 2)[-1]
    again = KernelLoader(loader.builder, cache=cache)
    again.tuning = tuning_for(H200, again)
    assert tuned_split(shape, 16, again, META) == best
    other = KernelLoader(loader.builder, cache=cache)
    assert tuned_split(shape, 16, other, META) == candidate_splits(shape, 16, "interpret", 2)[0]


@pytest.mark.slow
def test_attention_is_tuned_once_for_all_numbers_of_slots_of_a_server(cache: KernelCache, loader: KernelLoader) -> None:
    """Few slots are few decodes, which may be cut in another way."""
    shape = AttentionShape(4, 2, 16, 16, "fp32", 0.25)
    loader.tuning = Tuning(loader, cache.directory, H200, falling_clock())
    found = tuned_tilings(shape, 16, 2, loader, torch.device("cpu"))
    loader.tuning = Tuning(loader, cache.directory, H200, no_clock)
    assert tuned_tilings(shape, 64, 2, loader, torch.device("cpu")) == found
    assert asdict(found[0]) in [each["choice"] for each in kept(cache.directory)]
    loader.tuning = Tuning(loader, cache.directory, H200, falling_clock())
    tuned_tilings(shape, 1, 2, loader, torch.device("cpu"))
    problems = sorted(str(each["problem"]).partition(",")[0] for each in kept(cache.directory))
    assert problems == ["attention chunks", "attention decodes", "attention decodes"]
