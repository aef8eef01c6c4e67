"""A recipe file as a tree of plain data in which every node knows the file and the line that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastgen.errors import RecipeError

Scalar = str | int | float | bool | None
NodePath = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tree:
    """One node of a recipe. ``value`` is a scalar, a tuple of trees, or a mapping from keys to trees."""

    value: Scalar | tuple[Tree, ...] | Mapping[str, Tree]
    file: str
    line: int
    # Number of nodes at and below this one; an alias counts each time it is used.
    size: int = 1

    def plain(self) -> Any:
        """Returns the data without positions: scalars, tuples and dicts."""
        if isinstance(self.value, Mapping):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(child.plain() for child in self.value)
        return self.value

    def find(self, path: NodePath) -> Tree:
        """Returns the node at ``path``, or the deepest node on the way to it."""
        tree = self
        for key in path:
            child = tree.child(key)
            if child is None:
                break
            tree = child
        return tree

    def child(self, key: str) -> Tree | None:
        if isinstance(self.value, Mapping):
            return self.value.get(key)
        if isinstance(self.value, tuple) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def without(self, key: str) -> Tree:
        """Returns this mapping without ``key``."""
        assert isinstance(self.value, Mapping)
        return mapping({name: child for name, child in self.value.items() if name != key}, self.file, self.line)

    def error(self, path: NodePath, message: str) -> RecipeError:
        """Returns an error with ``message`` and the location of the node at ``path`` below this one."""
        found = self.find(path)
        return RecipeError(message, file=found.file, line=found.line, node=".".join(path) or None)


def mapping(children: dict[str, Tree], file: str, line: int) -> Tree:
    """Returns a node that maps keys to ``children``; it is read-only."""
    return Tree(MappingProxyType(children), file, line, 1 + sum(child.size for child in children.values()))


def merge(parent: Tree, variant: Tree, path: NodePath = ()) -> Tree:
    """Returns ``parent`` with the differences that ``variant`` states; each node keeps its file and line.

    Mappings merge key by key, anything else replaces the inherited value, and null removes an inherited key.
    """
    if not isinstance(parent.value, Mapping) or not isinstance(variant.value, Mapping):
        return without_nulls(variant, path)
    merged = dict(parent.value)
    for key, tree in variant.value.items():
        if key not in merged:
            merged[key] = without_nulls(tree, (*path, key))
        elif tree.value is None:
            del merged[key]
        else:
            merged[key] = merge(merged[key], tree, (*path, key))
    return mapping(merged, variant.file, variant.line)


def without_nulls(tree: Tree, path: NodePath) -> Tree:
    """Returns ``tree`` after checking that it contains no null: nothing is inherited here that null could remove."""
    if tree.value is None:
        message = "null removes an inherited key, but none is inherited here; write `none` for the value"
        raise RecipeError(message, file=tree.file, line=tree.line, node=".".join(path))
    for key, child in tree.value.items() if isinstance(tree.value, Mapping) else ():
        without_nulls(child, (*path, key))
    return tree


def stated_name(tree: Tree, key: str) -> str | None:
    """Returns the text at the top-level ``key``; ``None`` if the file has no such key."""
    entry = tree.child(key)
    if entry is None:
        return None
    if not isinstance(entry.value, str):
        raise tree.error((key,), "must be the name of a recipe")
    return entry.value
