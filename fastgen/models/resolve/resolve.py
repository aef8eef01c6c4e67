"""Resolves a recipe against a checkpoint's ``config.json`` into a :class:`ModelSpec`, with every number known.

It checks everything that can be checked before a weight is read: each expression has a value of the right kind, shapes
fit together, no tensor is claimed twice, and every key of the configuration is accounted for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from fastgen.errors import RecipeError
from fastgen.models.recipe import schema
from fastgen.models.recipe.expression_grammar import Path
from fastgen.models.recipe.expressions import Expression, Scope
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.spelling import quoted, shown
from fastgen.models.resolve.config_keys import allowed_paths, check_config_keys, without_paths
from fastgen.models.resolve.parts import MAX_EXPERTS, Numbers, Parts
from fastgen.models.resolve.place import Place, Tensors
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    PartSpec,
    PositionsSpec,
)

MAX_LAYERS: Final = 1024


def resolve(
    recipe: Recipe,
    config: Mapping[str, Any],
    *,
    config_file: str = "config.json",
    allow_config_keys: Collection[str] = (),
    only_layers: Collection[int] | None = None,
    most_experts: int = MAX_EXPERTS,
) -> ModelSpec:
    """Returns the model that ``recipe`` describes for ``config``, the content of a ``config.json``.

    ``allow_config_keys`` are keys to allow although nothing accounts for them, dotted for keys inside a mapping.
    ``only_layers`` and ``most_experts`` limit the result to these layers and to this many experts of each mixture, for
    callers that need only one of many equal layers or experts.

    Raises :class:`~fastgen.errors.RecipeError` with file, line and node, and
    :class:`~fastgen.errors.InvalidArgumentError` for an allowed key that the configuration does not have.
    """
    if not isinstance(config, Mapping):
        raise RecipeError(f"a configuration is a mapping of keys to values, not {shown(config)}", file=config_file)
    mentioned = mentioned_paths(recipe)
    config = without_paths(config, allowed_paths(config, allow_config_keys, config_file) - mentioned)
    try:
        # Resolve before checking the keys: a key that is mistyped in the recipe fails in both, and only the error of
        # resolving knows the line to correct.
        spec = _Resolver(recipe, config, config_file, most_experts).model(only_layers)
        ignored = recipe.schema.ignores.config
        check_config_keys(config, mentioned, ignored, config_file=config_file, recipe=recipe.name)
    except RecipeError as error:
        stated = stated_architectures(config)
        if not stated or set(stated) & set(recipe.architectures):
            raise
        meant, found = " and ".join(recipe.architectures), " or ".join(map(quoted, stated[:3]))
        message = f"recipe {recipe.name!r} is for {meant}; this is {found}: {error.message}"
        raise RecipeError(message, file=error.file, line=error.line, node=error.node) from None
    return spec


def stated_architectures(config: Mapping[str, Any]) -> list[str]:
    """Returns the architectures that ``config`` names; empty if it names none."""
    stated = config.get("architectures")
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []


def mentioned_paths(recipe: Recipe) -> frozenset[Path]:
    """Returns the paths into ``config.json`` that the expressions of the recipe mention."""
    numbers = set(schema.Config.model_fields)
    own = numbers | set(recipe.schema.define) | {"layer"}
    in_config = _paths(recipe.schema.config)
    in_between = _paths((recipe.schema.define, recipe.schema.requires))
    in_model = _paths(recipe.schema.model)
    return (
        frozenset(in_config)
        | frozenset(path for path in in_between if path[0] not in numbers)
        | frozenset(path for path in in_model if path[0] not in own)
    )


def unread_keys(recipe: Recipe, config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of ``config`` that no expression of ``recipe`` mentions, dotted inside mappings."""
    mentioned = mentioned_paths(recipe)
    keys = [key for key in config if all(path[0] != key for path in mentioned)]
    inner = (
        (key, name)
        for key, value in config.items()
        if isinstance(value, Mapping) and key not in keys and (key,) not in mentioned
        for name in value
    )
    return keys + [".".join(path) for path in inner if path not in mentioned]


def _paths(value: object) -> Iterator[Path]:
    return (path for expression in expressions_in(value) for path in expression.paths)


def expressions_in(value: object) -> Iterator[Expression]:
    """Yields every expression in the schema of a recipe, or in a part of it."""
    if isinstance(value, Expression):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from expressions_in(getattr(value, name))
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from expressions_in(item)


class _Resolver:
    def __init__(self, recipe: Recipe, config: Mapping[str, Any], config_file: str, most_experts: int):
        self.recipe = recipe
        self.tensors = Tensors(recipe)
        scope = Scope(config, config_file=config_file)
        self.numbers = self.config(recipe.schema.config, Place(recipe, ("config",), scope))
        scope = scope.with_names(**vars(self.numbers))
        defined = {
            name: Place(recipe, ("define", name), scope).value(expression)
            for name, expression in recipe.schema.define.items()
        }
        for index, condition in enumerate(recipe.schema.requires):
            self.require(condition, Place(recipe, ("requires", str(index)), scope))
        self.parts = Parts(self.numbers, defined, self.tensors, most_experts=most_experts)
        self.root = Place(recipe, ("model",), scope.with_names(**defined))

    def config(self, config: schema.Config, at: Place) -> Numbers:
        numbers = Numbers(
            vocab_size=(at / "vocab_size").size(config.vocab_size),
            hidden_size=(at / "hidden_size").size(config.hidden_size),
            num_layers=(at / "num_layers").size(config.num_layers, most=MAX_LAYERS),
            num_heads=(at / "num_heads").size(config.num_heads),
            num_kv_heads=(at / "num_kv_heads").size(config.num_kv_heads),
            head_dim=(at / "head_dim").size(config.head_dim),
            max_positions=(at / "max_positions").optional_size(config.max_positions),
        )
        if numbers.num_heads % numbers.num_kv_heads:
            raise (at / "num_kv_heads").error(
                f"{numbers.num_heads} query heads cannot share {numbers.num_kv_heads} KV heads evenly"
            )
        return numbers

    @staticmethod
    def require(condition: Expression, at: Place) -> None:
        if not at.flag(condition):
            said = {
                ".".join(path): at.scope.config[path[0]]
                for path in sorted(condition.paths)
                if path[0] in at.scope.config
            }
            values = ", ".join(f"{key} is {shown(value)}" for key, value in said.items())
            raise at.error(
                f"the recipe is only for models for which `{condition.text}` is true, but in {at.scope.config_file} "
                + (values or "it is false")
            )

    def model(self, only_layers: Collection[int] | None) -> ModelSpec:
        model, at = self.recipe.schema.model, self.root
        embedding, head = self.embedding_and_head(model.embedding, model.head)
        layers = tuple(
            self.layer(model.layers, index, at / "layers")
            for index in range(self.numbers.num_layers)
            if only_layers is None or index in only_layers
        )
        attentions = [
            each.part
            for layer in layers
            for branch in layer.branches
            for each in branch.parts
            if isinstance(each.part, AttentionSpec | LatentAttentionSpec)
        ]
        if not attentions:
            raise (at / "layers").error("no layer has an attention")
        return ModelSpec(
            recipe=self.recipe.name,
            architecture=self.architecture(),
            **{**vars(self.numbers), "max_positions": self.max_positions(attentions)},
            embedding=embedding,
            layers=layers,
            final_norm=self.parts.norm(model.final_norm, at / "final_norm"),
            head=head,
            ignored_tensors=self.recipe.schema.ignores.tensors,
        )

    def architecture(self) -> str:
        """Returns the architecture in the configuration that the recipe is for; otherwise the first one it names."""
        names = stated_architectures(self.root.scope.config)
        known = self.recipe.architectures
        return next((name for name in names if name in known), (*names, *known)[0])

    def max_positions(self, attentions: list[AttentionSpec | LatentAttentionSpec]) -> int | None:
        """Returns the recipe's limit, but at most the trained length of a dynamic scaling.

        Beyond that length dynamic scaling changes the rotation of all earlier tokens as the sequence grows, so keys
        that one request cached would be wrong for the next.
        """
        limits = [
            each.rotary.scaling.original_max_positions
            for each in attentions
            if each.rotary and each.rotary.scaling and each.rotary.scaling.kind == "dynamic"
        ]
        if self.numbers.max_positions is not None:
            limits.append(self.numbers.max_positions)
        return min(limits, default=None)

    def embedding_and_head(self, embedding: schema.Embedding, head: schema.Head) -> tuple[EmbeddingSpec, HeadSpec]:
        """Resolves both ends together: with a tied head, the head's tensor name is a spelling of the embedding's."""
        at, head_at = self.root / "embedding", self.root / "head"
        hidden = self.numbers.hidden_size
        width, project = self.project(embedding.project, at / "project", inward=True)
        head_width, head_project = self.project(head.project, head_at / "project", inward=False)
        tied = (head_at / "tied").flag(head.tied)
        if tied and head_width != width:
            raise head_at.error(
                f"the head is tied to an embedding of {width} features, but gets {head_width} of the hidden state; "
                f"it lacks a `project` of size {width}"
                if head_project is None
                else f"the head is tied to an embedding of {width} features, but its `project` has size {head_width}"
            )
        spellings = self.tensors.spellings(head_at / "weight", f"{head.weight}.weight") if tied else ()
        shape = (self.numbers.vocab_size, width)
        tokens = self.tensors.tensor(at / "tokens", f"{embedding.tokens}.weight", shape, also=spellings)
        positions = self.positions(embedding.positions, at / "positions", hidden)
        shape = (self.numbers.vocab_size, head_width)
        weight = None if tied else self.tensors.tensor(head_at / "weight", f"{head.weight}.weight", shape)
        bias = None
        if (head_at / "bias").flag(head.bias):
            bias = self.tensors.tensor(head_at / "bias", f"{head.weight}.bias", (self.numbers.vocab_size,))
        return EmbeddingSpec(
            tokens,
            project,
            positions,
            at.ref(),
            scale=(at / "scale").factor(embedding.scale),
            norm=self.parts.norm(embedding.norm, at / "norm"),
        ), HeadSpec(
            weight,
            head_project,
            head_at.ref(),
            bias=bias,
            scale=(head_at / "scale").factor(head.scale),
            softcap=(head_at / "softcap").optional_cap(head.softcap),
        )

    def project(self, project: schema.Project | None, at: Place, *, inward: bool) -> tuple[int, LinearSpec | None]:
        """Returns the embedding's width, and the map between it and the stream if there is one."""
        hidden = self.numbers.hidden_size
        if project is None or not (at / "when").flag(project.when):
            return hidden, None
        size = (at / "size").size(project.size)
        bias = (at / "bias").flag(project.bias)
        wide, narrow = (size, hidden) if inward else (hidden, size)
        return size, self.tensors.linear(at, project.weight, bias, wide, narrow)

    def positions(self, positions: schema.Positions | None, at: Place, hidden: int) -> PositionsSpec | None:
        if positions is None or not (at / "when").flag(positions.when):
            return None
        offset = (at / "offset").size(positions.offset, least=0)
        rows = (at / "rows").size(positions.rows)
        most = self.numbers.max_positions
        if most is None or most + offset > rows:
            raise (at / "rows").error(
                f"a table of {rows} rows holds {rows - offset} positions from row {offset} on, but "
                f"config.max_positions is {most}"
            )
        return PositionsSpec(
            self.tensors.tensor(at / "weight", f"{positions.weight}.weight", (rows, hidden)), offset, at.ref()
        )

    def layer(self, layers: schema.Layers, index: int, at: Place) -> LayerSpec:
        at = at.within(layers.at.replace("{layer}", str(index)), layer=index)
        branches = (
            self.branch(name, branch, at / "residual" / name)
            for name, branch in layers.residual.items()
            if (at / "residual" / name / "when").flag(branch.when)
        )
        return LayerSpec(index, tuple(branches))

    def branch(self, name: str, branch: schema.Branch, at: Place) -> BranchSpec:
        norm = self.parts.norm(branch.norm, at / "norm")
        parts = tuple(self.branch_parts(branch, at))
        if not parts:
            raise at.error("the branch is present, but all of its parts are absent")
        return BranchSpec(
            name,
            norm,
            parts,
            self.parts.norm(branch.output_norm, at / "output_norm"),
            (at / "scale").factor(branch.scale),
            self.parts.norm(branch.sum_norm, at / "sum_norm"),
            at.ref(),
        )

    def branch_parts(self, branch: schema.Branch, at: Place) -> Iterator[PartSpec]:
        """Yields the parts that are present: at most one attention and at most one feed-forward."""
        for kinds in (("attention", "latent_attention"), ("mlp", "moe")):
            present = [
                (kind, part)
                for kind in kinds
                if (part := getattr(branch, kind)) is not None and (at / kind / "when").flag(part.when)
            ]
            if len(present) > 1:
                raise at.error(f"`{kinds[0]}` and `{kinds[1]}` are both present in layer {at.scope.names['layer']}")
            for kind, part in present:
                norm = self.parts.norm(part.norm, at / kind / "norm")
                yield PartSpec(norm, getattr(self.parts, kind)(part, at / kind))
