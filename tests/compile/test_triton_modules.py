"""What Triton would compile to launch kernels comes with a bundle: a sealed load takes no compiler at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fastgen.compile.build import triton_modules
from fastgen.compile.build.bundle import Bundle, write_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.triton_modules import stand_in_for_driver
from fastgen.compile.spec import KernelSpec
from tests.compile.norms import norm_spec

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"model": "tiny-llama"}


def a_norm() -> KernelSpec:
    return norm_spec("triton", "rms", 64, "bf16", 1e-5)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    return KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path_factory.mktemp("kernels")), num_jobs=1)


@pytest.fixture(scope="module")
def written(loader: KernelLoader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundles") / "sm_90"
    write_bundle(loader, [a_norm()], place, about=ABOUT)
    return place


def test_a_bundle_has_the_modules_for_this_python(written: Path) -> None:
    names = [file.name.partition("-")[2] for file in (written / "modules").iterdir()]
    assert f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}" in names
    assert [name for name in Bundle.open(written).manifest["files"] if name.startswith("modules/")]


def test_bundles_for_others_have_none(tmp_path: Path) -> None:
    for arch in ("interpret", "gfx942"):
        TritonBuilder(arch).accompany([], tmp_path / arch)
        assert not (tmp_path / arch).exists()


def test_without_a_c_compiler_a_bundle_is_written_and_says_what_it_lacks(
    loader: KernelLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader.build([a_norm()])
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    bundle = write_bundle(loader, [a_norm()], tmp_path / "bundle", about=ABOUT)
    assert "so the bundle needs a C compiler" in caplog.text
    assert not (bundle.directory / "modules").exists()


# A real sealed load: Triton's own driver and launcher, from the bundle. Only the calls that reach for the GPU are made
# up, since the driver's library, which must be there for the module to be loaded, is one that does nothing.
SEALED = """
import dataclasses, json, logging, sys, triton, triton.backends
from pathlib import Path
from triton.backends.nvidia.driver import CudaDriver
from fastgen.compile.build.bundle import load_bundle
from fastgen.compile.host.device import Device
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec
from fastgen.compile.build.triton_worker import parse_arch

logging.basicConfig(level=logging.WARNING)
loaded = []

class Driver(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0
        self.utils.get_device_properties = lambda device: {"max_shared_mem": 227 << 10}
        self.utils.load_binary = lambda name, binary, shared, device: (loaded.append(bytes(binary)), 2, 32, 0, 1024)
        self.utils.unload_module = lambda module: None

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return parse_arch("sm_90")

triton.backends.backends["nvidia"] = dataclasses.replace(triton.backends.backends["nvidia"], driver=Driver)
h100 = Device("cuda", "NVIDIA H100", 80 << 30, index=0, capability=(9, 0), num_sms=132)
spec = norm_spec(NormShape("rms", 64, "bf16", 1e-5))
loader = load_bundle(sys.argv[1], h100)
kernel = loader.load(spec)
entry = loader.find(spec)
module = triton.runtime.driver.active.utils.cuOccupancyMaxActiveClusters.__self__
print(json.dumps([loaded == [entry.source.with_suffix(".cubin").read_bytes()], module.__file__]))
"""


def test_a_sealed_load_compiles_nothing(written: Path, tmp_path: Path) -> None:
    done = sealed_load(written, tmp_path)
    assert done.returncode == 0, done.stderr
    from_bundle, module = json.loads(done.stdout)
    assert from_bundle
    assert Path(module).parent == written / "modules"
    assert "compiles it" not in done.stderr
    assert not (tmp_path / "triton").exists()


def test_where_the_module_is_for_another_python_triton_compiles_its_own_or_says_why_not(
    written: Path, tmp_path: Path
) -> None:
    for file in (written / "modules").iterdir():
        other = file.with_name(file.name.replace(".cpython-", ".cpython-2"))
        manifest = (written / "bundle.json").read_text()
        file.rename(other)
    try:
        script = "import fastgen.compile.build.bundle as bundle\nbundle._seal = lambda manifest: manifest['seal']\n"
        (written / "bundle.json").write_text(manifest.replace(".cpython-", ".cpython-2"))
        done = sealed_load(written, tmp_path, script)
    finally:
        (written / "bundle.json").write_text(manifest)
        for file in (written / "modules").iterdir():
            file.rename(file.with_name(file.name.replace(".cpython-2", ".cpython-")))
    assert done.returncode != 0
    assert "so Triton takes it from its own cache or compiles it" in done.stderr
    assert "Failed to find C compiler" in done.stderr


def sealed_load(bundle: Path, directory: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """In a process that finds no compiler, and whose driver's library does nothing."""
    (directory / "driver").mkdir(exist_ok=True)
    stand_in_for_driver(directory / "driver")
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC", "CXX")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "PATH": str(directory / "nothing"),
        "LD_LIBRARY_PATH": str(directory / "driver"),
        "TRITON_LIBCUDA_PATH": str(directory / "driver"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "FASTGEN_CACHE": str(directory / "kernels"),
    }
    command = [sys.executable, "-c", before + SEALED, str(bundle)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)


def test_the_stand_in_has_the_driver_s_functions(tmp_path: Path) -> None:
    symbols = stand_in_for_driver(tmp_path).read_bytes()
    for name in (b"cuModuleLoadData", b"cuLaunchKernelEx", b"cuGetErrorString"):
        assert name in symbols
    assert triton_modules._LIBRARY.encode() in symbols
