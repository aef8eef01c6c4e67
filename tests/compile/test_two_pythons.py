"""Two versions of Python with one version of Triton share bundles; in the cache each finds its own kernels.

The interpreters are those of ``.venvs``, which ``make pythons`` makes, those on the PATH, this one, and those that
FASTGEN_PYTHONS names (separated as in PATH). Each must have Triton and torch.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile.sealed_loads import MADE_UP_GPU, ROOT, SEALED, run_beside_driver

pytestmark = pytest.mark.slow

ABOUT_PYTHON = """
import json, sys, triton
import fastgen.compile.build.bundle, fastgen.compile.build.triton
print(json.dumps([list(sys.version_info[:2]), triton.__version__]))
"""

WRITE = """
import sys
from pathlib import Path
from fastgen.compile.build.bundle import write_bundle
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec

loader = KernelLoader(TritonBuilder("sm_90"), num_jobs=1)
write_bundle(loader, [norm_spec(NormShape("rms", 64, "bf16", 1e-5))], Path(sys.argv[1]), about={"model": "tiny-llama"})
"""

FROM_CACHE = """
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder

loader = KernelLoader(TritonBuilder("sm_90"), num_jobs=1)
before = [entry.directory.name for entry in loader.cache.entries()]
loader.load(spec)
again = KernelLoader(loader.builder)
again.fence.close()
again.load(spec)
entry = loader.find(spec)
is_its_own = loaded == [entry.source.with_suffix(".cubin").read_bytes()] * 2
print(json.dumps([is_its_own, before, entry.directory.name]))
"""


def interpreters() -> dict[str, tuple[list[int], str]]:
    """Returns the version of Python and that of Triton of each interpreter that can import this package."""
    named = [each for each in os.environ.get("FASTGEN_PYTHONS", "").split(os.pathsep) if each]
    prepared = [str(each) for each in sorted((ROOT / ".venvs").glob("*/bin/python"))]
    on_path = [found for minor in range(11, 20) if (found := shutil.which(f"python3.{minor}")) is not None]
    facts = {}
    for python in dict.fromkeys([sys.executable, *named, *prepared, *on_path]):
        done = subprocess.run([python, "-c", ABOUT_PYTHON], capture_output=True, check=False, env=settings_of(python))
        if done.returncode == 0:
            version, triton_version = json.loads(done.stdout)
            facts[python] = (version, triton_version)
    return facts


def settings_of(python: str) -> dict[str, str]:
    """Returns an environment in which the interpreter finds this package, and its own libraries only."""
    inherited = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    path = [str(ROOT), *filter(None, sys.path)] if python == sys.executable else [str(ROOT)]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    """The first two interpreters of different versions with the same Triton."""
    found = interpreters()
    for one, other in itertools.combinations(found, 2):
        if found[one][0] != found[other][0] and found[one][1] == found[other][1]:
            return one, other
    seen = ", ".join(f"{python}: Triton {version}" for python, (_, version) in found.items())
    pytest.skip(f"no two versions of Python with the same Triton (FASTGEN_PYTHONS names more): {seen}")


@pytest.mark.parametrize("is_swapped", [False, True], ids=["one to other", "other to one"])
def test_what_one_python_built_another_runs_or_builds_for_itself(
    pair: tuple[str, str], is_swapped: bool, tmp_path: Path
) -> None:
    builds, loads = reversed(pair) if is_swapped else pair
    cache = {"FASTGEN_CACHE": str(tmp_path / "cache")}
    place = tmp_path / "bundle"
    written = run_beside_driver(builds, WRITE, [str(place)], tmp_path, settings_of(builds) | cache)
    assert written.returncode == 0, written.stderr

    sealed = run_beside_driver(loads, MADE_UP_GPU + SEALED, [str(place)], tmp_path, settings_of(loads) | cache)
    assert sealed.returncode == 0, sealed.stderr
    from_bundle, _ = json.loads(sealed.stdout)
    assert from_bundle
    assert "so Triton takes it from its own cache or compiles it" in sealed.stderr

    cached = run_beside_driver(loads, MADE_UP_GPU + FROM_CACHE, [], tmp_path, settings_of(loads) | cache)
    assert cached.returncode == 0, cached.stderr
    is_its_own, before, entry = json.loads(cached.stdout)
    assert is_its_own
    assert len(before) == 1
    assert entry not in before
