"""Makes single mistakes in a recipe, mechanically over every node.

A node is dropped; two names of equal shape, or two entries of one mapping, are exchanged; a number, flag, kind, text,
operator or axis is changed; a norm is moved. The name and the architectures of the recipe stay.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from types import MappingProxyType

from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.tree import NodePath, Scalar, Tree
from fastgen.models.spec import ModelSpec
from fastgen.verify.edits import nodes, replaced

SECTIONS = ("config", "define", "requires", "ignores", "aliases", "model")

_KINDS = (
    *("rms", "layer", "plain", "gated", "half", "interleaved", "head", "all"),
    *("softmax", "softmax_top_k", "sigmoid", "float32", "bfloat16"),
)
_FLAGS = ("when", "bias", "affine", "tied", "normalize", "per_head_weight")
_NORM_PLACES = ("norm", "output_norm", "sum_norm", "attention.norm", "latent_attention.norm", "mlp.norm", "moe.norm")
_TOKEN = re.compile(r"'[^']*'|\d+\.?\d*(?:e-?\d+)?|[A-Za-z_][\w.]*|==|!=|<=|>=|//|[-+*/%<>|(),\[\]]")
_OPERATORS = {
    **{"==": "!=", "!=": "==", "<": "<=", ">": ">=", "<=": "<", ">=": ">", "+": "-", "-": "+", "*": "/", "/": "*"},
    **{"and": "or", "or": "and", "not": "", "in": "not in", "true": "false", "false": "true", "max": "min"},
}


@dataclass(frozen=True)
class Mutant:
    """A recipe with one mistake; ``paths`` are the changed nodes."""

    kind: str
    what: str
    paths: tuple[str, ...]
    recipe: Recipe


_Changes = Mapping[NodePath, Tree | Scalar]
_Change = tuple[str, str, _Changes]


def mutants(recipe: Recipe, specs: Iterable[ModelSpec]) -> Iterator[Mutant]:
    """Yields every distinct mutant that is a valid recipe. ``specs`` are models of the recipe, used for their
    shapes.
    """
    seen = {repr(recipe.tree.plain())}
    for kind, what, changes in _changes(recipe, list(specs)):
        changed = replaced(recipe, changes)
        if changed is not None and (text := repr(changed.tree.plain())) not in seen:
            seen.add(text)
            yield Mutant(kind, what, tuple(".".join(path) for path in changes), changed)


def _changes(recipe: Recipe, specs: list[ModelSpec]) -> Iterator[_Change]:
    for path, tree in nodes(recipe.tree):
        if not path or path[0] not in SECTIONS:
            continue
        if len(path) > 1:
            yield _dropped(recipe, path)
        if isinstance(tree.value, Mapping):
            yield from _moved_norms(path, tree)
            yield from _reordered(path, tree)
        elif not isinstance(tree.value, tuple):
            for kind, value in _other_values(path, tree.value):
                yield kind, f"{'.'.join(path)}: {_shown(tree.value)} -> {_shown(value)}", {path: value}
    yield from _exchanged_entries(recipe)
    yield from _exchanged_names(recipe, specs)


def _shown(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dropped(recipe: Recipe, path: NodePath) -> _Change:
    parent = recipe.tree.find(path[:-1])
    if isinstance(parent.value, tuple):
        rest = tuple(item for index, item in enumerate(parent.value) if str(index) != path[-1])
        plain = parent.value[int(path[-1])].plain()
        return "drop", f"{'.'.join(path)} ({plain}) dropped", {path[:-1]: replace(parent, value=rest)}
    return "drop", f"{'.'.join(path)} dropped", {path: None}


# ---------------------------------------------------------------------------------------------------------- values


def _other_values(path: NodePath, value: Scalar) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, bool):
        yield "flip", not value
    elif isinstance(value, int):
        yield "number", value + 1
    elif isinstance(value, float):
        yield "number", value * 10
    elif path[0] in ("ignores", "aliases") or not isinstance(value, str):
        return
    elif value in _KINDS:
        yield from (("flip", kind) for kind in _KINDS if kind != value)
    elif path[-1] == "layout":
        yield from (("layout", other) for other in _other_axes(value))
    elif path[0] in ("config", "define", "requires") or re.search(r"[ ('\[]", value):
        yield from _other_expressions(value)
    if isinstance(value, str) and path[-1] in _FLAGS:
        yield "flip", f"not ({value})"


def _other_axes(layout: str) -> Iterator[str]:
    """Yields layouts with two axes exchanged."""
    names = re.findall(r"\w+", layout)
    for one, other in combinations(names, 2):
        yield re.sub(r"\w+", lambda match, pair={one: other, other: one}: pair.get(match[0], match[0]), layout)


def _other_expressions(text: str) -> Iterator[tuple[str, Scalar]]:
    """Yields expressions with one token changed: a number, an operator, a truth value, a quoted value."""
    tokens = list(_TOKEN.finditer(text))
    texts = [token[0] for token in tokens if token[0][0] == "'"]
    paths = [span for match in re.finditer(r"first\(", text) for span in [_quoted_from(text, match.end())]]
    for token in tokens:
        start, end = token.span()
        for kind, value in _other_tokens(token[0], texts):
            if token[0][0] == "'" and any(first <= start < last for first, last in paths):
                continue  # the name of a key
            yield kind, f"{text[:start]}{value}{text[end:]}".strip()


def _quoted_from(text: str, start: int) -> tuple[int, int]:
    """Returns where the quoted paths of the `first(` that begins at ``start`` end."""
    match = re.compile(r"(\s*'[^']*'\s*,?)*").match(text, start)
    assert match is not None
    return match.span()


def _other_tokens(token: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    if token[0].isdigit():
        yield "number", str(int(token) + 1) if token.isdecimal() else f"{float(token) * 10:g}"
    elif token in _OPERATORS:
        yield "operator" if token not in ("true", "false", "not") else "flip", _OPERATORS[token]
    elif token[0] == "'":
        name = token.strip("'")
        if name in ACTIVATIONS:
            yield "text", "'relu'" if name != "relu" else "'gelu'"
        else:
            others = [other for other in dict.fromkeys(texts) if other != token]
            yield from (("text", other) for other in others or [f"'{name}_'"])


# ----------------------------------------------------------------------------------------------------------- norms


def _moved_norms(path: NodePath, tree: Tree) -> Iterator[_Change]:
    """Yields recipes with a norm moved within its branch, to another branch, or between the ends of the model."""
    branches = {(*path, name): branch for name, branch in _entries(tree)} if path[-1] == "residual" else {}
    for at, branch in branches.items():
        for place in _NORM_PLACES:
            norm = _at(branch, place)
            for to, other in branches.items() if norm is not None else ():
                for target in _NORM_PLACES if to == at else (place,):
                    part = target.rpartition(".")[0]
                    if (to, target) == (at, place) or _at(other, target) or (part and not _at(other, part)):
                        continue
                    old, new = (*at, *place.split(".")), (*to, *target.split("."))
                    yield "move", f"{'.'.join(old)} moved to {'.'.join(new)}", {old: None, new: norm}
    if path == ("model",):
        for old, new in (("final_norm", "embedding.norm"), ("embedding.norm", "final_norm")):
            norm = _at(tree, old)
            if norm is not None and _at(tree, new) is None:
                changes: _Changes = {("model", *old.split(".")): None, ("model", *new.split(".")): norm}
                yield "move", f"model.{old} moved to model.{new}", changes


def _at(tree: Tree, path: str) -> Tree | None:
    found: Tree | None = tree
    for key in path.split("."):
        found = None if found is None else found.child(key)
    return found


def _entries(tree: Tree) -> list[tuple[str, Tree]]:
    return list(tree.value.items()) if isinstance(tree.value, Mapping) else []


# ------------------------------------------------------------------------------------------------------- exchanges


def _reordered(path: NodePath, tree: Tree) -> Iterator[_Change]:
    """Yields recipes with adjacent branches, or adjacent parts of a fused tensor, exchanged."""
    entries = _entries(tree)
    for index in range(len(entries) - 1) if path[-1] in ("residual", "split") else ():
        (one, _), (other, _) = entries[index : index + 2]
        turned = [*entries[:index], entries[index + 1], entries[index], *entries[index + 2 :]]
        reordered = replace(tree, value=MappingProxyType(dict(turned)))
        yield "order", f"{'.'.join(path)}: {other} before {one}", {path: reordered}


def _exchanged_entries(recipe: Recipe) -> Iterator[_Change]:
    """Yields recipes with two values of one mapping exchanged: numbers, spellings, shares of a fused tensor."""
    for path, tree in nodes(recipe.tree):
        if path not in (("config",), ("aliases",)) and path[-1:] != ("split",):
            continue
        entries = _entries(tree)
        pairs = (
            pairwise(entries) if path == ("config",) else combinations(entries, 2)
        )  # few numbers have the same value
        for (one, first), (other, second) in pairs:
            changes = {(*path, one): second, (*path, other): first}
            yield "exchange", f"{'.'.join(path)}: {one} and {other} exchanged", changes


def _exchanged_names(recipe: Recipe, specs: list[ModelSpec]) -> Iterator[_Change]:
    """Yields recipes with two module names exchanged that have equal shapes in some model."""
    shapes: list[dict[str, set[tuple[int, ...]]]] = []
    for spec in specs:
        found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for tensor in spec.tensors():
            if tensor.names[0].endswith(".weight"):
                found[tensor.node.path].add(tensor.stored_shape)
        shapes.append(found)
    named: dict[NodePath, str] = {}
    for path, tree in nodes(recipe.tree):
        if path[0:1] == ("model",) and isinstance(tree.value, str) and path[-1] not in ("at", "correction"):
            owner = ".".join(path)
            if any(owner in found or owner.removesuffix(".weight") in found for found in shapes):
                named[path] = owner
    for one, other in combinations(named, 2):
        inside = [("experts" in path, path[:2] == ("model", "layers")) for path in (one, other)]
        first, second = recipe.tree.find(one), recipe.tree.find(other)
        if inside[0] == inside[1] and first.value != second.value and _equal(shapes, named[one], named[other]):
            yield "exchange", f"{'.'.join(one)} and {'.'.join(other)} exchanged", {one: second, other: first}


def _equal(shapes: list[dict[str, set[tuple[int, ...]]]], one: str, other: str) -> bool:
    for found in shapes:
        first, second = (found.get(each) or found.get(each.removesuffix(".weight")) for each in (one, other))
        if first and second and first & second:
            return True
    return False
