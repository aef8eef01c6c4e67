"""Text about recipes for people: escaping for terminals, scalars as YAML, lists of layers, locations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from fastgen.errors import RecipeError
from fastgen.models.recipe.tree import Scalar
from fastgen.models.recipe.yaml_reader import parse_recipe_yaml


def printable(text: str) -> str:
    """Returns ``text`` with every character escaped that is not printable ASCII.

    Text from a file can then neither control a terminal nor be wider than its length.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each.isascii() and each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def yaml_scalar(value: Scalar, *, flow: bool = False) -> str:
    """Returns the scalar as YAML, with ``flow`` for a place inside brackets. A text is quoted only if a recipe would
    otherwise mean something else by it.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    text, expected = (f"x: [{value}]", (value,)) if flow else (f"x: {value}", value)
    try:
        is_plain = parse_recipe_yaml(text, "").plain() == {"x": expected}
    except RecipeError:
        is_plain = False
    return value if is_plain else json.dumps(value)


def layer_list(indices: Sequence[int]) -> str:
    """Returns ascending ``indices`` as ``layer 5``, ``layers 0–2, 7`` or ``layers 0, 2, 4 … 40``."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    steps = {after - before for before, after in pairwise(indices)}
    if len(steps) == 1 and steps != {1} and len(indices) > 3:
        return f"layers {indices[0]}, {indices[1]}, {indices[2]} … {indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "layers " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def from_here(file: str | Path) -> str:
    """Returns the path of ``file``, relative to the working directory if it is below it."""
    path = os.path.abspath(file)
    below = os.path.join(os.getcwd(), "")
    return printable(path.removeprefix(below))
