"""The header that tests read precompiled changes no kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.render import render
from tests.compile.arches import HERE
from tests.compile.norms import norm_spec


def test_a_binary_is_the_same_without_the_precompiled_header(tmp_path: Path) -> None:
    with_it, without = os.environ.get("CXX", ""), shutil.which("g++")
    if without is None or ".headers-" not in with_it:
        pytest.skip("no header is precompiled: this is no x86 CPU with g++, or CXX is set")
    (tmp_path / "norm.cpp").write_text(render(norm_spec("cpp", "rms", 64, "bf16", 1e-5)))
    binaries = []
    for compiler in (with_it, without):
        command = [compiler, *CppBuilder(HERE).flags, "-H", "-o", "norm.so", "norm.cpp"]
        read = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stderr
        assert any(line.startswith("! ") for line in read.splitlines()) == (compiler == with_it), read[:400]
        binaries.append((tmp_path / "norm.so").read_bytes())
    assert binaries[0] == binaries[1]
