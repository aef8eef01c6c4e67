"""Modules that Triton would compile to launch kernels come with a bundle: a sealed load takes no compiler at all."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from fastgen.compile.build import triton_modules
from fastgen.compile.build.bundle import Bundle, write_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.triton_modules import stand_in_for_driver
from tests.compile.sealed_loads import ABOUT, a_norm, sealed_load


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


def test_a_sealed_load_compiles_nothing(written: Path, tmp_path: Path) -> None:
    done = sealed_load(written, tmp_path)
    assert done.returncode == 0, done.stderr
    from_bundle, module = json.loads(done.stdout)
    assert from_bundle
    assert Path(module).parent == written / "modules"
    assert "compiles it" not in done.stderr
    assert not (tmp_path / "triton").exists()


@pytest.mark.slow
def test_a_sealed_load_by_another_installation_of_the_same_triton(written: Path, tmp_path: Path) -> None:
    """Triton's own key holds the bytes of its library, which differ between the wheels of two versions of Python."""
    script = "import triton.runtime.cache\ntriton.runtime.cache.triton_key = lambda: 'another library'\n"
    done = sealed_load(written, tmp_path, script)
    assert done.returncode == 0, done.stderr
    from_bundle, _ = json.loads(done.stdout)
    assert from_bundle


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


def test_the_stand_in_has_the_driver_s_functions(tmp_path: Path) -> None:
    symbols = stand_in_for_driver(tmp_path).read_bytes()
    for name in (b"cuModuleLoadData", b"cuLaunchKernelEx", b"cuGetErrorString"):
        assert name in symbols
    assert triton_modules._LIBRARY.encode() in symbols
