"""Renders the kernels of the source tree in the current directory, for :mod:`tools.kernel_diff`.

It runs in a process of its own for each of the two trees that are compared, so it imports from fastgen only what every
tree since the first one with generated kernels of all recipes has: the names that the tree's own test module imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastgen.compile.spec import KernelSpec

# The module of a tree that says which kernels there are; older trees have one of the other names.
_MODULES = ("tests.compile.kernel_sources", "tests.compile.golden")
_FORMATS = ("fastgen.compile.weights.formats", "fastgen.compile.ops.quantization")


class Needed(NamedTuple):
    """A kernel that a recipe needs on an architecture, with its weights in one format."""

    recipe: str
    arch: str
    weight_format: str
    spec: KernelSpec


def source_text(spec: KernelSpec, body: str) -> str:
    """The text that is compared: the compiler's options and the declared arguments, then the rendered source."""
    comment = "#" if spec.target == "triton" else "//"
    lines = [f"{key}={value}" for key, value in spec.options.items()]
    lines += [f"{each.name}: {each.kind} {each.dtype}" for each in spec.arguments]
    return "".join(f"{comment} {line}\n" for line in lines) + "\n" + body


def render_tree(arches: list[str], recipes: list[str]) -> dict[str, Any]:
    """Returns ``kernels``, a list of rows, and ``texts``, the sources by the number that a row ends with.

    A row is ``[arch, recipe, weight format, template, name, text]``. Empty lists stand for all that the tree has. An
    architecture that the tree does not know has no kernels.
    """
    tree: Any = importlib.import_module(next(each for each in _MODULES if importlib.util.find_spec(each)))
    known = (*tree.CPP_ARCHES, *importlib.import_module(tree.TritonBuilder.__module__).TRITON_ARCHES)
    arches = [arch for arch in arches or known if arch in known]
    if not arches:
        return {"kernels": [], "texts": []}
    needed: Iterable[Needed] = (
        tree.needed(arches, recipes) if hasattr(tree, "needed") else _older(tree, arches, recipes)
    )
    numbers: dict[str, int] = {}
    kernels = []
    rendered: dict[KernelSpec, str] = {}
    for recipe, arch, weight_format, spec in needed:
        if spec not in rendered:
            rendered[spec] = source_text(spec, tree.render_body(spec))
        number = numbers.setdefault(rendered[spec], len(numbers))
        kernels.append([arch, recipe, weight_format, f"{spec.target}/{spec.template}", spec.name, number])
    return {"kernels": kernels, "texts": list(numbers)}


def _older(tree: Any, arches: list[str], recipes: list[str]) -> Iterator[Needed]:
    """Yields the kernels of a tree whose ``tests.compile.golden`` stored sources and imports what is needed here."""
    import torch

    formats: Any = importlib.import_module(next(each for each in _FORMATS if _exists(each)))
    triton_arches = importlib.import_module(tree.TritonBuilder.__module__).TRITON_ARCHES
    models = {}
    for name, (_, config) in tree.CONFIGS.items():
        if not recipes or name in recipes:
            reduced = tree.small(config)
            models[name] = tree.resolve(tree.find_recipe(reduced), reduced)
    for arch in arches or [*triton_arches, *tree.CPP_ARCHES]:
        is_cpp = arch in tree.CPP_ARCHES
        builder = tree.CppBuilder(arch, compiler="none") if is_cpp else tree.TritonBuilder(arch)
        loader = tree.KernelLoader(builder, num_jobs=1)
        for weight_format in (None, *formats.QUANTIZED["cpp" if is_cpp else "triton"]):
            for name, model in models.items():
                for spec in tree.kernel_specs(model, loader, torch.bfloat16, weight_format=weight_format):
                    yield Needed(name, arch, weight_format or "bf16", spec)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    """Reads architectures and recipes as JSON from the first argument; writes the kernels as JSON to the second."""
    others = [path for path in sys.path[1:] if not Path(path, "tests", "compile").exists()]
    sys.path = [str(Path.cwd()), *others]  # modules of no other source tree are found
    import fastgen

    assert Path(fastgen.__file__).parents[1] == Path.cwd(), f"fastgen was imported from {fastgen.__file__}"
    selection, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    output.write_text(json.dumps(render_tree(selection["arches"], selection["recipes"])), encoding="utf-8")


if __name__ == "__main__":
    main()
