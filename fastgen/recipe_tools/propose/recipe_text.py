"""Writes the text of a recipe: short mappings on one line, a question as a comment on its line.

A suggestion is written as a comment, which becomes part of the recipe if its `# ` is removed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastgen.recipe_tools.explain.plain_text import yaml_scalar
from fastgen.recipe_tools.propose.nodes import Leaf, Node, is_commented, questions

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
            yield f"{indent}{'# ' if child.commented else ''}{yaml_scalar(key)}: {_value(child)}{comment}"
            continue
        if is_commented(child):
            yield f"{indent}# {yaml_scalar(key)}:"
            yield from (line.replace("# ", f"# {_INDENT}", 1) for line in _block(child, indent))
            continue
        line = f"{indent}{yaml_scalar(key)}: {_flow(child)}"
        if key in _BLOCK or len(line) > _WIDTH or any(questions(child)):
            yield f"{indent}{yaml_scalar(key)}:"
            yield from _block(child, indent + _INDENT)
        else:
            yield line


def _flow(node: Mapping[str, Any]) -> str:
    inside = (
        f"{yaml_scalar(key)}: {_value(child, flow=True) if isinstance(child, Leaf) else _flow(child)}"
        for key, child in node.items()
    )
    return "{" + ", ".join(inside) + "}"


def _value(leaf: Leaf, *, flow: bool = False) -> str:
    if isinstance(leaf.value, tuple):
        return "[" + ", ".join(yaml_scalar(each, flow=True) for each in leaf.value) + "]"
    return yaml_scalar(leaf.value, flow=flow)


def _plain(text: str) -> str:
    """Returns ``text`` on one line, with only printable characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
