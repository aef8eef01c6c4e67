"""Explains a recipe to people: the model from token ids to logits as boxes, and in sentences.

With a configuration, conditions are resolved, expressions have values, and equal layers are explained once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fastgen.models.recipe import schema
from fastgen.models.recipe.expressions import Expression, Scope
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import LayerSpec, ModelSpec
from fastgen.recipe_tools.explain.boxes import (
    attention_box,
    embedding_boxes,
    head_boxes,
    latent_attention_box,
    mlp_box,
    moe_box,
    norm_box,
    scale_box,
)
from fastgen.recipe_tools.explain.plain_text import layer_list, printable
from fastgen.recipe_tools.explain.reading import Box, Fact, Reader

# Most kinds of layers that are drawn each with its own numbers; if there are more, a number that varies is a range.
MAX_KINDS: Final = 4

_PARTS: Final = (
    (("attention", attention_box), ("latent_attention", latent_attention_box)),
    (("mlp", mlp_box), ("moe", moe_box)),
)


@dataclass(frozen=True)
class Lane:
    """One path through a branch. Each layer has exactly one of its ``alternatives``, each a sequence of boxes."""

    alternatives: tuple[tuple[Box, ...], ...]


@dataclass(frozen=True)
class Branch:
    """One addition to the stream.

    The outputs of the ``lanes`` for the normalized stream are summed and go through ``after``. ``sum_norm`` is a norm
    of the stream after the addition. ``condition`` is ``None`` if every layer has the branch.
    """

    name: str
    node: str
    condition: str | None
    norm: Box | None
    lanes: tuple[Lane, ...]
    after: tuple[Box, ...]
    sum_norm: Box | None

    def boxes(self) -> Iterator[Box]:
        """Yields its boxes, from first to last."""
        yield from (self.norm,) if self.norm else ()
        yield from (box for lane in self.lanes for boxes in lane.alternatives for box in boxes)
        yield from self.after
        yield from (self.sum_norm,) if self.sum_norm else ()


@dataclass(frozen=True)
class LayerKind:
    """Equal layers and their branches in order. Without a configuration it is all layers, and ``indices`` is
    ``None``.
    """

    title: str
    indices: tuple[int, ...] | None
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Explanation:
    """A recipe as boxes and sentences; ``legend`` explains the names and numbers in the boxes."""

    recipe: str
    architectures: tuple[str, ...]
    sentences: tuple[str, ...]
    embedding: tuple[Box, ...]
    layers: tuple[LayerKind, ...]
    ending: tuple[Box, ...]
    legend: tuple[Box, ...]

    def boxes(self) -> Iterator[Box]:
        """Yields all boxes of the model, from first to last."""
        yield from self.embedding
        yield from (box for kind in self.layers for branch in kind.branches for box in branch.boxes())
        yield from self.ending

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    recipe: Recipe,
    config: Mapping[str, Any] | None = None,
    *,
    config_file: str = "config.json",
    allow_config_keys: Collection[str] = (),
) -> Explanation:
    """Explains ``recipe``, or with ``config``, the content of a ``config.json``, the model that it makes of that.

    Raises :class:`~fastgen.errors.RecipeError` if the recipe does not fit the configuration.
    """
    spec = scope = None
    if config is not None:
        spec = resolve(recipe, config, config_file=config_file, allow_config_keys=allow_config_keys)
        scope = _scope(recipe, config)
    model = recipe.schema.model
    ends = Reader(recipe, [scope] if scope else [])
    layers = tuple(_layer_kinds(recipe, spec, scope))
    embedding = embedding_boxes(ends, model.embedding, "model.embedding")
    final_norm = norm_box(ends, model.final_norm, "model.final_norm")
    ending = (*([final_norm] if final_norm else []), *head_boxes(ends, model.head, "model.head"))
    sentences = tuple(_sentences(ends, embedding, layers, ending))
    legend = (*_legend(recipe, ends), _signs(layers))
    return Explanation(recipe.name, recipe.architectures, sentences, embedding, layers, ending, legend)


def _scope(recipe: Recipe, config: Mapping[str, Any]) -> Scope:
    """Returns the scope of the model tree of a recipe that was resolved against ``config``."""
    scope = Scope(config)
    numbers = {name: getattr(recipe.schema.config, name).evaluate(scope) for name in schema.Config.model_fields}
    scope = scope.with_names(**numbers)
    return scope.with_names(**{name: each.evaluate(scope) for name, each in recipe.schema.define.items()})


def _layer_kinds(recipe: Recipe, spec: ModelSpec | None, scope: Scope | None) -> list[LayerKind]:
    at = recipe.schema.model.layers.at
    if spec is None or scope is None:
        return [LayerKind(f"each of num_layers layers, at {at}", None, _branches(recipe, Reader(recipe)))]

    def branches(layers: Sequence[LayerSpec]) -> tuple[Branch, ...]:
        return _branches(recipe, Reader(recipe, [scope.with_names(layer=layer.index) for layer in layers], layers))

    kinds = _alike(spec.layers, lambda layer: branches([layer]))
    if len(kinds) > MAX_KINDS:
        kinds = _alike(spec.layers, lambda layer: _nodes(branches([layer])))
    indices = [tuple(layer.index for layer in alike) for alike in kinds]
    return [
        LayerKind(f"{layer_list(which)} of {spec.num_layers}, at {at}", which, branches(alike))
        for which, alike in zip(indices, kinds, strict=True)
    ]


def _alike(layers: Sequence[LayerSpec], key: Callable[[LayerSpec], Hashable]) -> list[list[LayerSpec]]:
    """Groups the layers by ``key``, in the order in which the keys first occur."""
    found: dict[Hashable, list[LayerSpec]] = {}
    for layer in layers:
        found.setdefault(key(layer), []).append(layer)
    return list(found.values())


def _nodes(branches: Sequence[Branch]) -> tuple[tuple[str, ...], ...]:
    """Returns the nodes of all boxes with the labels of their facts."""
    return tuple((box.node, *(fact.label for fact in box.facts)) for branch in branches for box in branch.boxes())


def _legend(recipe: Recipe, reader: Reader) -> Iterator[Box]:
    whole = recipe.schema
    yield Box("numbers", "config", tuple(_numbers(whole.config, reader)))
    if whole.define:
        defined = [Fact(printable(name), _meaning(reader, each)) for name, each in whole.define.items()]
        yield Box("names that the recipe defines", "define", tuple(defined))
    if whole.requires:
        conditions = [Fact(f"{index}", reader.source(each)) for index, each in enumerate(whole.requires, start=1)]
        yield Box("only for models for which all of these are true", "requires", tuple(conditions))
    if whole.aliases:
        spellings = [Fact(name, f"or {', '.join(others)}") for name, others in whole.aliases.items()]
        yield Box("other spellings of tensors", "aliases", tuple(spellings))


def _signs(layers: Sequence[LayerKind]) -> Box:
    facts = [Fact("⊕", "adds its inputs")]
    if any(len(lane.alternatives) > 1 for kind in layers for branch in kind.branches for lane in branch.lanes):
        facts.append(Fact("○", "takes the one that a layer has"))
    return Box("signs", "", tuple(facts))


def _numbers(config: schema.Config, reader: Reader) -> Iterator[Fact]:
    for name, text in schema.descriptions(schema.Config).items():
        meaning = text.split(";")[0].rstrip(".").replace("`", "")
        yield Fact(name, f"{meaning}: {_meaning(reader, getattr(config, name))}")


def _meaning(reader: Reader, expression: Expression) -> str:
    """Returns the expression; with a configuration its value and then the expression."""
    text, source = reader.text(expression), reader.source(expression)
    return source if text == source else f"{text} = {source}"


def _branches(recipe: Recipe, reader: Reader) -> tuple[Branch, ...]:
    residual = recipe.schema.model.layers.residual
    return tuple(_branch(reader, name, branch) for name, branch in residual.items() if reader.there(branch))


def _branch(reader: Reader, name: str, branch: schema.Branch) -> Branch:
    node = f"model.layers.residual.{name}"
    lanes = []
    for kinds in _PARTS:
        alternatives = []
        for kind, box_of in kinds:
            part = getattr(branch, kind)
            if part is not None and reader.there(part):
                norm = norm_box(reader, part.norm, f"{node}.{kind}.norm")
                alternatives.append((*([norm] if norm else []), box_of(reader, part, f"{node}.{kind}")))
        if alternatives:
            lanes.append(Lane(tuple(alternatives)))
    after = (
        norm_box(reader, branch.output_norm, f"{node}.output_norm"),
        scale_box(reader, branch.scale, f"{node}.scale"),
    )
    return Branch(
        name,
        node,
        None if reader.flag(branch.when) else reader.text(branch.when),
        norm_box(reader, branch.norm, f"{node}.norm"),
        tuple(lanes),
        tuple(box for box in after if box is not None),
        norm_box(reader, branch.sum_norm, f"{node}.sum_norm"),
    )


# ------------------------------------------------------------------------------------------------------- sentences


def _sentences(
    reader: Reader, embedding: Sequence[Box], layers: Sequence[LayerKind], ending: Sequence[Box]
) -> Iterator[str]:
    hidden, count = reader.number("hidden_size"), reader.number("num_layers")
    yield (
        f"Each token becomes a vector of {hidden} numbers, the stream, which passes through {count} layers. "
        "The branches of a layer read the stream, and their outputs are added to it."
    )
    if len(layers) > 1:
        yield f"There are {len(layers)} kinds of layers; each kind is drawn once, in any order of the layers."
    positions = _positions(embedding, layers)
    yield f"The model gets the position of a token {positions}."
    said = dict.fromkeys(_branch_sentence(branch) for kind in layers for branch in kind.branches)
    yield from said
    final = "normalized and then " if any(box.node == "model.final_norm" for box in ending) else ""
    yield f"After the last layer the stream is {final}multiplied by the head, which gives a logit for every token."


def _positions(embedding: Sequence[Box], layers: Sequence[LayerKind]) -> str:
    labels = {fact.label for kind in layers for branch in kind.branches for box in branch.boxes() for fact in box.facts}
    ways = [
        *(["from a learned vector that is added to the token's vector"] if any(box.added for box in embedding) else []),
        *(["from queries and keys that are rotated by position (rotary)"] if "rotary" in labels else []),
        *(["from scores that fall with distance (ALiBi)"] if "ALiBi" in labels else []),
    ]
    return " or ".join(ways) if ways else "only from the causal mask: nothing encodes distances"


def _branch_sentence(branch: Branch) -> str:
    ways = [" or ".join(f"the {boxes[-1].title}" for boxes in lane.alternatives) for lane in branch.lanes]
    reads = "reads the stream through a norm" if branch.norm else "reads the stream as it is"
    if branch.norm is None and all(len(boxes) > 1 for lane in branch.lanes for boxes in lane.alternatives):
        reads = "reads the stream through a norm of its own"
    together = f"{ways[0]} {reads}" if len(ways) == 1 else f"{' and '.join(ways)} run in parallel; each {reads}"
    after = [f"{'normalized' if box.title.endswith('norm') else 'scaled'}" for box in branch.after]
    made = (
        f"{'its output is' if len(ways) == 1 else 'their outputs are'} {' and '.join([*after, 'added to the stream'])}"
    )
    summed = ", and the sum is normalized" if branch.sum_norm else ""
    condition = f" (only if {branch.condition})" if branch.condition else ""
    return f"{branch.name}{condition}: {together}; {made}{summed}."
