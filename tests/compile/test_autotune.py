"""Tuning: which way wins, by a clock of the tests' own; what is kept, and when it is found again."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastgen.compile.build import autotune, sources
from fastgen.compile.build.autotune import SHIPPED, Tuning, Way, tuning_here
from fastgen.compile.build.bundle import load_bundle, write_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.triton_kernel import TritonKernel
from fastgen.compile.host.device import current
from fastgen.compile.ops.attention import triton as attention_triton
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import chunk_tiling, chunk_tilings, decode_tiling, decode_tilings
from fastgen.compile.ops.attention.tuning import tuned_tilings
from fastgen.compile.ops.linear import tuning as linear_tuning
from fastgen.compile.ops.linear.finish import Activate, AddAndNorm, Finish, RotateAndWrite
from fastgen.compile.ops.linear.tiling import FewRowShape, candidate_splits
from fastgen.compile.ops.linear.triton import LinearKernel
from fastgen.compile.ops.linear.tuning import tuned_split
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.errors import KernelError
from tests.compile.norms import norm_spec

CPU = torch.device("cpu")
PROBLEM = "a sum of 4 numbers"
Inputs = tuple[Tensor, Sequence[Tensor | QuantizedWeight], Tensor | None]


@pytest.fixture
def loader(tmp_path: Path) -> KernelLoader:
    return KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path / "kernels"), num_jobs=1)


def spec_of(place: int) -> KernelSpec:
    return norm_spec("triton", "rms", 16 * (1 + place), "fp32", 1e-5)


def way(place: int, seconds: float, answer: Sequence[float] = (1.0, 2.0), error: Exception | None = None) -> Way:
    """Takes ``seconds`` by :func:`clock`, and fills what it fills with ``answer``."""

    def start() -> tuple[Callable[[], None], Tensor]:
        if error is not None:
            raise error
        out = torch.zeros(len(answer))

        def run() -> None:
            out.copy_(torch.tensor(answer))

        run.seconds = seconds  # type: ignore[attr-defined]
        return run, out

    return Way({"place": place}, (spec_of(place),), start)


def clock(run: Callable[[], None]) -> float:
    return float(run.seconds)  # type: ignore[attr-defined]


def no_clock(run: Callable[[], None]) -> float:
    raise AssertionError("something is measured")


def tuning(loader: KernelLoader, measure: autotune.Measure | None = clock, name: str = "A GPU") -> Tuning:
    return Tuning(loader, loader.cache.directory, name, measure)


def chosen(loader: KernelLoader, ways: Sequence[Way], measure: autotune.Measure | None = clock) -> int:
    return tuning(loader, measure).choose(PROBLEM, ways, may_measure=True)


# ---- which one wins


def test_the_fastest_wins(loader: KernelLoader) -> None:
    assert chosen(loader, [way(0, 3.0), way(1, 1.0), way(2, 2.0)]) == 1


def test_a_gain_that_the_next_measurement_may_not_show_is_none(loader: KernelLoader) -> None:
    assert chosen(loader, [way(0, 1.0), way(1, 0.98)]) == 0


@pytest.mark.parametrize("wrong", [(1.0, 2.1), (float("nan"), 2.0), (0.0, 0.0)])
def test_a_wrong_answer_does_not_win(loader: KernelLoader, wrong: Sequence[float]) -> None:
    assert chosen(loader, [way(0, 3.0), way(1, 1.0, wrong), way(2, 2.0, (1.00001, 2.0))]) == 2


@pytest.mark.parametrize("error", [RuntimeError("out of resources"), KernelError("it cannot be built")])
def test_a_way_that_fails_is_passed_over(loader: KernelLoader, error: Exception) -> None:
    assert chosen(loader, [way(0, 3.0), way(1, 1.0, error=error), way(2, 2.0)]) == 2


def test_where_the_default_fails_nothing_else_is_tried(loader: KernelLoader, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(loader, [way(0, 3.0, error=RuntimeError("no")), way(1, 1.0)]) == 0
    assert chosen(loader, [way(0, 3.0, (float("inf"), 2.0)), way(1, 1.0, (float("inf"), 2.0))]) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert not (loader.cache.directory / ".tuning").exists()


@pytest.mark.parametrize(("spill_bytes", "best"), [(128, 2), (136, 3)])
def test_a_way_that_is_not_built_or_spills_much_is_passed_over(
    loader: KernelLoader, monkeypatch, spill_bytes: int, best: int
) -> None:
    build = loader.build

    def build_some(specs, progress=None):
        given = list(specs)
        if spec_of(1) in given:
            raise KernelError("it cannot be built")
        spilling = [SimpleNamespace(report={"spill_bytes": spill_bytes * (each == spec_of(2))}) for each in given]
        return spilling if len(given) == 1 else build(given)

    monkeypatch.setattr(loader, "build", build_some)
    assert chosen(loader, [way(0, 4.0), way(1, 1.0), way(2, 2.0), way(3, 3.0)]) == best


# ---- when it is measured at all


@pytest.mark.parametrize("reason", ["no clock", "only told", "fence"])
def test_otherwise_it_is_the_default(loader: KernelLoader, reason: str) -> None:
    if reason == "fence":
        loader.fence.close()
    found = tuning(loader, None if reason == "no clock" else no_clock)
    assert found.choose(PROBLEM, [way(0, 2.0), way(1, 1.0)], may_measure=reason != "only told") == 0
    assert found.chosen == {PROBLEM: {"place": 0}}


def test_without_a_gpu_nothing_is_measured(loader: KernelLoader) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    here = tuning_here(loader)
    assert (here.measure, here.device_name) == (None, None)
    assert loader.tuning.choose(PROBLEM, [way(0, 2.0), way(1, 1.0)], may_measure=True) == 0


@pytest.mark.parametrize(("off", "measures"), [(None, True), ("0", False)])
def test_on_the_gpu_that_is_built_for_it_is_measured_unless_switched_off(monkeypatch, tmp_path, off, measures) -> None:
    properties = SimpleNamespace(name="A GPU", total_memory=1 << 36, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("FASTGEN_AUTOTUNE", raising=False)
    if off is not None:
        monkeypatch.setenv("FASTGEN_AUTOTUNE", off)
    here = tuning_here(KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path)))
    assert (here.device_name, here.directory, here.measure is not None) == ("A GPU", tmp_path, measures)
    other = tuning_here(KernelLoader(TritonBuilder("sm_80"), cache=KernelCache(tmp_path)))
    assert (other.device_name, other.measure) == (None, None)


def test_the_same_problem_is_measured_once(loader: KernelLoader) -> None:
    found = tuning(loader)
    assert found.choose(PROBLEM, [way(0, 2.0), way(1, 1.0)], may_measure=True) == 1
    assert found.choose(PROBLEM, [way(0, 1.0), way(1, 2.0)], may_measure=True) == 1


# ---- what is kept


def kept_file(loader: KernelLoader) -> Path:
    (file,) = (loader.cache.directory / ".tuning").iterdir()
    return file


def test_a_choice_is_kept_with_what_was_measured(loader: KernelLoader) -> None:
    ways = [way(0, 3.0), way(1, 1.0), way(2, 1.0, error=RuntimeError("no"))]
    assert chosen(loader, ways) == 1
    kept = json.loads(kept_file(loader).read_text())
    assert kept["choice"] == {"place": 1}
    assert kept["seconds"] == [[{"place": 0}, 3.0], [{"place": 1}, 1.0]]
    assert kept_file(loader).name.startswith("a_sum_of_4_numbers-")
    assert chosen(loader, ways, no_clock) == 1
    assert tuning(loader, None).choose(PROBLEM, ways, may_measure=False) == 1  # such as `kernels build` on this machine
    assert loader.cache.clean()[0] > 0
    assert not (loader.cache.directory / ".tuning").exists()


def test_a_choice_of_a_problem_with_many_numbers_is_kept(loader: KernelLoader) -> None:
    """A file system limits the length of a file's name, and an attention's shape has more characters."""
    problem = f"attention decodes, {AttentionShape(32, 8, 128, 64, 'bf16', 128**-0.5, sliding_window=4096)}"
    ways = [way(0, 3.0), way(1, 1.0)]
    assert tuning(loader).choose(problem, ways, may_measure=True) == 1
    assert len(problem) > len(kept_file(loader).name)
    assert tuning(loader, no_clock).choose(problem, ways, may_measure=True) == 1


@pytest.mark.parametrize("content", ["", '{"key"', "[1]", "{}", '{"key": {}, "choice": {"place": 1}}', "null"])
def test_a_damaged_or_foreign_file_is_ignored_and_made_again(loader: KernelLoader, content: str) -> None:
    ways = [way(0, 3.0), way(1, 2.0), way(2, 1.0)]
    chosen(loader, ways)
    before = kept_file(loader).read_text()
    kept_file(loader).write_text(content)
    assert chosen(loader, ways) == 2
    assert kept_file(loader).read_text() == before


def test_a_choice_that_is_no_way_any_more_is_ignored(loader: KernelLoader) -> None:
    ways = [way(0, 3.0), way(1, 1.0)]
    chosen(loader, ways)
    kept = json.loads(kept_file(loader).read_text())
    kept_file(loader).write_text(json.dumps(kept | {"choice": {"place": 7}}))
    assert chosen(loader, ways) == 1


@pytest.mark.parametrize("changed", ["device", "versions", "source", "ways"])
def test_it_is_measured_again_where_what_it_depends_on_changed(loader: KernelLoader, monkeypatch, changed) -> None:
    ways = [way(0, 3.0), way(1, 1.0)]
    chosen(loader, ways)
    other = [way(0, 1.0), way(1, 3.0)]
    name = "Another GPU" if changed == "device" else "A GPU"
    if changed == "versions":
        versions = dict(loader.builder.versions())
        monkeypatch.setattr(TritonBuilder, "versions", lambda self: {**versions, "triton": "99"})
    elif changed == "source":
        render = sources.render_body
        monkeypatch.setattr(sources, "render_body", lambda spec: render(spec) + "# changed\n")
    elif changed == "ways":
        other.append(way(2, 9.0))
    assert tuning(loader, name=name).choose(PROBLEM, other, may_measure=True) == 0
    assert len(list((loader.cache.directory / ".tuning").iterdir())) == 2


def test_where_nothing_can_be_kept_the_choice_holds_all_the_same(loader: KernelLoader, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    found = Tuning(loader, tmp_path / "file", "A GPU", clock)
    assert found.choose(PROBLEM, [way(0, 3.0), way(1, 1.0)], may_measure=True) == 1
    assert "cannot be kept" in caplog.text


def test_a_choice_that_cannot_be_written_in_full_leaves_no_file_behind(
    loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = Path.write_text

    def write_some(path: Path, text: str, encoding: str) -> None:
        is_choice = path.parent.name == ".tuning"
        write_all(path, text[:10] if is_choice else text, encoding)
        if is_choice:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_some)
    assert tuning(loader).choose(PROBLEM, [way(0, 3.0), way(1, 1.0)], may_measure=True) == 1
    assert not list((loader.cache.directory / ".tuning").iterdir())


# ---- what is shipped, what is sealed


def test_the_shipped_table_lists_no_device_yet() -> None:
    """The list changes when one is measured, and docs/kernels.md says which."""
    assert json.loads(SHIPPED.read_text())["devices"] == {}


def test_a_device_that_was_measured_before_is_not_measured(loader: KernelLoader, tmp_path: Path, monkeypatch) -> None:
    table = {"A GPU": {PROBLEM: {"place": 1}, "another": {"place": 5}}}
    (tmp_path / "shipped.json").write_text(json.dumps({"devices": table}))
    monkeypatch.setattr(autotune, "SHIPPED", tmp_path / "shipped.json")
    ways = [way(0, 1.0), way(1, 3.0), way(2, 0.5)]
    assert chosen(loader, ways, no_clock) == 1
    assert tuning(loader).choose("another", ways, may_measure=True) == 2  # what is shipped is no way any more
    assert tuning(loader, name="Another GPU").choose(PROBLEM, ways, may_measure=True) == 2


def test_what_was_measured_here_comes_before_what_is_shipped(loader: KernelLoader, tmp_path, monkeypatch) -> None:
    ways = [way(0, 3.0), way(1, 2.0), way(2, 1.0)]
    chosen(loader, ways)
    (tmp_path / "shipped.json").write_text(json.dumps({"devices": {"A GPU": {PROBLEM: {"place": 1}}}}))
    monkeypatch.setattr(autotune, "SHIPPED", tmp_path / "shipped.json")
    assert chosen(loader, ways, no_clock) == 2


def test_a_bundle_brings_the_choices_that_it_was_built_by_and_tunes_nothing(loader: KernelLoader, tmp_path) -> None:
    shape = FewRowShape(20, 96, "fp16", out_dtype="fp32")
    loader.tuning = tuning(loader, measure=falling_clock())
    split = tuned_split(shape, 16, loader, CPU)
    assert split == candidate_splits(shape, 16, "interpret", 2)[-1]
    specs: list[KernelSpec] = []
    linear_of(shape, loader, specs.append)
    write_bundle(loader, specs, tmp_path / "bundle", about={})
    sealed = load_bundle(tmp_path / "bundle", current("cpu"))
    assert sealed.bundle.manifest["tuning"] == loader.tuning.chosen
    sealed.tuning.measure = no_clock
    assert tuned_split(shape, 16, sealed, CPU) == split
    linear_of(shape, sealed, lambda spec: None)
    # what a bundle was not tuned for gets the default
    assert (
        tuned_split(replace(shape, bias=True), 16, sealed, CPU)
        == candidate_splits(replace(shape, bias=True), 16, "interpret", 2)[0]
    )


# ---- the ops that have several ways


def falling_clock() -> autotune.Measure:
    """The later, the faster."""
    calls = itertools.count(1)

    def measure(run: Callable[[], None]) -> float:
        run()
        return 1.0 / next(calls)

    return measure


def linear_of(shape: FewRowShape, loader: KernelLoader, note: Callable[[KernelSpec], None]) -> LinearKernel:
    def load(spec: KernelSpec):
        note(spec)
        return loader.load(spec)

    return LinearKernel(
        shape, load, lambda numel: torch.empty(numel), lambda rows: tuned_split(shape, rows, loader, CPU)
    )


def drawn(shape: FewRowShape, num_rows: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    x, weight = torch.randn(num_rows, shape.in_features), torch.randn(shape.out_features, shape.in_features)
    return x, weight, torch.randn(shape.out_features) if shape.bias else None, torch.empty(num_rows, shape.out_features)


@pytest.mark.parametrize("bias", [False, True])
def test_the_library_serves_the_rows_for_which_it_is_faster(loader: KernelLoader, bias: bool) -> None:
    shape, loaded = FewRowShape(20, 96, "fp32", bias=bias), []
    loader.tuning = tuning(loader, falling_clock())
    linear = linear_of(shape, loader, loaded.append)
    assert not loaded  # it comes last, so it is the fastest
    for num_rows in (1, 16, 17, 64, 65):
        x, weight, given, out = drawn(shape, num_rows)
        linear(x, weight, given, out)
        expected = x @ weight.T + (0.0 if given is None else given)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


FINISHES = {
    "nothing": None,
    "gated activation": Activate("silu", gated=True),
    "activation": Activate("gelu", gated=False),
    "norm": AddAndNorm(NormShape("rms", 24, "fp32", 1e-5, residual=True, scale=0.5)),
    "two norms": AddAndNorm(
        NormShape("layer", 24, "fp32", 1e-5, bias=True, residual=True), NormShape("rms", 24, "fp32", 1e-5, weight=False)
    ),
    "rotation": RotateAndWrite(2, 2, 4, 2),
    "KV write": RotateAndWrite(4, 1, 4),
}


@pytest.mark.parametrize("finish", FINISHES.values(), ids=FINISHES)
def test_every_way_to_cut_a_linear_layer_passes_the_gate(loader: KernelLoader, finish: Finish | None) -> None:
    """With the op that follows: those that compute it too, and those after which its own kernels are launched."""
    shape = FewRowShape(24, 96, "fp32", bias=True)
    loader.tuning = tuning(loader, falling_clock())
    assert tuned_split(shape, 17, loader, CPU, finish) is None
    kept = json.loads(kept_file(loader).read_text())
    assert len(kept["seconds"]) == len(candidate_splits(shape, 17, "interpret", 2)) + 1
    then = "" if finish is None else f", then {finish}"
    assert kept["key"]["problem"] == f"few_row_linear 24 x 96, fp32 to fp32, with bias, 17 rows{then}"
    # What is launched for the library's way is the op alone, and the choice depends on its sources too.
    (hashes,) = [hashes for choice, hashes in kept["key"]["ways"] if choice["by"] == "library"]
    assert len(hashes) == (0 if finish is None else 2 if isinstance(finish, AddAndNorm) and finish.first else 1)


@pytest.mark.parametrize("finish", [FINISHES["norm"], FINISHES["two norms"]], ids=["norm", "two norms"])
def test_layers_that_are_measured_in_turn_add_to_streams_of_their_own(
    loader: KernelLoader, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rounding errors would grow from one to the next, and right results seem different."""
    shape, found = FewRowShape(24, 96, "fp32", bias=True), dict[str, list[Tensor]]()
    inputs = linear_tuning._Trial._inputs

    def choose(problem: str, ways: Sequence[Way], *, may_measure: bool) -> int:
        for each in ways:
            run, out = each.start()
            run()
            found.setdefault(str(each.choice), []).append(out.clone())
        return 0

    monkeypatch.setattr(loader.tuning, "choose", choose)
    for count in (1, 5):

        def in_copies(trial: linear_tuning._Trial, count: int = count) -> Inputs:
            x, weights, bias = inputs(trial)
            return x, [*weights] * count, bias

        monkeypatch.setattr(linear_tuning._Trial, "_inputs", in_copies)
        tuned_split(shape, 3, loader, CPU, finish)
    assert len(found) > 2
    for alone, one_of_five in found.values():
        assert torch.equal(alone, one_of_five)


def test_kernels_are_measured_as_they_are_launched(loader: KernelLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they overlap others."""
    seen = set[str]()

    def noted(spec: KernelSpec, arch: str) -> KernelSpec:
        seen.add(str(spec.parameters.get("kind", spec.op)) if spec.op.startswith("attention") else spec.op)
        return spec

    for module in (attention_triton, linear_tuning):
        monkeypatch.setattr(module, "overlapped", noted)
    loader.tuning = tuning(loader, falling_clock())
    tuned_tilings(AttentionShape(4, 2, 16, 16, "fp32", 0.25), 2, 2, loader, CPU)
    tuned_split(FewRowShape(24, 96, "fp32", weight="int8_weight_only"), 1, loader, CPU, Activate("silu", gated=False))
    of_a_layer = {"few_row_linear", "few_row_reduce", "dequantize", "activation"}
    assert seen == {"attention_plan", "chunks", "decodes", *of_a_layer}


def test_the_op_that_follows_a_layer_is_part_of_what_is_measured(
    loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that compute it too launch nothing more; after the others its own are launched."""
    shape, finish = FewRowShape(24, 96, "fp32"), Activate("silu", gated=True)
    launched: list[str] = []
    launch = TritonKernel.launch

    def noting(kernel: TritonKernel, grid: tuple[int, ...], *arguments: object) -> None:
        launched.append(kernel.spec.op)
        launch(kernel, grid, *arguments)

    def measure(run: Callable[[], None]) -> float:
        launched.clear()
        run()
        return float("activation" in launched)

    monkeypatch.setattr(TritonKernel, "launch", noting)
    loader.tuning = tuning(loader, measure)
    tuned_split(shape, 1, loader, CPU, finish)
    kept = json.loads(kept_file(loader).read_text())["seconds"]
    assert {(choice["by"], seconds) for choice, seconds in kept} == {("kernel", 0.0), ("library", 1.0)}


def test_a_library_that_rounds_what_must_be_wide_is_no_way(loader: KernelLoader) -> None:
    shape = FewRowShape(20, 96, "fp16", out_dtype="fp32")
    loader.tuning = tuning(loader, falling_clock())
    assert tuned_split(shape, 1, loader, CPU) == candidate_splits(shape, 1, "interpret", 2)[-1]


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 2, 16, 16, "fp32", 0.25, sliding_window=20, alibi="plain", softcap=5.0, sinks=True),
        AttentionShape(4, 1, 24, 16, "fp32", 0.2, v_dim=16, values_in_keys=True, q_stride=100),
    ],
    ids=["all features", "latent"],
)
def test_every_tiling_of_attention_passes_the_gate(loader: KernelLoader, shape: AttentionShape) -> None:
    loader.tuning = tuning(loader, falling_clock())
    chunk, decode = tuned_tilings(shape, 4, 2, loader, CPU)
    assert chunk == chunk_tilings(shape, "interpret")[-1]
    assert decode == decode_tilings(shape, "interpret")[-1]
    for file in (loader.cache.directory / ".tuning").iterdir():
        kept = json.loads(file.read_text())
        assert len(kept["seconds"]) == len(kept["key"]["ways"]) > 2


def test_how_far_apart_queries_lie_is_no_other_problem(loader: KernelLoader) -> None:
    for q_stride in (0, 100):
        tuned_tilings(AttentionShape(4, 2, 16, 16, "fp32", 0.25, q_stride=q_stride), 4, 2, loader, CPU)
    assert len(loader.tuning.chosen) == 2


def test_candidates_of_tiles_are_distinct_and_begin_with_the_default() -> None:
    shape = AttentionShape(32, 8, 128, 16, "bf16", 0.1)
    for arch in ("sm_80", "sm_90", "gfx942"):
        for default, found in (
            (chunk_tiling(shape, arch), chunk_tilings(shape, arch)),
            (decode_tiling(shape, arch), decode_tilings(shape, arch)),
        ):
            assert found[0] == default
            assert len(set(found)) == len(found)
            assert all(min(each.block_m, each.block_n) >= 16 and each.num_stages >= 1 for each in found)
            halved = [each.block_n for each in found if each.block_n < default.block_n]
            assert halved == ([default.block_n // 2] if default.block_n > 16 else [])
