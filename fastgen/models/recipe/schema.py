"""The recipe language, typed: what every key means and what it may hold.

A value that the schema types as an expression is evaluated against a checkpoint's ``config.json`` (see
:mod:`fastgen.models.recipe.expressions`); everything else is taken as it stands. Keys the schema does not know are
errors. A weight is named by its module: ``weight: mlp.up_proj`` claims ``mlp.up_proj.weight`` and, with a bias,
``mlp.up_proj.bias``. Inside layers, names are relative to ``layers.at``.
"""

from __future__ import annotations

import copy
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
    """The numbers every model has, each an expression over ``config.json``. The model tree sees them by these names."""

    vocab_size: Expr
    """Rows of the token embedding."""
    hidden_size: Expr
    """Width of the residual stream."""
    num_layers: Expr
    """How many layers."""
    num_heads: Expr
    """Query heads of an attention."""
    num_kv_heads: Expr
    """Key and value heads of an attention; they divide the query heads."""
    head_dim: Expr
    """Features of one head."""
    max_positions: Expr
    """How many positions the model can have; `none` where there is no limit."""


class Ignores(Section):
    """What a checkpoint may contain and the model does not need."""

    config: tuple[str, ...] = ()
    """Keys of config.json that change nothing, whatever their value; dotted for keys inside a mapping."""
    tensors: tuple[str, ...] = ()
    """Glob patterns of tensors that carry nothing the model needs."""


class Project(Section):
    """A linear map between the embedding's width and the stream's."""

    weight: Module
    """Module that holds the matrix."""
    bias: Expr = FALSE
    """Whether it has a bias."""
    size: Expr
    """The embedding's width."""
    when: Expr = TRUE
    """The projection exists only where this is true; elsewhere the embedding is as wide as the stream."""


class Positions(Section):
    """Learned absolute positions, added to the (projected) token embedding."""

    weight: Module
    """Module that holds the table."""
    offset: Expr
    """Row of the table that position 0 uses."""
    rows: Expr
    """Rows of the table."""
    when: Expr = TRUE
    """The positions exist only where this is true."""


class Embedding(Section):
    """From token ids to the residual stream."""

    tokens: Module
    """Module that holds the token embedding."""
    scale: Expr = ONE
    """Factor on the token embedding."""
    project: Project | None = None
    """From the embedding's width to the stream's, where they differ."""
    positions: Positions | None = None
    """Learned absolute positions."""
    norm: Norm | None = None
    """Norm of the whole embedding."""


class Branch(Section):
    """One addition to the residual stream: x + scale · output_norm(part(norm(x))), then, where given, the sum's norm.

    An attention and a feed-forward part in one branch run in parallel: what they make is added up.
    """

    norm: Norm | None = None
    """What the parts see the stream through."""
    attention: Attention | None = None
    """An attention."""
    latent_attention: LatentAttention | None = None
    """An attention over a latent vector."""
    mlp: Mlp | None = None
    """A feed-forward part."""
    moe: Moe | None = None
    """A feed-forward part of experts."""
    output_norm: Norm | None = None
    """Norm of what the parts make, before the addition."""
    scale: Expr = ONE
    """Factor on what is added."""
    sum_norm: Norm | None = None
    """Norm of the stream after the addition."""
    when: Expr = TRUE
    """The branch exists only where this is true."""

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not (self.attention or self.latent_attention or self.mlp or self.moe):
            raise ValueError("a branch has at least one part: `attention`, `latent_attention`, `mlp` or `moe`")
        return self


class Layers(Section):
    """The layers, all of one shape; expressions inside may ask for the index `layer`."""

    at: LayerPrefix
    """Prefix of a layer's tensors; {layer} stands for its index."""
    residual: Annotated[dict[Identifier, Branch], Field(min_length=1, max_length=64)]
    """The layer's branches by name, in the order they are taken."""


class Head(Section):
    """From the last hidden state to the logits."""

    weight: Module
    """Module that holds the output matrix."""
    tied: Expr
    """Whether the output matrix is the token embedding itself."""
    bias: Expr = FALSE
    """Whether there is a bias."""
    scale: Expr = ONE
    """Factor on the logits."""
    softcap: Expr = NONE
    """Logits l become c·tanh(l / c); `none` leaves them as they are."""
    project: Project | None = None
    """From the stream's width to the embedding's, where they differ."""


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
    """What the recipe is called."""
    architectures: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    """Values of config.json's `architectures` that this recipe is for."""
    config: Config
    """The numbers every model has."""
    define: dict[Identifier, Expr] = Field(default_factory=dict)
    """Values the model tree's expressions may use by these names, each an expression over config and config.json."""
    requires: tuple[Expr, ...] = ()
    """Conditions over config and config.json; where one is false, the recipe does not describe the model."""
    ignores: Ignores = Ignores()
    """What a checkpoint may contain and the model does not need."""
    aliases: Annotated[dict[Module, tuple[Module, ...]], Field(max_length=64)] = Field(default_factory=dict)
    """Prefixes of tensor names, and how checkpoints may spell them instead."""
    model: Model
    """The model from token ids to logits."""

    @model_validator(mode="after")
    def _defines_anew(self) -> Self:
        for name in self.define:
            if name in Config.model_fields or name in ("layer", "expert", "in", "out", "part"):
                raise ValueError(f"`define` cannot give {name!r} another meaning")
        return self


class _SchemaGenerator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return dft.node.as_const() if isinstance(dft, Expression) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of a recipe file: a whole recipe, or with ``extends`` any part of one."""
    whole = RecipeSchema.model_json_schema(schema_generator=_SchemaGenerator)
    definitions: dict[str, Any] = whole.pop("$defs")
    variant = _partial(whole)
    variant["properties"]["extends"] = {
        "type": "string",
        "description": "Name of the recipe this one differs from; mappings merge, null removes an inherited key.",
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
    """Returns ``section`` with nothing required, its keys removable by null, and so on in all that it refers to."""
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
