"""The schema of the recipe language: the meaning and type of every key.

A value that the schema types as an expression is evaluated against a checkpoint's ``config.json`` (see
:mod:`fastgen.models.recipe.expressions`); every other value is used as written. Unknown keys are errors. A weight is
named by its module: ``weight: mlp.up_proj`` claims ``mlp.up_proj.weight`` and, with a bias, ``mlp.up_proj.bias``.
Inside layers, names are relative to ``layers.at``.

The strings below the fields are their descriptions in the JSON Schema and in the reference tables of
``docs/recipe-language.md``.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic.json_schema import GenerateJsonSchema

from fastgen.models.recipe.expressions import Expression
from fastgen.models.recipe.parts import Attention, LatentAttention, Mlp, Moe, Norm
from fastgen.models.recipe.values import (
    FALSE,
    NONE,
    ONE,
    TRUE,
    Expr,
    Identifier,
    LayerPrefix,
    Module,
    RecipeName,
    Section,
)


class Config(Section):
    """The numbers of every model, as expressions over ``config.json``. The model tree uses them by these names."""

    vocab_size: Expr
    """Rows of the token embedding."""
    hidden_size: Expr
    """Width of the residual stream."""
    num_layers: Expr
    """Number of layers."""
    num_heads: Expr
    """Query heads of an attention."""
    num_kv_heads: Expr
    """Key and value heads of an attention; they divide the query heads."""
    head_dim: Expr
    """Features of one head."""
    max_positions: Expr
    """Most positions that the model supports; `none` if there is no limit."""


class Ignores(Section):
    """Content of a checkpoint that the model does not need."""

    config: tuple[str, ...] = ()
    """Keys of config.json that change nothing, whatever their value; dotted for keys inside a mapping."""
    tensors: tuple[str, ...] = ()
    """Glob patterns of tensors that the model does not need."""


class Project(Section):
    """A linear map between the embedding's width and the stream's."""

    weight: Module
    """Module of the matrix."""
    bias: Expr = FALSE
    """Whether it has a bias."""
    size: Expr
    """Width of the embedding."""
    when: Expr = TRUE
    """The projection exists only if this is true; otherwise the embedding is as wide as the stream."""


class Positions(Section):
    """Learned absolute positions, added to the (projected) token embedding."""

    weight: Module
    """Module of the table."""
    offset: Expr
    """Row of the table for position 0."""
    rows: Expr
    """Rows of the table."""
    when: Expr = TRUE
    """The positions exist only if this is true."""


class Embedding(Section):
    """From token ids to the residual stream."""

    tokens: Module
    """Module of the token embedding."""
    scale: Expr = ONE
    """Factor on the token embedding."""
    project: Project | None = None
    """Projection from the embedding's width to the stream's, if they differ."""
    positions: Positions | None = None
    """Learned absolute positions."""
    norm: Norm | None = None
    """Norm of the complete embedding."""


class Branch(Section):
    """One addition to the residual stream: x + scale · output_norm(part(norm(x))), then sum_norm of that, if any.

    An attention and a feed-forward part in one branch run in parallel, and their outputs are summed.
    """

    norm: Norm | None = None
    """Norm of the stream before the parts."""
    attention: Attention | None = None
    """An attention."""
    latent_attention: LatentAttention | None = None
    """An attention over a latent vector."""
    mlp: Mlp | None = None
    """A feed-forward part."""
    moe: Moe | None = None
    """A feed-forward part of experts."""
    output_norm: Norm | None = None
    """Norm of the output of the parts, before the addition."""
    scale: Expr = ONE
    """Factor on the added output."""
    sum_norm: Norm | None = None
    """Norm of the stream after the addition."""
    when: Expr = TRUE
    """The branch exists only if this is true."""

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not (self.attention or self.latent_attention or self.mlp or self.moe):
            raise ValueError("a branch needs at least one part: `attention`, `latent_attention`, `mlp` or `moe`")
        return self


class Layers(Section):
    """The layers, all with the same structure; expressions inside may use the index `layer`."""

    at: LayerPrefix
    """Prefix of a layer's tensors; {layer} stands for its index."""
    residual: Annotated[dict[Identifier, Branch], Field(min_length=1, max_length=64)]
    """The layer's branches by name, in the order in which they run."""


class Head(Section):
    """From the last hidden state to the logits."""

    weight: Module
    """Module of the output matrix."""
    tied: Expr
    """Whether the output matrix is the token embedding itself."""
    bias: Expr = FALSE
    """Whether there is a bias."""
    scale: Expr = ONE
    """Factor on the logits."""
    softcap: Expr = NONE
    """Logits l become c·tanh(l / c); `none` leaves them unchanged."""
    project: Project | None = None
    """Projection from the stream's width to the embedding's, if they differ."""


class Model(Section):
    """The model from token ids to logits."""

    embedding: Embedding
    """From token ids to the residual stream."""
    layers: Layers
    """The layers."""
    final_norm: Norm | None = None
    """Norm between the last layer and the head."""
    head: Head
    """From the last hidden state to the logits."""


class RecipeSchema(Section):
    """One architecture, described as data."""

    name: RecipeName
    """Name of the recipe."""
    architectures: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    """Values of `architectures` in config.json that this recipe is for."""
    config: Config
    """The numbers every model has."""
    define: dict[Identifier, Expr] = Field(default_factory=dict)
    """Named values for expressions in the model tree, each an expression over config and config.json."""
    requires: tuple[Expr, ...] = ()
    """Conditions over config and config.json; if one is false, the recipe does not describe the model."""
    ignores: Ignores = Ignores()
    """Content of a checkpoint that the model does not need."""
    aliases: Annotated[dict[Module, tuple[Module, ...]], Field(max_length=64)] = Field(default_factory=dict)
    """Prefixes of tensor names, and their other spellings in checkpoints."""
    model: Model
    """The model from token ids to logits."""

    @model_validator(mode="after")
    def _defines_anew(self) -> Self:
        for name in self.define:
            if name in Config.model_fields or name in ("layer", "expert", "in", "out", "part"):
                raise ValueError(f"`define` cannot give the name {name!r} another meaning")
        return self


class _SchemaGenerator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return dft.node.as_const() if isinstance(dft, Expression) else super().encode_default(dft)


def descriptions(section: type[Section]) -> dict[str, str]:
    """Returns the string below each field of a section, by the field's name.

    Pydantic would read them from the sources whenever it is imported, which takes a sixth of a second.
    """
    found: dict[str, str] = {}
    for base in reversed(section.__mro__[: section.__mro__.index(Section)]):
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(parsed, ast.ClassDef)
        for field, text in pairwise(parsed.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def _all_sections(section: type[Section]) -> Iterator[type[Section]]:
    for each in section.__subclasses__():
        yield each
        yield from _all_sections(each)


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of a recipe file: a whole recipe, or with ``extends`` any part of one."""
    whole = RecipeSchema.model_json_schema(schema_generator=_SchemaGenerator)
    definitions: dict[str, Any] = whole.pop("$defs")
    for section in _all_sections(Section):
        described = whole if section is RecipeSchema else definitions.get(section.__name__, {})
        for name, text in descriptions(section).items():
            described.get("properties", {}).get(name, {})["description"] = text
    variant = _partial(whole)
    variant["properties"]["extends"] = {
        "type": "string",
        "description": "Name of the recipe that this one varies; mappings merge, null removes an inherited key.",
    }
    variant["required"] = ["name", "extends"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fastgen recipe",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": variant,
        "else": whole,
        "$defs": definitions | {f"{name}Part": _partial(section) for name, section in definitions.items()},
    }


def _partial(section: dict[str, Any]) -> dict[str, Any]:
    """Returns ``section`` with all keys optional and removable by null, also in everything that it refers to."""
    section = copy.deepcopy(section)
    section.pop("required", None)

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                node["$ref"] += "Part"
            for child in node.values():
                visit(child)
        elif isinstance(node, list):
            for child in node:
                visit(child)

    visit(section)
    properties = section.get("properties", {})
    for name, value in properties.items():
        description = {"description": value.pop("description")} if "description" in value else {}
        properties[name] = {"anyOf": [value, {"type": "null"}], **description}
    return section
