"""Rendering: pure, strict, and every parameter is heeded."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest

from fastgen.compile import render as module
from fastgen.compile.render import SUFFIXES, render, render_body, template_name
from fastgen.compile.spec import Argument, KernelSpec
from tests.compile.norms import norm_spec

NODES = ("llama: model.layers.residual.attend.norm", "llama: model.final_norm")


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of templates in the place of the package's."""
    monkeypatch.setattr(module, "TEMPLATE_FOLDERS", (tmp_path,))
    for cached in (module._environment, module._names_read, module._source):
        monkeypatch.setattr(module, cached.__name__, cached.__wrapped__)
    return tmp_path


def toy(**parameters) -> KernelSpec:
    return KernelSpec("toy", "triton", parameters, (Argument("x", "fp32", "in"),))


@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_the_heading_says_what_it_is_and_what_needs_it(target) -> None:
    spec = norm_spec(target, "rms", 4096, "bf16", 1e-5, residual=True, needed_by=NODES)
    lines = render(spec).splitlines()
    mark = {"triton": "# ", "cpp": "// "}[target]
    assert lines[0] == mark + "rms_norm_h4096_bf16_eps1e_05_weight_residual"
    assert lines[1].startswith(mark + "rms_norm(H=4096, dtype=bf16, eps=1e-05, weight=True")
    assert lines[2] == mark + "needed by " + ", ".join(NODES)
    assert lines[3].startswith(f"{mark}rendered from norm{SUFFIXES[target]}.j2")
    assert lines[4] == ""


@pytest.mark.parametrize("nodes", [(), NODES[:1], NODES * 9, ("a\nnode\n# with lines",)])
def test_the_body_starts_at_the_same_line_whatever_needs_it(nodes) -> None:
    spec = norm_spec("triton", "rms", 64, "bf16", 1e-5)
    asked = replace(spec, needed_by=nodes)
    assert render_body(asked) == render_body(spec)
    assert render(asked).splitlines()[5:] == render_body(spec).splitlines()


@pytest.mark.slow
def test_rendering_is_the_same_in_another_process_under_another_hash_seed() -> None:
    code = """
from fastgen.compile.ops.norm.cpp import norm_spec
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.render import render
print(render(norm_spec(NormShape("layer", 96, "fp16", 1e-5, bias=True, residual=True, scale=0.22))), end="")
"""
    run = [sys.executable, "-c", code]
    there = subprocess.run(run, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"} | PATHS).stdout
    assert there == render(norm_spec("cpp", "layer", 96, "fp16", 1e-5, bias=True, residual=True, scale=0.22))


PATHS = {"PYTHONPATH": ":".join(filter(None, sys.path))}


def test_a_triton_kernel_is_python_with_one_function_of_its_name_and_arguments() -> None:
    spec = norm_spec("triton", "layer", 96, "fp16", 1e-5, bias=True, residual=True)
    (function,) = [node for node in ast.parse(render(spec)).body if isinstance(node, ast.FunctionDef)]
    assert function.name == spec.name
    assert [each.arg for each in function.args.args] == ["x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr"]


def test_triton_never_specialises_on_scalars(templates) -> None:
    (templates / "kernel.py.j2").write_text((Path(module.__file__).parent / "templates/kernel.py.j2").read_text())
    (templates / "toy.py.j2").write_text('{% from "kernel.py.j2" import signature %}{{ signature(spec) }}')
    arguments = (Argument("x", "fp32", "in"), Argument("n", "i32", "scalar"), Argument("scale", "fp32", "scalar"))
    text = render_body(KernelSpec("toy", "triton", {}, arguments))
    assert text.strip() == "@triton.jit(do_not_specialize=['n', 'scale'])\ndef toy(x_ptr, n, scale):"


def test_a_name_that_the_spec_lacks_is_an_error(templates) -> None:
    (templates / "toy.py.j2").write_text("{% if window %}{{ H }}{% endif %}")
    assert render_body(toy(H=3, window=True)) == "3"
    with pytest.raises(jinja2.UndefinedError, match="'window' is undefined"):
        render_body(toy(H=3))


def test_a_parameter_that_the_template_never_reads_is_an_error(templates) -> None:
    (templates / "toy.py.j2").write_text("{% if False %}{{ H }}{% endif %}")
    assert render_body(toy(H=3)) == ""
    with pytest.raises(ValueError, match=r"toy.py.j2 never reads softcap, window, which toy_h3_window"):
        render_body(toy(H=3, window=True, softcap=None))


def test_what_an_included_template_reads_is_read(templates) -> None:
    (templates / "toy.py.j2").write_text('{% include "part.j2" %}')
    (templates / "part.j2").write_text('{% import "deeper.j2" as deeper with context %}{{ deeper.show() }}')
    (templates / "deeper.j2").write_text("{% macro show() %}{{ H }}{% endmacro %}")
    assert render_body(toy(H=3)) == "3"
    with pytest.raises(ValueError, match="never reads W"):
        render_body(toy(H=3, W=1))


def test_text_is_not_escaped(templates) -> None:
    (templates / "toy.py.j2").write_text("{{ op }}")
    assert render_body(toy(op="a < b && 'c'")) == "a < b && 'c'"


def test_a_template_that_does_not_exist(templates) -> None:
    with pytest.raises((jinja2.TemplateNotFound, FileNotFoundError), match="toy"):
        render_body(toy())


def test_every_template_has_a_name_of_its_own_that_says_its_language() -> None:
    names = [
        file.relative_to(folder).as_posix()
        for folder in module.TEMPLATE_FOLDERS
        for file in folder.rglob("*")
        if file.is_file()
    ]
    assert len(names) > 50
    assert len(set(names)) == len(names)
    assert [name for name in names if not name.endswith((".py.j2", ".cpp.j2", ".h"))] == []
    assert template_name(norm_spec("cpp", "rms", 8, "fp32", 1e-5)) == "norm.cpp.j2"


def test_headers_are_inlined_once_and_with_what_they_include(templates) -> None:
    (templates / "outer.h").write_text('#pragma once\n#include <cmath>\n#include "inner.h"\nint outer;\n')
    (templates / "inner.h").write_text("#pragma once\nint inner = {{1}}[0];\n")
    text = module.inline_headers('#include "inner.h"\n#include "outer.h"\n#include "inner.h"\nint own;\n')
    assert text == "int inner = {{1}}[0];\n#include <cmath>\nint outer;\nint own;\n"
    with pytest.raises(jinja2.TemplateNotFound, match=r"other\.h"):
        module.inline_headers('#include "other.h"\n')


def test_c_declares_what_is_only_read_and_that_nothing_overlaps() -> None:
    spec = norm_spec("cpp", "rms", 8, "bf16", 1e-5, residual=True)
    text = render(spec)
    head = text[text.index(f"void {spec.name}(") :].partition(") {")[0]
    assert [line.strip() for line in head.splitlines()[1:]] == [
        "const bf16* __restrict x,",
        "bf16* __restrict residual,",
        "const bf16* __restrict weight,",
        "bf16* __restrict out,",
        "int64_t num_rows",
    ]
