"""From a spec to a kernel that runs, on both targets, and what is said when that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastgen.compile.build import cpp as build_cpp
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch, find_compiler
from fastgen.compile.build.fence import Fence
from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.host.device import current
from fastgen.compile.ops.norm.reference import rms_norm
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec
from fastgen.errors import KernelError
from tests.compile.norms import norm_kernel, norm_spec
from tests.pages import DOCS, blocks

SEED = 20
RUNNABLE = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(current("cpu"))) :]
NODE = "llama: model.final_norm"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


def a_norm(target: str = "cpp", **changed) -> KernelSpec:
    return norm_spec(**{"target": target, "kind": "rms", "size": 64, "dtype": "fp32", "eps": 1e-5} | changed)


def test_a_batch_is_built_once_each_and_in_order(tmp_path) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))
    first, second = a_norm(size=8), a_norm(size=16)
    reported: list[tuple[int, int]] = []
    entries = loader.build([first, second, first], lambda *progress: reported.append(progress))
    assert [entry.name for entry in entries] == [first.name, second.name, first.name]
    assert entries[0] == entries[2]
    assert reported == [(1, 2), (2, 2)]
    assert loader.build([]) == []


def test_progress_is_reported_one_at_a_time_and_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(CppBuilder, "build", lambda builder, spec, source: {})
    specs = [a_norm(size=size) for size in range(1, 13)]
    reported: list[tuple[int, int]] = []

    def slowly(*progress: int) -> None:
        time.sleep(0.001)  # the others continue
        reported.append(progress)

    KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path), num_jobs=6).build(specs, slowly)
    assert reported == [(done, 12) for done in range(1, 13)]


def test_a_second_start_builds_nothing_whatever_needs_the_kernels(tmp_path, monkeypatch) -> None:
    KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path)).build([a_norm(needed_by=(NODE,))])
    monkeypatch.setattr(CppBuilder, "build", None)
    other = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))
    kernel = other.load(a_norm(needed_by=("opt: model.final_norm",)))
    assert other.load(a_norm()) is kernel
    assert other.find(a_norm(size=65)) is None


def test_a_kernel_that_another_process_cleans_before_it_is_loaded_is_built_again(tmp_path, monkeypatch) -> None:
    """Unless nothing may be built any more."""
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))
    load, num_loads = CppBuilder.load, 0

    def load_after_cleaning(builder, spec, entry):
        nonlocal num_loads
        num_loads += 1
        if num_loads == 1:
            KernelCache(tmp_path).clean()
        return load(builder, spec, entry)

    monkeypatch.setattr(CppBuilder, "load", load_after_cleaning)
    assert loader.load(a_norm()).source.exists()
    assert num_loads == 2
    num_loads = 0
    loader.build([a_norm(size=16)])
    loader.fence.close("of a test")
    with pytest.raises(KernelError, match="is built but cannot be loaded"):
        loader.load(a_norm(size=16))


def test_flags_and_compiler_and_architecture_are_part_of_the_key(tmp_path, monkeypatch) -> None:
    cache = KernelCache(tmp_path)
    spec = a_norm()
    KernelLoader(CppBuilder("portable"), cache=cache).build([spec])
    assert KernelLoader(CppBuilder("portable"), cache=cache).find(spec) is not None
    assert KernelLoader(CppBuilder("avx2"), cache=cache).find(spec) is None
    monkeypatch.setattr(build_cpp, "_version", lambda compiler: "g++ 99")
    assert KernelLoader(CppBuilder("portable"), cache=cache).find(spec) is None
    monkeypatch.undo()
    monkeypatch.setattr(build_cpp, "_FLAGS", (*build_cpp._FLAGS, "-g"))
    assert KernelLoader(CppBuilder("portable"), cache=cache).find(spec) is None


def test_a_loader_builds_for_its_own_target_only() -> None:
    with pytest.raises(ValueError, match="this loader builds for cpp"):
        KernelLoader(CppBuilder("portable")).build([a_norm("triton")])


# ---- the fence


def test_behind_a_closed_fence_only_what_is_cached_loads(tmp_path) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))
    known, unknown = a_norm(), a_norm(size=65, needed_by=(NODE,))
    loader.build([known])
    loader.fence.close()
    loader.load(known)
    with pytest.raises(KernelError, match=f"^warm-up is over: kernel {unknown.name} is not there, and it is too late"):
        loader.build([unknown])
    with pytest.raises(KernelError, match=re.escape(NODE)) as caught:
        loader.load(unknown)
    assert (caught.value.kernel, caught.value.nodes) == (unknown.name, (NODE,))
    with loader.fence.open():
        loader.build([unknown])
    loader.load(unknown)
    with pytest.raises(KernelError, match="too late"):
        loader.load(a_norm(size=66))


def test_a_fence_says_why_and_belongs_to_one_engine() -> None:
    fence, other = Fence(), Fence()
    fence.check("build", "norm")
    fence.close("this engine runs from a sealed bundle")
    assert (fence.closed, other.closed) == (True, False)
    with pytest.raises(KernelError, match=r"^this engine runs from a sealed bundle: .* too late to capture it"):
        fence.check("capture", "the forward pass at 64 tokens")
    with fence.open():
        fence.check("build", "norm")
    assert fence.closed


# ---- what goes wrong


def run_alone(script: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    """The script in a fresh Python that finds no fastgen, with such options."""
    assert script is not None
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    text = Path(script).read_text()
    assert "import fastgen" not in text
    assert "from fastgen" not in text
    command = [sys.executable, *options, script]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=600)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm renders with a mistake in its last line, at which compilers print something."""
    from fastgen.compile.build import sources

    def render_body(spec: KernelSpec) -> str:
        text = render(replace(spec, needed_by=())).partition("\n\n")[2]
        wrong = {"triton": "    tl.store(out_ptr, tl.missing)\n", "cpp": "int missing = nowhere;\n"}
        if spec.target == "triton":
            text = 'import sys\nprint("printed, and missing in the answer", file=sys.stderr)\n' + text
        return text.rstrip() + "\n" + wrong[spec.target]

    monkeypatch.setattr(sources, "render_body", render_body)


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("portable", "error: .?nowhere.? was not declared"),
        ("sm_90", r"CompilationError: .*no attribute .missing.*, at: tl.store\(out"),
    ],
)
def test_a_kernel_that_does_not_compile(tmp_path, broken, arch, said, capfd) -> None:
    loader = KernelLoader(make_builder(arch), cache=KernelCache(tmp_path))
    spec = a_norm(loader.builder.target, needed_by=(NODE,))
    with pytest.raises(KernelError) as caught:
        loader.load(spec)
    error = caught.value
    assert re.search(said, str(error).splitlines()[0])
    assert str(error).startswith(f"kernel {spec.name} cannot be built: ")
    assert (error.kernel, error.spec, error.nodes) == (spec.name, str(spec), (NODE,))
    assert all(part in str(error) for part in (NODE, str(spec), error.file, error.reproducer))
    assert "missing" in Path(error.file).read_text()
    assert NODE in Path(error.file).read_text()
    log = Path(error.file).with_name("log.txt").read_text()
    assert len(log) > 100
    assert arch == "portable" or "printed, and missing in the answer" in log
    assert capfd.readouterr().err == ""
    done = run_alone(error.reproducer)
    assert done.returncode != 0
    assert re.search("nowhere|missing", done.stderr)
    assert loader.find(spec) is None
    assert KernelCache(tmp_path).entries() == []


@pytest.mark.slow
def test_a_reproducer_of_a_kernel_that_is_mended_succeeds(tmp_path, broken) -> None:
    for arch, wrong, mended in (("portable", "nowhere", "0"), ("sm_90", "tl.missing", "0.0")):
        loader = KernelLoader(make_builder(arch), cache=KernelCache(tmp_path))
        with pytest.raises(KernelError) as caught:
            loader.load(a_norm(loader.builder.target))
        script = Path(caught.value.reproducer)
        script.write_text(script.read_text().replace(wrong, mended))
        done = run_alone(str(script))
        assert done.returncode == 0, done.stderr


def test_a_reproducer_says_what_it_needs_and_does_not_find(tmp_path, broken) -> None:
    scripts = {}
    for arch in ("portable", "sm_90"):
        loader = KernelLoader(make_builder(arch), cache=KernelCache(tmp_path))
        with pytest.raises(KernelError) as caught:
            loader.load(a_norm(loader.builder.target))
        scripts[arch] = caught.value.reproducer
    there = Path(scripts["portable"])
    there.write_text(there.read_text().replace(find_compiler(), "/nowhere/g++"))
    no_compiler = run_alone(scripts["portable"])
    assert no_compiler.stderr == "this script needs the compiler /nowhere/g++, which is not there\n"
    no_packages = run_alone(scripts["sm_90"], "-S")
    assert no_packages.stderr == f"this script needs triton, which {sys.executable} does not have\n"


def test_the_first_failure_of_a_batch_is_raised_and_the_rest_stays_usable(tmp_path, monkeypatch) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path), num_jobs=2)
    good, bad = a_norm(size=8), a_norm(size=9)
    real = CppBuilder.build

    def build(self, spec, source):
        if spec == bad:
            source.write_text("nonsense;")
        return real(self, spec, source)

    monkeypatch.setattr(CppBuilder, "build", build)
    with pytest.raises(KernelError, match=bad.name):
        loader.build([good, bad])
    x, weight, out = torch.randn(2, 8), torch.rand(8), torch.empty(2, 8)
    norm_kernel(loader.load(good))(x, weight, None, out)
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-5))


def test_a_launch_with_wrong_tensors_in_cpp(tmp_path) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))
    kernel = norm_kernel(loader.load(a_norm(needed_by=(NODE,))))
    x, weight = torch.zeros(3, 64), torch.zeros(64, dtype=torch.float64)
    with pytest.raises(KernelError, match=r"x: float32\[3, 64\] on cpu, weight: float64\[64\] on cpu") as caught:
        kernel(x, weight, None, x.clone())
    assert "expected a torch.float32 tensor" in str(caught.value)
    assert caught.value.nodes == (NODE,)
    assert run_alone(caught.value.reproducer).returncode == 0  # C would not have noticed; the script shows the call
    for wrong in (None, 3):
        with pytest.raises(KernelError, match=f"weight: {wrong}"):
            kernel(x, wrong, None, x.clone())


def test_a_launch_that_fails_in_triton(tmp_path, monkeypatch) -> None:
    loader = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path))
    kernel = loader.load(a_norm("triton", needed_by=(NODE,)))
    x = torch.zeros(3, 64)
    with pytest.raises(KernelError, match=r"2 arguments instead of 3") as caught:
        kernel((3,), x, x)
    assert caught.value.nodes == (NODE,)
    done = run_alone(caught.value.reproducer)
    assert done.returncode != 0
    assert "out_ptr" in done.stderr


def test_a_failure_that_finds_no_room_for_its_remains_is_still_reported(tmp_path, broken, monkeypatch) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path))

    def failed(self, name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KernelCache, "failed", failed)
    with pytest.raises(KernelError, match="nowhere") as caught:
        loader.load(a_norm())
    assert (caught.value.file, caught.value.reproducer) == (None, None)


# ---- looking inside


def test_an_edited_source_takes_the_place_of_the_rendered_one(tmp_path, monkeypatch) -> None:
    loader = KernelLoader(CppBuilder("portable"), cache=KernelCache(tmp_path / "cache"))
    spec = a_norm()
    ours = loader.build([spec])
    text = render(spec).replace("value *= float(weight[i])", "value *= -float(weight[i])")
    (tmp_path / f"{spec.name}.cpp").write_text(text)
    monkeypatch.setenv("FASTGEN_KERNEL_SOURCES", str(tmp_path))
    with pytest.warns(UserWarning, match=f"kernel {spec.name} is taken from .*{spec.name}.cpp"):
        kernel = norm_kernel(loader.load(spec))
    x, weight, out = torch.randn(2, 64), torch.rand(64), torch.empty(2, 64)
    kernel(x, weight, None, out)
    torch.testing.assert_close(out, -rms_norm(x, weight, 1e-5))
    with warnings.catch_warnings(action="error", category=UserWarning):  # another kernel is none of its business
        loader.build([a_norm(size=8)])
    monkeypatch.delenv("FASTGEN_KERNEL_SOURCES")
    assert KernelLoader(CppBuilder("portable"), cache=loader.cache).build([spec]) == ours


def test_the_examples_of_the_docs_run(tmp_path, monkeypatch) -> None:
    """The second one continues the first, and compares two backends itself."""
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path))
    codes = blocks(DOCS / "kernels.md", "python")
    assert len(codes) == 2
    names: dict[str, torch.Tensor] = {}
    for code in codes:
        exec(code, names)
    torch.testing.assert_close(names["residual"], names["x"])
    torch.testing.assert_close(names["out"], rms_norm(names["x"], names["weight"], 1e-5))
