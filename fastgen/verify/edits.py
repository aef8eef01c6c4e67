"""Edits of a recipe on its tree, so that every other node keeps its file and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pydantic import ValidationError

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.schema import RecipeSchema
from fastgen.models.recipe.tree import NodePath, Scalar, Tree


def replaced(recipe: Recipe, changes: Mapping[NodePath, Tree | Scalar]) -> Recipe | None:
    """Returns ``recipe`` with a node set at each path; ``None`` as a node removes it.

    Returns ``None`` if the result is not a valid recipe.
    """
    tree = replaced_tree(recipe.tree, changes)
    try:
        schema = RecipeSchema.model_validate(tree.plain())
    except ValidationError:
        return None
    return dataclasses.replace(recipe, schema=schema, tree=tree)


def replaced_tree(tree: Tree, changes: Mapping[NodePath, Tree | Scalar]) -> Tree:
    """Returns ``tree`` with such changes, without checking that it is valid."""
    for path, value in changes.items():
        tree = _set(tree, path, value)
    return tree


def _set(tree: Tree, path: NodePath, value: Tree | Scalar) -> Tree:
    if not path:
        return value if isinstance(value, Tree) else Tree(value, tree.file, tree.line)
    head, rest = path[0], path[1:]
    if isinstance(tree.value, tuple):
        items = tuple(_set(item, rest, value) if str(i) == head else item for i, item in enumerate(tree.value))
        return dataclasses.replace(tree, value=items)
    children = dict(tree.value) if isinstance(tree.value, Mapping) else {}
    if not rest and value is None:
        children.pop(head, None)
    else:
        old = children.get(head, Tree(MappingProxyType({}) if rest else None, tree.file, tree.line))
        children[head] = _set(old, rest, value)
    return dataclasses.replace(tree, value=MappingProxyType(children))


def nodes(tree: Tree, path: NodePath = ()) -> Iterator[tuple[NodePath, Tree]]:
    """Yields every node at and below ``tree`` with its path, from the top."""
    yield path, tree
    if isinstance(tree.value, Mapping):
        for key, child in tree.value.items():
            yield from nodes(child, (*path, key))
    elif isinstance(tree.value, tuple):
        for index, child in enumerate(tree.value):
            yield from nodes(child, (*path, str(index)))
