"""Writes the text of a recipe: short mappings on one line, a question as a comment on its line.

A suggestion is written as a comment, which becomes part of the recipe if its `# ` is removed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from fastgen.recipe_tools.propose.nodes import Leaf, Node, Scalar, is_commented, questions

QUESTION_MARK: Final = "   # QUESTION: "
_INDENT: Final = "  "
_WIDTH: Final = 110
_BLOCK: Final = frozenset(("config", "define", "model", "layers", "residual", "ignores"))


def recipe_text(node: Node, comments: Sequence[str] = ()) -> str:
    """Returns the YAML of ``node``, below ``comments``."""
    head = [line for comment in comments for line in textwrap.wrap(_plain(comment), _WIDTH) or [""]]
    lines = [f"# {line}".rstrip() for line in head] + list(_block(node, ""))
    return "\n".join(lines) + "\n"


def _block(node: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, child in node.items():
        if isinstance(child, Leaf):
            comment = f"{QUESTION_MARK}{_plain(child.question)}" if child.question else ""
            yield f"{indent}{'# ' if child.commented else ''}{scalar(key)}: {_value(child)}{comment}"
            continue
        if is_commented(child):
            yield f"{indent}# {scalar(key)}:"
            yield from (line.replace("# ", f"# {_INDENT}", 1) for line in _block(child, indent))
            continue
        line = f"{indent}{scalar(key)}: {_flow(child)}"
        if key in _BLOCK or len(line) > _WIDTH or any(questions(child)):
            yield f"{indent}{scalar(key)}:"
            yield from _block(child, indent + _INDENT)
        else:
            yield line


def _flow(node: Mapping[str, Any]) -> str:
    inside = (
        f"{scalar(key)}: {_value(child, flow=True) if isinstance(child, Leaf) else _flow(child)}"
        for key, child in node.items()
    )
    return "{" + ", ".join(inside) + "}"


def _value(leaf: Leaf, *, flow: bool = False) -> str:
    if isinstance(leaf.value, tuple):
        return "[" + ", ".join(scalar(each, flow=True) for each in leaf.value) + "]"
    return scalar(leaf.value, flow=flow)


def scalar(value: Scalar, *, flow: bool = False) -> str:
    """Returns a scalar as YAML writes it, quoted only if it would otherwise be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    text = f"[{value}]" if flow else value
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    unlike_a_number = value.lower() not in ("y", "n") and "\n" not in value
    if unlike_a_number and read == ([value] if flow else value) and " #" not in value and ": " not in value:
        return value
    return json.dumps(value)


def _plain(text: str) -> str:
    """Returns ``text`` on one line, with only printable characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
