"""Renders a kernel spec to source text: one strict Jinja environment, pure and deterministic.

A template lies in the folder ``templates`` beside the module whose specs it renders; templates and headers that several
ops share lie in ``compile/templates``. A file is known by its name alone, wherever it lies. C++ without choices is a
header, which a template includes as C++ does: ``#include "vectors.h"``. The rendered text has the header's text in that
place, so every source is complete by itself.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jinja2
from jinja2 import meta

from fastgen.compile.spec import DTYPES, Argument, KernelSpec, power_of_2

_HERE = Path(__file__).parent
# The folders of templates and headers.
TEMPLATE_FOLDERS = tuple(sorted(_HERE.rglob("templates")))
SUFFIXES = {"triton": ".py", "cpp": ".cpp"}
# The call by which a kernel that starts early waits for those before it, and what its template calls for that.
_WAIT, _CALLS_WAIT = "gdc_wait", re.compile(r"\{\{ (wait|overlap)\(spec\)")
_INCLUDE = re.compile(r'#include "([^"]+)"\n')
_COMMENTS = {"triton": "#", "cpp": "//"}
# The template of a second entry point, which takes the arguments as an array.
_ENTRY_POINTS = {"triton": "", "cpp": "from_slots.cpp.j2"}
_TRITON_TYPES = {
    **{short: f"tl.{torch_name}" for torch_name, short in DTYPES.items()},
    **{"fp8e4m3": "tl.float8e4nv", "fp8e5m2": "tl.float8e5", "i1": "tl.int1"},
}
_CPP_TYPES = {
    **{"fp32": "float", "fp16": "fp16", "bf16": "bf16", "i1": "bool"},
    **{"i8": "int8_t", "u8": "uint8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t"},
}


def render(spec: KernelSpec) -> str:
    """Returns the kernel's source: :func:`render_heading`, then :func:`render_body`."""
    return render_heading(spec) + render_body(spec)


def render_heading(spec: KernelSpec) -> str:
    """Returns a comment that says what the kernel is and which recipe nodes need it.

    It always has five lines, since Triton's cache key contains the line a function starts at.
    """
    first = ", ".join(spec.needed_by[:3]) or "no recipe node"
    others = f" and {len(spec.needed_by) - 3} more" if len(spec.needed_by) > 3 else ""
    lines = (
        spec.name,
        str(spec),
        f"needed by {first}{others}",
        f"rendered from {template_name(spec)}: edit that, since this file is rendered again; see docs/kernels.md",
    )
    return "".join(f"{_COMMENTS[spec.target]} {' '.join(line.split())}\n" for line in lines) + "\n"


def render_body(spec: KernelSpec) -> str:
    """Returns the source without its heading. It depends on nothing but what distinguishes the spec, so cache keys are
    made of it.

    The template sees the spec's parameters by their names, and ``spec`` itself. Filters: ``tl`` and ``cpp`` turn a
    dtype's short name into the language's, ``declare`` an argument into a C++ parameter, and ``power_of_2`` a number
    into the next power of 2. Raises ``jinja2.UndefinedError`` for a name that the spec lacks, and ``ValueError`` for a
    parameter that the template never reads: such a feature would be requested and not computed. It raises that, too,
    for a kernel that overlaps with others and would not wait for them.
    """
    name = template_name(spec)
    unread = spec.parameters.keys() - _names_read(name)
    if unread:
        raise ValueError(f"{name} never reads {', '.join(sorted(unread))}, which {spec.name} needs")
    body = render_text(name, **spec.parameters, spec=spec)
    if spec.options.get("launch_pdl") and _WAIT not in body:
        raise ValueError(f"{name} has no {_WAIT}, and {spec.name} is to start before the kernels before it end")
    entry_point = _ENTRY_POINTS[spec.target]
    if entry_point and spec.arguments:
        body += render_text(entry_point, spec=spec)
    return inline_headers(body)


def can_wait(spec: KernelSpec) -> bool:
    """Returns whether the spec's template can wait for the kernels before it: see ``wait`` of ``kernel.py.j2``."""
    return _CALLS_WAIT.search(_source(template_name(spec))) is not None


def render_text(template: str, **context: object) -> str:
    """Renders any template, by its file's name."""
    return _environment().get_template(template).render(context)


def inline_headers(text: str) -> str:
    """Returns the source with each ``#include "name.h"`` replaced by the text of that header, and nothing where the
    header was included before. Raises ``jinja2.TemplateNotFound`` for a header that does not exist.
    """
    lines, included = [], set[str]()

    def add(part: str) -> None:
        for line in part.splitlines(keepends=True):
            if line == "#pragma once\n":
                continue
            if (found := _INCLUDE.fullmatch(line)) is None:
                lines.append(line)
            elif found[1] not in included:
                included.add(found[1])
                add(_source(found[1]))

    add(text)
    return "".join(lines)


def template_name(spec: KernelSpec) -> str:
    """Returns the name of the spec's template."""
    return f"{spec.template}{SUFFIXES[spec.target]}.j2"


@cache
def _source(name: str) -> str:
    """Returns the text of a template or header."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDERS),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tl"] = _TRITON_TYPES.__getitem__
    environment.filters["cpp"] = _CPP_TYPES.__getitem__
    environment.filters["declare"] = _declare
    environment.filters["unpack"] = _unpack
    environment.filters["power_of_2"] = power_of_2
    return environment


def _declare(argument: Argument) -> str:
    """Returns a parameter of a C++ function. Addresses of different arguments never overlap."""
    if not argument.is_pointer:
        return f"{_CPP_TYPES[argument.dtype]} {argument.name}"
    const = "const " if argument.kind == "in" else ""
    return f"{const}{_CPP_TYPES[argument.dtype]}* __restrict {argument.name}"


def _unpack(argument: Argument, index: int) -> str:
    """Returns an expression for an argument of a C++ function, read from its 8 bytes ``slots[index]``."""
    if argument.is_pointer:
        const = "const " if argument.kind == "in" else ""
        return f"reinterpret_cast<{const}{_CPP_TYPES[argument.dtype]}*>(slots[{index}])"
    if argument.dtype == "fp32":
        return f"[](int64_t slot) {{ float x; __builtin_memcpy(&x, &slot, 4); return x; }}(slots[{index}])"
    return f"{_CPP_TYPES[argument.dtype]}(slots[{index}])"


@cache
def _names_read(template: str) -> frozenset[str]:
    """Returns every variable that a template, or one that it includes or imports, may read."""
    tree = _environment().parse(_source(template))
    others = [_names_read(other) for other in meta.find_referenced_templates(tree) if other]
    return frozenset(meta.find_undeclared_variables(tree)).union(*others)
