"""The leaves of a recipe (expressions, names of tensors, layouts) and the base class of its sections."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fastgen.models.recipe.expressions import Expression, constant, parse_expression
from fastgen.models.recipe.lacking import lacks
from fastgen.models.recipe.layout import Axes, parse_layout
from fastgen.models.recipe.spelling import one_of, quoted


def _expression(value: object) -> Expression:
    match value:
        case str():
            return parse_expression(value)
        case bool() | int() | float() | None:
            return constant(value)
    raise ValueError("must be an expression, a number, true, false or null")


def _name_in_layers(value: object) -> object:
    if isinstance(value, str) and "{" in value.replace("{layer}", ""):
        raise ValueError(f"{value!r}: the only placeholder of a tensor name is {{layer}}")
    return value


def _layer_prefix(value: str) -> str:
    if "{layer}" not in value:
        raise ValueError("must contain {layer}; otherwise all layers would claim the same tensors")
    return value


def _expert_prefix(value: object) -> object:
    if isinstance(value, str):
        if "{expert}" not in value:
            raise ValueError("must contain {expert}; otherwise all experts would claim the same tensors")
        if re.search(r"\{(?!layer\}|expert\})", value):
            raise ValueError(f"{value!r}: the only placeholders of an expert's names are {{layer}} and {{expert}}")
    return value


MAX_NAME: Final = 64
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"
_MODULE: Final = r"^[A-Za-z0-9_\-{}]+(\.[A-Za-z0-9_\-{}]+)*$"
_IDENTIFIER: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"

# Describes each kind of name, for messages.
PATTERNS: Final = {
    NAME: "a recipe's name: letters, digits, and after the first character also _ - .",
    _MODULE: "a module's name: parts of letters, digits, _ and -, separated by dots",
    _IDENTIFIER: "a name: letters, digits and _, not beginning with a digit",
}

Expr = Annotated[
    Expression,
    PlainValidator(_expression),
    WithJsonSchema({"type": ["string", "number", "boolean", "null"]}),
]
Module = Annotated[str, Field(pattern=_MODULE, max_length=200), BeforeValidator(_name_in_layers)]
LayerPrefix = Annotated[Module, AfterValidator(_layer_prefix)]
ExpertPrefix = Annotated[str, Field(pattern=_MODULE, max_length=200), BeforeValidator(_expert_prefix)]
Identifier = Annotated[str, Field(pattern=_IDENTIFIER, max_length=64)]
RecipeName = Annotated[str, Field(pattern=NAME, max_length=MAX_NAME)]
LayoutPattern = Annotated[Axes, PlainValidator(parse_layout), WithJsonSchema({"type": "string"})]

TRUE, FALSE, NONE = constant(True), constant(False), constant(None)
ZERO, ONE = constant(0), constant(1)


class Section(BaseModel):
    """A mapping in a recipe: unknown keys are refused, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                name = str(key)
                known = one_of(name, cls.model_fields)
                message = f"unknown key {quoted(name)!r}{lacks(name)}{known}"
                raise PydanticCustomError("unknown_key", "{message}", {"message": message, "key": key})
        return data
