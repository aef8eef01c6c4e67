"""Keys of ``config.json``: those that a recipe needs, and the spellings that a configuration class reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jinja2 import nodes

from fastgen.models.recipe.expression_grammar import first_arguments
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.schema import Config
from fastgen.models.resolve.resolve import expressions_in

# The names that files use for the rotated fraction of a head.
FRACTIONS: Final = ("rotary_pct", "partial_rotary_factor")


def needed_keys(recipe: Recipe) -> set[str]:
    """Returns the keys that some expression of ``recipe`` mentions without a value for their absence."""
    schema = recipe.schema
    numbers = set(Config.model_fields)
    own = numbers | set(schema.define) | {"layer"}
    scopes = ((schema.config, set[str]()), ((schema.define, schema.requires), numbers), (schema.model, own))
    return {
        name
        for section, meant in scopes
        for expression in expressions_in(section)
        for name in _needed(expression.node)
        if name not in meant
    }


def _needed(node: nodes.Node) -> Iterator[str]:
    match node:
        case nodes.Name(name=name):
            yield name
        case nodes.Filter(args=args):  # its input may be absent
            for arg in args:
                yield from _needed(arg)
        case nodes.Call(node=nodes.Name(name="first")):
            paths, fallback = first_arguments(node)
            yield from (path[0] for path in paths if fallback is None)
            if fallback is not None:
                yield from _needed(fallback)
        case nodes.Call(args=args):
            for arg in args:
                yield from _needed(arg)
        case _:
            for child in node.iter_child_nodes():
                yield from _needed(child)


@dataclass(frozen=True)
class Reading:
    """The way in which a configuration class reads keys.

    ``spellings`` maps other names of keys to the names that the class uses. ``nulls`` are keys that it computes from
    others if they are null; ``follow`` are those of them that it also computes if they are absent.
    """

    spellings: Mapping[str, str] = field(default_factory=dict)
    nulls: frozenset[str] = frozenset()
    follow: frozenset[str] = frozenset()


def reading_of(config_class: Any, mentioned: Collection[str]) -> Reading:
    """Returns how the class reads its own keys and those in ``mentioned``; found by trying."""
    defaults = config_class().to_dict()
    nulls = frozenset(key for key in set(mentioned) & defaults.keys() if _filled_in(config_class, key))
    follow = frozenset(key for key in nulls if getattr(config_class, key, key) is None)
    return Reading(read_spellings(config_class, set(mentioned) - defaults.keys()), nulls, follow)


def _filled_in(config_class: Any, key: str) -> bool:
    try:
        return config_class.from_dict({key: None}).to_dict().get(key) is not None
    except Exception:  # the class accepts no null there
        return False


def read_spellings(config_class: Any, mentioned: Collection[str]) -> dict[str, str]:
    """Returns the keys in ``mentioned`` that the class reads as another key, with the name of that key.

    They are found by trying: a value given under one name comes back under the other.
    """
    found: dict[str, str] = {}
    defaults = config_class().to_dict()
    for key in sorted({*mentioned, "rope_theta", "partial_rotary_factor"} - defaults.keys()):
        mark = 0.875 if key in FRACTIONS else 7
        try:
            content = config_class.from_dict({key: mark}).to_dict()
        except Exception:  # the class accepts only other values
            continue
        rope, usual = content.get("rope_parameters") or {}, defaults.get("rope_parameters") or {}
        meant = [other for other, value in rope.items() if value == mark and usual.get(other) != mark]
        meant += [other for other, value in content.items() if value == mark and other not in (key, *meant)]
        if meant:
            found[key] = meant[0]
    return found
