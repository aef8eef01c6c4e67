"""Compares two recipes node by node, each with everything that it extends merged in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.tree import NodePath, Tree

Kind = Literal["only in a", "only in b", "changed", "reordered"]

_BRANCHES: Final = ("model", "layers", "residual")
_SPLIT: Final = "split"


@dataclass(frozen=True)
class Difference:
    """One node that differs: ``a`` and ``b`` are the subtrees at ``path``; ``None`` on a side that has none.

    A whole subtree that one side lacks is one difference. Two mappings may differ only in the order of their keys if
    the order matters: for the branches of a layer, and for the parts of a fused tensor.
    """

    path: NodePath
    a: Tree | None
    b: Tree | None

    @property
    def kind(self) -> Kind:
        if self.a is None:
            return "only in b"
        if self.b is None:
            return "only in a"
        both_mappings = isinstance(self.a.value, Mapping) and isinstance(self.b.value, Mapping)
        return "reordered" if both_mappings else "changed"

    def as_json(self) -> dict[str, Any]:
        sides = {
            side: None if tree is None else {"value": _data(tree, self.kind), "file": tree.file, "line": tree.line}
            for side, tree in (("a", self.a), ("b", self.b))
        }
        return {"path": ".".join(self.path), "kind": self.kind, **sides}


def recipe_differences(a: Recipe, b: Recipe) -> list[Difference]:
    """Returns the differences of ``b`` from ``a``: names and architectures first, then in the order of the recipes."""
    found = list(tree_differences(a.tree, b.tree))
    first = ("name", "architectures")
    return sorted(found, key=lambda each: first.index(each.path[0]) if each.path[0] in first else len(first))


def tree_differences(a: Tree, b: Tree, path: NodePath = ()) -> Iterator[Difference]:
    """Yields the differences of two trees at ``path``. They do not overlap, except that an order may contain others."""
    if not isinstance(a.value, Mapping) or not isinstance(b.value, Mapping):
        if not _same(a, b):
            yield Difference(path, a, b)
        return
    if (path == _BRANCHES or path[-1:] == (_SPLIT,)) and not _in_one_order(list(a.value), list(b.value)):
        yield Difference(path, a, b)
    for key in _keys(list(a.value), list(b.value)):
        left, right = a.value.get(key), b.value.get(key)
        if left is None or right is None:
            yield Difference((*path, key), left, right)
        else:
            yield from tree_differences(left, right, (*path, key))


def _in_one_order(a: list[str], b: list[str]) -> bool:
    """Returns whether the common keys are in the same order and come before the keys of only one side."""
    common = [key for key in a if key in b]
    return a[: len(common)] == common == b[: len(common)]


def _keys(a: list[str], b: list[str]) -> list[str]:
    """Returns all keys in the order of ``a``; a key of only ``b`` follows the key that it follows in ``b``."""
    keys = list(a)
    for index, key in enumerate(b):
        if key not in keys:
            keys.insert(keys.index(b[index - 1]) + 1 if index else 0, key)
    return keys


def _same(a: Tree, b: Tree) -> bool:
    """Compares as YAML does: ``true`` is not 1, and 1 is not 1.0."""
    if isinstance(a.value, tuple) and isinstance(b.value, tuple):
        return len(a.value) == len(b.value) and all(map(_same, a.value, b.value))
    if isinstance(a.value, Mapping) and isinstance(b.value, Mapping):
        return list(a.value) == list(b.value) and all(map(_same, a.value.values(), b.value.values()))
    return type(a.value) is type(b.value) and a.value == b.value


def _data(tree: Tree, kind: Kind) -> Any:
    return list(tree.plain()) if kind == "reordered" else tree.plain()
