"""The schema of recipes, key by key, in the words of the tables of docs/recipe-language.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fastgen.models.recipe import values
from fastgen.models.recipe.expressions import Expression
from fastgen.models.recipe.schema import RecipeSchema
from fastgen.models.recipe.values import Section

_LEAVES = (
    (values.Expr, "*expr*"),
    (values.Module, "module"),
    (values.LayerPrefix, "prefix with `{layer}`"),
    (values.ExpertPrefix, "prefix with `{expert}`"),
    (values.LayoutPattern, "[layout](#layouts)"),
    (values.Identifier, "name"),
    (values.RecipeName, "name"),
    (bool, "true or false"),
    (str, "text"),
)
_PLURALS = {"*expr*": "*expr*", "module": "modules", "name": "names", "text": "texts"}


def sections() -> dict[str, type[Section]]:
    """The sections of the language by the names of their classes, those that others build on among them."""
    found: dict[str, type[Section]] = {}

    def visit(section: type[Section]) -> None:
        if section.__name__ in found:
            return
        found[section.__name__] = section
        for base in section.__bases__:
            if base is not Section and issubclass(base, Section):
                visit(base)
        for hint in get_type_hints(section, include_extras=True).values():
            for inner in _sections_in(hint):
                visit(inner)

    visit(RecipeSchema)
    return found


def own_keys(section: type[Section], link: Callable[[str], str]) -> dict[str, tuple[str, str]]:
    """Default and allowed values of the keys that ``section`` does not have from another section.

    ``link`` says how a section is referred to, by the name of its class.
    """
    inherited = {key for base in section.__bases__ if issubclass(base, BaseModel) for key in base.model_fields}
    hints = get_type_hints(section, include_extras=True)
    return {
        key: (_default(field.get_default(call_default_factory=True, validated_data={})), _allowed(hints[key], link))
        for key, field in section.model_fields.items()
        if key not in inherited
    }


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "*required*"
    if isinstance(value, Expression):
        return f"`{str(value.node.as_const()).lower()}`"
    if value is None or not value or isinstance(value, Section):
        return "–"
    return f"`{value}`"


def _allowed(hint: Any, link: Callable[[str], str]) -> str:
    for leaf, word in _LEAVES:
        if hint == leaf:
            return word
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _allowed(arguments[0], link)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        return _allowed(inner, link)
    if origin is tuple:
        return f"list of {_PLURALS[_allowed(arguments[0], link)]}"
    if origin is dict:
        return f"mapping from {_allowed(arguments[0], link)} to {_allowed(arguments[1], link)}"
    return link(hint.__name__)


def _sections_in(hint: Any) -> Iterator[type[Section]]:
    if isinstance(hint, type) and issubclass(hint, Section):
        yield hint
    for argument in get_args(hint):
        yield from _sections_in(argument)
