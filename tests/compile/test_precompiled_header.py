"""The header that tests read precompiled changes no kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.render import render
from tests.compile.arches import HERE
from tests.compile.norms import norm_spec
from tests.compile.test_arches import SPECS
from tests.precompiled import HEADERS

# Names of the headers that are precompiled; without its own includes a kernel would be built by tests alone.
NAMES = {
    "immintrin.h": r"\b__m\d+|\b_mm\d*_",
    "algorithm": r"\bstd::(min|max|fill|copy|sort|swap|clamp|\w+_bound|nth_element|partial_sort|rotate|reverse)\b",
    "atomic": r"\bstd::(atomic|memory_order)",
    "cmath": r"\bstd::(sqrt|exp2?|log2?|pow|tanh|erfc?|floor|ceil|round|rint|nearbyint|fma|fabs|abs|is\w+|ldexp)\(",
    "cstdint": r"\bu?int(8|16|32|64)_t\b|\buintptr_t\b",
    "cstring": r"\b(std::)?mem(cpy|set|move)\(",
    "type_traits": r"\bstd::(is_same|conditional|enable_if|make_unsigned|is_\w+_v|true_type|integral_constant)",
}


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


@pytest.mark.parametrize("op", SPECS)
def test_kernels_include_what_they_use_of_the_precompiled_header(op: str) -> None:
    assert NAMES.keys() == set(HEADERS)
    source = render(SPECS[op](HERE))
    used = {header for header, names in NAMES.items() if re.search(names, re.sub(r"//.*", "", source))}
    assert {"cstdint"} <= used <= set(re.findall(r"#include <(.*)>", source))
