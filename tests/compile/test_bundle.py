"""Sealed bundles: run where nothing may be compiled, and are refused with a sentence where they do not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastgen.compile.build import bundle, sources
from fastgen.compile.build import cpp as build_cpp
from fastgen.compile.build import triton as build_triton
from fastgen.compile.build.bundle import Bundle, bundle_beside, bundle_target, load_bundle, write_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.device import AMX, Device, current
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.ops.norm.reference import rms_norm
from fastgen.compile.spec import KernelSpec
from fastgen.errors import BundleError, KernelError
from tests.compile.norms import norm_kernel, norm_spec

CPU = current("cpu")
H100 = Device("cuda", "NVIDIA H100", 80 << 30, index=0, capability=(9, 0), num_sms=132)
A100 = replace(H100, name="NVIDIA A100", capability=(8, 0))
ABOUT = {"model": "tiny-llama", "dtype": "float32"}
AGAIN = "build it again: fastgen kernels build"


def a_norm(target: str = "cpp", **changed) -> KernelSpec:
    return norm_spec(**{"target": target, "kind": "rms", "size": 64, "dtype": "fp32", "eps": 1e-5} | changed)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def written(cache: KernelCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundles") / "portable"
    specs = [a_norm(needed_by=("llama: model.final_norm",)), a_norm(residual=True), tape_spec(), thread_pool_spec()]
    write_bundle(KernelLoader(CppBuilder("portable"), cache=cache), specs, place, about=ABOUT)
    return place


@pytest.fixture(scope="module")
def written_for_h100(cache: KernelCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundles") / "sm_90"
    write_bundle(KernelLoader(TritonBuilder("sm_90"), cache=cache), [a_norm("triton")], place, about=ABOUT)
    return place


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("something is compiled, or a compiler is looked for")

    monkeypatch.setattr(build_cpp, "find_compiler", fail)
    monkeypatch.setattr(CppBuilder, "build", fail)
    monkeypatch.setattr(TritonBuilder, "build", fail)
    monkeypatch.setattr(build_triton._Workers, "ask", fail)


# ---- what it is


def test_a_kernel_of_a_bundle_computes_and_nothing_is_compiled(written: Path, no_compiler: None) -> None:
    sealed = load_bundle(written, CPU)
    kernel = sealed.load(a_norm(needed_by=("opt: model.final_norm",)))
    assert sealed.load(a_norm()) is kernel
    assert sealed.find(a_norm()) is not None
    assert sealed.find(a_norm(size=65)) is None
    x, weight, out = torch.randn(3, 64), torch.rand(64), torch.empty(3, 64)
    norm_kernel(kernel)(x, weight, None, out)
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-5))


def test_it_runs_in_a_process_without_compiler_and_cache(written: Path, tmp_path: Path) -> None:
    code = f"""
import torch
from fastgen.compile.build.bundle import load_bundle
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.ops.norm.cpp import NormKernel, norm_spec
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.host.thread_pool import load_thread_pool

loader = load_bundle({str(written)!r})
load_thread_pool(loader).resize(2)
norm = NormKernel(loader.load(norm_spec(NormShape("rms", 64, "fp32", 1e-5))))
x, weight, out = torch.randn(3, 64), torch.ones(64), torch.empty(3, 64)
pool = GraphPool(torch.device("cpu"), loader)
with loader.fence.open():  # as an engine does while it starts
    graph = pool.capture("a step", lambda: norm(x, weight, None, out))
x.fill_(7)
graph.replay()
print(out.unique().tolist())
"""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": str(tmp_path / "nothing")}
    environment["FASTGEN_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (value,) = json.loads(done.stdout)
    assert value == pytest.approx(1)
    assert not (tmp_path / "cache").exists()


def test_the_manifest_says_what_it_is_and_what_built_it(written: Path) -> None:
    opened = Bundle.open(written)
    manifest = opened.manifest
    assert (opened.arch, opened.about, manifest["target"]) == ("portable", ABOUT, "cpp")
    assert manifest["versions"] == dict(CppBuilder("portable").versions())
    assert set(opened.entries) == {
        each.digest for each in (a_norm(), a_norm(residual=True), tape_spec(), thread_pool_spec())
    }
    kernel = manifest["kernels"][a_norm().digest]
    assert kernel["needed_by"] == ["llama: model.final_norm"]
    assert kernel["report"]["binary_bytes"] == opened.entries[a_norm().digest].source.with_suffix(".so").stat().st_size
    files = {str(file.relative_to(written)) for file in written.rglob("*") if file.is_file()}
    assert files == {"bundle.json", *manifest["files"]}
    assert opened.size_bytes == sum((written / file).stat().st_size for file in files)
    assert str(written.parent) not in (written / "bundle.json").read_text()


def test_a_bundle_may_be_moved(place: Path, no_compiler: None) -> None:
    moved = place.rename(place.with_name("elsewhere"))
    assert load_bundle(moved, CPU).load(a_norm()).spec == a_norm()


def test_a_bundle_for_a_gpu_is_written_and_opened_without_one(written_for_h100: Path, no_compiler: None) -> None:
    sealed = load_bundle(written_for_h100, H100)
    (entry,) = sealed.build([a_norm("triton")])
    assert {file.suffix for file in entry.files()} >= {".py", ".ptx", ".cubin", ".json"}
    assert entry.report["spill_bytes"] == 0
    text = "".join(file.read_text(errors="replace") for file in written_for_h100.rglob("*") if file.is_file())
    assert str(written_for_h100.parent) not in text


def test_its_fence_is_closed_from_the_start(written: Path) -> None:
    with pytest.raises(KernelError, match=f"runs from the sealed bundle {written}: a graph is not there"):
        load_bundle(written, CPU).fence.check("capture", "a graph")


# ---- writing


def test_writing_replaces_a_bundle_and_nothing_else(place: Path, cache: KernelCache, tmp_path: Path) -> None:
    kernels = KernelLoader(CppBuilder("portable"), cache=cache)
    write_bundle(kernels, [a_norm(size=8), a_norm(size=8)], place, about={})
    assert [entry.name for entry in Bundle.open(place).entries.values()] == [a_norm(size=8).name]
    (tmp_path / "empty").mkdir()
    write_bundle(kernels, [a_norm()], tmp_path / "empty", about={})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BundleError, match="is not empty and no bundle of kernels"):
        write_bundle(kernels, [a_norm()], tmp_path / "file", about={})
    for nowhere in (tmp_path / "file" / "below", Path("/proc/nowhere"), tmp_path / ("long" * 100)):
        with pytest.raises(BundleError, match=f"the bundle cannot be written to {nowhere}: "):
            write_bundle(kernels, [a_norm()], nowhere, about={})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bundle", "empty", "file"]


def test_what_cannot_be_built_leaves_the_earlier_bundle_as_it_was(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "render_body", lambda spec: "nonsense;")
    before = (place / "bundle.json").read_bytes()
    kernels = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path / "cache"))
    with pytest.raises(KernelError, match="cannot be built"):
        write_bundle(kernels, [a_norm()], place, about={})
    assert (place / "bundle.json").read_bytes() == before
    Bundle.open(place)


# ---- damage


def change_a_byte(place: Path) -> str:
    file = next(place.rglob("*.so"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return rf"{file.name} was changed; {AGAIN}"


def cut(place: Path) -> str:
    file = next(place.rglob("*.so"))
    os.truncate(file, file.stat().st_size // 2)
    return f"{file.name} was changed"


def take_away(place: Path) -> str:
    file = next(place.rglob("*.cpp"))
    file.unlink()
    return f"{file.name} is missing"


def add(place: Path) -> str:
    (place / "kernels" / "other.so").write_bytes(b"")
    return "other.so does not belong to it"


def point_nowhere(place: Path) -> str:
    """Makes a file that no user can read."""
    file = next(place.rglob("*.cpp"))
    file.unlink()
    file.symlink_to("nowhere")
    return f"cannot be read: \\S*{file.name}: No such file or directory; {AGAIN}"


def edit_the_manifest(place: Path) -> str:
    file = place / "bundle.json"
    file.write_text(file.read_text().replace('"portable"', '"avx2"'))
    return "bundle.json was changed"


def cut_the_manifest(place: Path) -> str:
    os.truncate(place / "bundle.json", 100)
    return "damaged: bundle.json: "


def another_format(place: Path) -> str:
    (place / "bundle.json").write_text('{"format": 99}')
    return "of another version of fastgen"


def no_manifest(place: Path) -> str:
    (place / "bundle.json").unlink()
    return "is no bundle of kernels: it has no bundle.json"


def not_there(place: Path) -> str:
    shutil.rmtree(place)
    return "is no bundle of kernels"


def a_list(place: Path) -> str:
    (place / "bundle.json").write_text("[1]")
    return "of another version of fastgen"


def nested_too_deep(place: Path) -> str:
    (place / "bundle.json").write_text("[" * 100_000)
    return "damaged: bundle.json: "


def a_target_of_two(place: Path) -> str:
    (place / "bundle.json").write_text('{"target": ["cpp", "triton"], "arch": "portable"}')
    return "of another version of fastgen"


@pytest.mark.parametrize(
    "spoil",
    [
        change_a_byte,
        cut,
        take_away,
        add,
        point_nowhere,
        edit_the_manifest,
        cut_the_manifest,
        another_format,
        no_manifest,
        not_there,
        a_list,
        nested_too_deep,
        a_target_of_two,
    ],
)
def test_a_damaged_bundle_is_refused(place: Path, spoil: Callable[[Path], str]) -> None:
    load_bundle(place, CPU)
    said = spoil(place)
    bundle_target(place)  # which a load reads first, raises nothing
    with pytest.raises(BundleError, match=said) as caught:
        load_bundle(place, CPU)
    assert str(place) in str(caught.value)
    assert AGAIN in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- for something else


def test_beside_the_weights_the_best_that_runs_is_taken(tmp_path: Path) -> None:
    for arch in ("portable", "avx2", "avx512", "sm_80"):
        (tmp_path / f"kernels-{arch}").mkdir()
    old = Device("cpu", "an old CPU", 1 << 30, num_cores=1)
    newer = replace(old, instruction_sets=("avx2", "fma", "f16c"))
    found = [bundle_beside(tmp_path, device, ABOUT).name for device in (old, newer, A100)]
    assert found == ["kernels-portable", "kernels-avx2", "kernels-sm_80"]
    place = tmp_path / "kernels-sm_90"
    command = f"fastgen kernels build tiny-llama --target sm_90 --dtype float32 --output {place}"
    with pytest.raises(BundleError, match=re.escape(f"there is no {place}; build it: {command}")):
        bundle_beside(tmp_path, H100, ABOUT)


def test_for_other_settings(written: Path) -> None:
    as_good = {"model": "another", "dtype": "float32", "max_num_seqs": "9"}
    assert load_bundle(written, CPU, as_good).bundle.about == ABOUT
    command = "fastgen kernels build 'my model' --target portable --dtype float32 --block-size 32 --output DIR"
    with pytest.raises(BundleError, match=f"for block size none, and 32 is asked for; build the right one: {command}"):
        load_bundle(written, CPU, {"model": "my model", "dtype": "float32", "block_size": "32"})


def test_for_another_device(written: Path, written_for_h100: Path) -> None:
    with pytest.raises(
        BundleError, match=r"is for sm_90, and NVIDIA A100 needs one for sm_80: fastgen kernels build tiny-"
    ):
        load_bundle(written_for_h100, A100)
    with pytest.raises(BundleError, match=r"is for portable, and NVIDIA H100 needs one for sm_90"):
        load_bundle(written, H100)
    with pytest.raises(BundleError, match=r"is for sm_90, and .* needs one for "):
        load_bundle(written_for_h100, CPU)
    with pytest.raises(BundleError, match=r"one for interpret: .* --target interpret --quantize int4_weight_only "):
        load_bundle(written_for_h100, CPU, {"model": "tiny-llama", "quantize": "int4_weight_only"})


def test_for_a_cpu_with_other_instructions(cache: KernelCache, tmp_path: Path) -> None:
    write_bundle(KernelLoader(CppBuilder("avx2"), cache=cache), [a_norm()], tmp_path / "avx2", about=ABOUT)
    old = Device("cpu", "an old CPU", 1 << 30, num_cores=1)
    with pytest.raises(BundleError, match=r"is for avx2, and an old CPU needs one for portable: .*--target portable"):
        load_bundle(tmp_path / "avx2", old)
    every = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni")
    assert load_bundle(tmp_path / "avx2", replace(old, instruction_sets=every)).builder.arch == "avx2"


def test_for_a_matrix_unit_that_is_emulated(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
    without = Device("cpu", "a CPU", 1 << 30, num_cores=1, instruction_sets=sets)
    having = replace(without, instruction_sets=(*sets, *AMX))
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "1")
    write_bundle(KernelLoader(CppBuilder("amx"), cache=cache), [a_norm()], tmp_path / "amx", about=ABOUT)
    for device in (without, having):
        assert load_bundle(tmp_path / "amx", device).builder.arch == "amx"
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "0")
    with pytest.raises(BundleError, match="is for amx, and a CPU needs one for avx512bf16"):
        load_bundle(tmp_path / "amx", without)
    with pytest.raises(BundleError, match="it was built for an emulated matrix unit, and FASTGEN_EMULATE_AMX says"):
        load_bundle(tmp_path / "amx", having)


def test_for_another_machine(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cpp.platform, "machine", lambda: "riscv64")
    with pytest.raises(BundleError, match=r"it was built for \w+ machines, and this is riscv64; " + AGAIN):
        load_bundle(written, CPU)


def test_by_another_triton(written_for_h100: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_triton.triton.__version__
    monkeypatch.setattr(build_triton.triton, "__version__", "3.5.9")
    with pytest.raises(
        BundleError, match=f"it was built by Triton {real}, and Triton 3.5.9 is installed here; {AGAIN}"
    ):
        load_bundle(written_for_h100, H100)


def test_by_another_assembler(written_for_h100: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TritonBuilder.versions
    monkeypatch.setattr(TritonBuilder, "versions", lambda self: {**real(self), "backend": "ptxas 99"})
    with pytest.raises(BundleError, match=r"Triton's backend was .* where it was built, and is ptxas 99 here"):
        load_bundle(written_for_h100, H100)


def test_another_compiler_does_not_matter_to_what_is_built(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cpp, "_version", lambda compiler: "g++ 99")
    assert load_bundle(written, CPU).load(a_norm()).spec == a_norm()


def test_a_kernel_that_it_lacks(written: Path, no_compiler: None) -> None:
    sealed = load_bundle(written, CPU)
    with pytest.raises(
        BundleError, match=r"\(model tiny-llama, dtype float32\) lacks 2 of 3 kernels .*" + AGAIN
    ) as caught:
        sealed.build([a_norm(), a_norm(size=65), a_norm(size=66), a_norm(size=65)])
    assert f"{a_norm(size=65).name}, {a_norm(size=66).name}" in str(caught.value)
    with pytest.raises(BundleError, match="lacks 1 of 1 kernels"):
        sealed.load(a_norm(eps=1e-6))


def test_a_kernel_that_is_rendered_differently_here(written: Path, monkeypatch, no_compiler: None) -> None:
    sealed = load_bundle(written, CPU)
    real = sources.render_body
    monkeypatch.setattr(sources, "render_body", lambda spec: real(spec) + "// mended")
    with pytest.raises(BundleError, match=f"has kernel {a_norm().name} of another source .*--target portable"):
        sealed.load(a_norm())


def test_an_edited_source_does_not_get_past_the_seal(written: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / f"{a_norm().name}.cpp").write_text("// edited")
    monkeypatch.setenv("FASTGEN_KERNEL_SOURCES", str(tmp_path))
    with pytest.warns(UserWarning, match="is taken from"), pytest.raises(BundleError, match="of another source"):
        load_bundle(written, CPU).load(a_norm())


def test_a_launch_that_fails_leaves_nothing_in_the_bundle(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    kernel = norm_kernel(load_bundle(place, CPU).load(a_norm()))
    with pytest.raises(KernelError, match=r"expected a torch\.float32 tensor") as caught:
        kernel(torch.zeros(2, 64), torch.zeros(64).double(), None, torch.zeros(2, 64))
    assert Path(caught.value.reproducer).is_relative_to(tmp_path / "cache")
    Bundle.open(place)


def test_a_binary_that_the_system_cannot_load_is_reported(place: Path) -> None:
    """Sealed as it is, but made against libraries that are not here, for one."""
    file = next(place.rglob("rms_norm*weight.so"))
    file.write_bytes(b"\x7fELF of another world")
    manifest = json.loads((place / "bundle.json").read_text())
    manifest["files"][str(file.relative_to(place))] = bundle.file_hash(file)
    manifest["seal"] = bundle._seal(manifest)
    (place / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(KernelError, match=re.escape(a_norm().name) + " is built but cannot be loaded"):
        load_bundle(place, CPU).load(a_norm())
