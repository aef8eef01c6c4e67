"""The builders: which there are, what their keys hold, and a GPU's way in with a driver that only pretends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import cache as triton_cache

from fastgen.compile.build import triton as build_triton
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, find_compiler
from fastgen.compile.build.loader import KernelLoader, make_builder, target_of
from fastgen.compile.build.triton import TritonBuilder, TritonKernel, triton_arch
from fastgen.compile.build.triton_worker import parse_arch
from fastgen.compile.host.device import AMX, Device
from fastgen.compile.ops.experts.triton import sort_spec
from fastgen.compile.spec import KernelSpec
from fastgen.errors import CompilerNotFoundError, InvalidArgumentError, KernelError
from tests.compile.norms import norm_spec

ROOT = Path(__file__).resolve().parents[2]


def a_norm() -> KernelSpec:
    return norm_spec("triton", "rms", 64, "bf16", 1e-5)


def test_builders_by_name() -> None:
    assert (make_builder("sm_103").target, make_builder("gfx942").arch) == ("triton", "gfx942")
    assert make_builder("interpret").target == "triton"
    assert [make_builder(arch).arch for arch in CPP_ARCHES] == list(CPP_ARCHES)
    for real in ("sm_75", "sm_120", "gfx90a"):
        assert make_builder(real).arch == real
    for wrong in ("", "cuda", "sm90", "sm_9", "sm_77", "sm_999", "sm_90a", "gfx9ff", "avx", "gfx"):
        with pytest.raises(InvalidArgumentError, match=f"target='{wrong}': expected such as sm_80"):
            make_builder(wrong)


def test_the_target_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_CPP_ARCH", raising=False)
    hopper = Device("cuda", "H200", 1 << 37, 0, capability=(9, 0), num_sms=132)
    assert triton_arch(hopper) == target_of(hopper) == "sm_90"
    assert target_of(Device("cuda", "B200", 1 << 37, 0, capability=(10, 0))) == "sm_100"
    full = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
    for sets, arch in (
        ((*full, *AMX), "amx"),
        ((*full[:6], *AMX), "avx512vnni"),
        ((*full, *AMX[:2]), "avx512bf16"),
        (full, "avx512bf16"),
        (full[:6], "avx512vnni"),
        (full[:5], "avx512"),
        (full[:3], "avx2"),
        (full[1:], "portable"),
        ((), "portable"),
    ):
        assert target_of(Device("cpu", "some", 1 << 30, instruction_sets=sets)) == arch


def test_a_matrix_unit_is_emulated_only_if_both_variables_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
    cpu = Device("cpu", "some", 1 << 30, instruction_sets=sets, amx_refusal="the system refused it: Invalid argument")
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "1")
    monkeypatch.delenv("FASTGEN_CPP_ARCH", raising=False)
    assert target_of(cpu) == "avx512bf16"
    assert "-DFASTGEN_EMULATE_AMX" in CppBuilder("amx").flags
    assert "-DFASTGEN_EMULATE_AMX" not in CppBuilder("avx512bf16").flags
    monkeypatch.setenv("FASTGEN_CPP_ARCH", "amx")
    assert target_of(cpu) == "amx"
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "0")
    assert "-DFASTGEN_EMULATE_AMX" not in CppBuilder("amx").flags
    lacking = "lacks amx_bf16, amx_int8, amx_tile .the system refused it: Invalid argument.; it can run avx512bf16, "
    with pytest.raises(InvalidArgumentError, match=lacking):
        target_of(cpu)
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "1")
    with pytest.raises(InvalidArgumentError, match="lacks amx_bf16"):
        target_of(Device("cpu", "some", 1 << 30, instruction_sets=sets[:6]))


def test_triton_versions_and_settings_are_part_of_the_key(monkeypatch) -> None:
    before = TritonBuilder("sm_90").versions()
    assert TritonBuilder("sm_90").versions() == before
    assert TritonBuilder("sm_80").versions() != before
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert TritonBuilder("sm_90").versions() != before
    monkeypatch.delenv("DISABLE_LLVM_OPT")
    monkeypatch.setattr(build_triton.triton, "__version__", "3.0.0")
    assert TritonBuilder("sm_90").versions() != before


@pytest.mark.slow
def test_another_installation_of_the_same_triton_has_entries_of_its_own(tmp_path, monkeypatch) -> None:
    """Its library differs, as between the wheels of two versions of Python."""
    cache = KernelCache(tmp_path)
    (entry,) = KernelLoader(TritonBuilder("sm_90"), cache=cache).build([a_norm()])
    builder = TritonBuilder("sm_90")
    versions, key = builder.versions(), triton_cache.triton_key()
    monkeypatch.setattr(triton_cache, "triton_key", lambda: key.replace(key[-8:], "otherlib"))
    assert builder.versions() == versions
    assert KernelLoader(builder, cache=cache).find(a_norm()) is None
    (other,) = KernelLoader(builder, cache=cache).build([a_norm()])
    assert other.directory != entry.directory
    monkeypatch.undo()
    assert KernelLoader(builder, cache=cache).build([a_norm()]) == [entry]


_SET_CXX = "of a C\\+\\+ compiler, without options, or unset it$"


@pytest.mark.parametrize(
    ("searched", "message"),
    [
        ({"PATH": ""}, r"^no C\+\+ compiler \(.*\): .* Install g\+\+ or clang\+\+$"),
        ({"CXX": "no-such-compiler"}, rf"^CXX='no-such-compiler' names no program, .*{_SET_CXX}"),
        ({"CXX": "g++ -O2"}, rf"^CXX='g\+\+ -O2' names no program, .*{_SET_CXX}"),
        ({"CXX": "false"}, r"/false is no C\+\+ compiler: it does not answer --version. Install .*, or set CXX$"),
    ],
)
def test_without_a_compiler_one_sentence_says_so(monkeypatch, searched, message) -> None:
    find_compiler.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    for name, value in searched.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(CompilerNotFoundError, match=message):
            CppBuilder("portable").versions()
    finally:
        find_compiler.cache_clear()


def test_interpreted_and_compiled_kernels_do_not_mix(tmp_path, monkeypatch) -> None:
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path))
    with pytest.raises(KernelError, match="built but cannot be loaded: this process interprets"):
        loader.load(a_norm())
    monkeypatch.setattr(build_triton.triton.knobs.runtime, "interpret", False)
    with pytest.raises(KernelError, match="set TRITON_INTERPRET=1"):
        TritonBuilder("interpret")


def test_an_interpreter_that_is_too_old_for_numpy_is_reported(tmp_path: Path) -> None:
    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> None:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")  # as from NumPy 2.4 on

    source = tmp_path / "kernels" / "a_norm" / "a_norm.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    with pytest.raises(KernelError, match=r"interpreter of Triton \S+ does not work with NumPy \S+: .* numpy<2\.4"):
        TritonKernel(a_norm(), source, Interpreted(), {}).launch((1,))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"x": torch.zeros(2, 64)}, r"x: float32\[2, 64\] on cpu,"),
        ({"weight": torch.zeros(65, dtype=torch.bfloat16)[1:]}, r"weight: bfloat16\[64\] on cpu, unaligned,"),
        ({"weight": None}, "weight: None,"),
    ],
)
def test_an_interpreted_kernel_takes_no_more_than_a_compiled_one(given: dict[str, Any], told: str, tmp_path) -> None:
    kernel = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path)).load(a_norm())
    right = {name: torch.zeros(2, 64, dtype=torch.bfloat16) for name in ("x", "weight", "out")}
    kernel((2,), *right.values())
    with pytest.raises(KernelError, match=f"{told}.*: it was not built for such arguments"):
        kernel((2,), *(right | given).values())


@pytest.mark.parametrize("number", [2**31, True, 2.0])
def test_nor_any_other_number(number: Any, tmp_path) -> None:
    kernel = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path)).load(sort_spec(4, 16))
    tensors = [torch.zeros(16, dtype=torch.int32) for _ in range(4)]
    kernel((4,), *tensors, 2)
    with pytest.raises(KernelError, match="it was not built for such arguments"):
        kernel((4,), *tensors, number)


def test_a_compiler_process_that_dies_is_an_error_and_the_next_build_works(tmp_path, monkeypatch) -> None:
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path))
    start = build_triton._Workers._start

    def start_and_kill(self):
        worker = start(self)
        worker.process.kill()
        worker.process.wait()
        return worker

    monkeypatch.setattr(build_triton._Workers, "_start", start_and_kill)
    with pytest.raises(KernelError, match="the compiling process ended with status -9"):
        loader.build([a_norm()])
    monkeypatch.undo()
    loader.build([a_norm()])


def test_a_noted_launch_is_made_again_by_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 40 + device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    compiled = SimpleNamespace(run=lambda *given: launched.append(given), function="function", packed_metadata="packed")
    spec = a_norm()
    source = tmp_path / "a.py"
    source.write_text("")
    kernel = TritonKernel(spec, source, None, {}, compiled)
    tensors = [torch.zeros(2, 64, dtype=torch.bfloat16) for each in spec.arguments if each.is_pointer]
    numbers = [2] * (len(spec.arguments) - len(tensors))
    again = kernel.launch_noted((2,), (*tensors, *numbers))
    again()
    addresses = [each.data_ptr() for each in tensors]
    expected = (2, 1, 1, 43, "function", "packed", None, None, None, *addresses, *numbers)
    assert launched == [expected, expected]
    kept = weakref.ref(tensors[0])
    for wrong in (torch.zeros(2, 64), torch.zeros(129, dtype=torch.bfloat16)[1:]):
        with pytest.raises(KernelError, match=f"{spec.name}.*: it was not built for such arguments"):
            kernel.launch_noted((2,), (wrong, *tensors[1:], *numbers))
    del tensors, wrong
    assert kept() is None
    assert len(launched) == 2


def test_only_nvidias_compiler_gets_a_limit_of_registers() -> None:
    spec = replace(a_norm(), options={"num_warps": 8, "maxnreg": 255})
    for arch, limit in (("sm_90", 255), ("gfx942", None)):
        assert build_triton._options(spec, parse_arch(arch)).get("maxnreg") == limit


ON_A_GPU = """
import sys, json, torch, triton
from pathlib import Path
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.ops.linear.tiling import FewRowShape, SplitK
from fastgen.compile.ops.linear.triton import few_row_specs
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.build.triton_worker import StandInDriver, parse_arch
from fastgen.errors import KernelError

launched, loaded, earlier = [], [], []

class Utils:
    get_device_properties = staticmethod(lambda device: {"max_shared_mem": 99 << 10})
    unload_module = staticmethod(lambda module: None)

    def load_binary(self, name, binary, shared, device):
        loaded.append(bytes(binary))
        return 1, 2, 32, 0, 1024

class Driver(StandInDriver):
    utils = Utils()
    launcher_cls = staticmethod(lambda source, metadata: lambda *launch: launched.append((metadata.name, *launch[:3])))

def failure(action):
    try:
        action()
    except KernelError as error:
        return str(error)

just_in_time = triton.runtime.JITFunction.run
triton.runtime.driver.set_active(Driver(parse_arch("sm_90")))
triton.knobs.runtime.jit_cache_hook = lambda **given: earlier.append(given["fn"].name)
spec = norm_spec(NormShape("rms", 64, "bf16", 1e-5))
too_large = few_row_specs(FewRowShape(64, 512, "bf16"), 16, SplitK(64, 128, 4, 8)).main
loader = KernelLoader(make_builder("sm_90"), cache=KernelCache(Path(sys.argv[1])))
entry, _ = loader.build([spec, too_large])
loader.fence.close()
kernel = NormKernel(loader.load(spec))
from_cache = loaded == [entry.source.with_suffix(".cubin").read_bytes()]
x, weight = torch.zeros(6, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
kernel(x, weight, None, x)
kernel(x[:1], weight, None, x[:1])
kernel(x[:0], weight, None, x[:0])
triton.runtime.JITFunction.run = None  # launches do not go through the just-in-time compiler
kernel(x[:2], weight, None, x[:2])
triton.runtime.JITFunction.run = just_in_time
errors = [
    failure(lambda: kernel(x.float(), weight, None, x)),
    failure(lambda: kernel(x, torch.zeros(65, dtype=torch.bfloat16)[1:], None, x)),
    failure(lambda: KernelLoader(make_builder("sm_80"), cache=loader.cache).load(spec)),
]

Path(sys.argv[1], "theirs.py").write_text("import triton\\n\\n@triton.jit\\ndef theirs(x):\\n    pass\\n")
sys.path.insert(0, sys.argv[1])
from theirs import theirs
theirs[(1,)](x)

entry.source.with_name("manifest.json").write_text(
    entry.source.with_name("manifest.json").read_text().replace(entry.report["triton_key"], "A" * 52))
is_still_there = loader.find(spec) is not None
changed = KernelLoader(make_builder("sm_90"), cache=loader.cache)
changed.fence.close()
errors += [failure(lambda: changed.load(spec)), failure(lambda: changed.load(too_large))]
with changed.fence.open():
    NormKernel(changed.load(spec))(x, weight, None, x)
entry_again = changed.find(spec)
is_built_again = entry_again.report["triton_key"] == entry.report["triton_key"] and len(loaded) == 3
print(json.dumps([from_cache, launched, errors, earlier, is_still_there, is_built_again]))
"""


@pytest.mark.slow
def test_on_a_gpu_nothing_is_compiled_but_what_the_cache_has_is_loaded(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", ON_A_GPU, str(tmp_path / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    from_cache, launched, errors, earlier, is_still_there, is_built_again = json.loads(done.stdout)
    name = a_norm().name
    assert from_cache
    assert [each[:2] for each in launched] == [[name, 6], [name, 1], [name, 2], ["theirs", 1], [name, 6]]
    wrong_dtype, unaligned, other_gpu, other_settings, too_large = errors
    assert "x: float32[6, 64] on cpu" in wrong_dtype
    assert "it was not built for such arguments" in wrong_dtype
    assert "weight: bfloat16[64] on cpu, unaligned" in unaligned
    assert "it is for sm_80, and the GPU here is cuda 90" in other_gpu
    assert "Triton would build another binary" in other_settings
    assert "is built but cannot be loaded: out of resource: shared memory, Required: " in too_large
    assert earlier[:3] == [name, "theirs", name]  # a hook that was there before ours still gets what is allowed
    assert is_still_there  # nothing was written beside the binaries
    assert is_built_again
