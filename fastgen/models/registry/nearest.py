"""Finds the known recipe that is nearest to a checkpoint, by its tensors and not by the name of the architecture.

Each recipe is resolved against the checkpoint's configuration. A number may be there under another usual spelling, or
only in the shapes of tensors. Then the tensors of the recipe and of the checkpoint are matched, with the indices of
layers and experts folded: first those of equal name and shape, then those of equal shape at the same depth, the nearest
names first. Only headers are read, no weights.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from fastgen.errors import FastgenError
from fastgen.models.checkpoint.kinds import quantized
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.config_keys import HARMLESS, INERT
from fastgen.models.resolve.resolve import mentioned_paths, resolve, unread_keys
from fastgen.models.spec import ModelSpec, MoeSpec

# The names that files use for one fact, by its meaning; the most common spelling first.
SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "vocab_size": ("vocab_size", "n_vocab", "vocabulary_size", "num_tokens", "padded_vocab_size", "vocab"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "dim", "model_dim", "embed_dim", "width", "emb_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "num_blocks", "n_blocks"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "num_query_heads"),
    "num_kv_heads": (
        *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "n_kv_head", "kv_heads"),
        *("multi_query_group_num", "num_query_groups"),
    ),
    "head_dim": ("head_dim", "d_head", "kv_channels", "attention_head_dim", "head_size", "dim_head", "d_kv"),
    "max_positions": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "context_length"),
        *("n_ctx", "seq_length", "max_seq_length", "block_size", "model_max_length"),
    ),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "mlp_dim", "ff_dim"),
    "eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "eps", "epsilon"),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation", "act_fn", "mlp_activation"),
    "theta": ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base", "theta"),
    "tied": ("tie_word_embeddings", "tie_embeddings", "tied_embeddings", "share_embeddings", "weight_tying"),
}

_LAYER: Final = "{layer}"
_EXPERT: Final = "{expert}"
_OTHER: Final = "{index}"
_ABOUT_EXPERTS: Final = re.compile(r"expert|moe|mlp|ffn|ff\b|feed_forward", re.IGNORECASE)
_INDEX: Final = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")
_WEIGHTS_OF_SCORE: Final = (1.0, 0.3, 0.3)  # weights of structure, names, config keys
LISTED: Final = 8  # tensors that an error names
_HINT_AT: Final = 0.5  # smallest share of explained tensors at which the nearest recipe is worth naming

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Nearness:
    """The fit of ``recipe`` to a checkpoint: it explains ``explained`` of the ``num_tensors`` tensors.

    A larger ``score`` is nearer. ``structure`` is the share of folded tensors that both sides have among those that
    either side has; ``names`` is the similarity of their names. ``spec`` is the resolved recipe, with only the first
    and last of equal layers and one expert of each mixture; ``None`` if the recipe does not fit the configuration.
    """

    recipe: Recipe
    explained: int
    num_tensors: int
    score: float
    structure: float
    names: float
    spec: ModelSpec | None


@dataclass(frozen=True)
class _Folded:
    """The tensors whose names differ only in indices."""

    name: str
    shape: Shape
    count: int

    @property
    def depth(self) -> str:
        return f"{self.name.count('{')} {self.name.endswith('.bias')}"


def fold(name: str) -> str:
    """Returns ``name`` with its first index replaced by ``{layer}``, and its second by ``{expert}`` or ``{index}``.

    It is an expert's if the name says so before it: a norm for each head has an index too.
    """
    indices = list(_INDEX.finditer(name))[:2]
    for number, found in reversed(list(enumerate(indices))):
        inner = _EXPERT if _ABOUT_EXPERTS.search(name[: found.start()]) else _OTHER
        name = f"{name[: found.start()]}{_LAYER if number == 0 else inner}{name[found.end() :]}"
    return name


def other_tensors(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """Returns sentences about what no recipe describes in a checkpoint: quantized weights, or convolutions and fused
    experts in layers. The text is empty if there are none.

    The last two are the tensors with more than two axes, except masks, which begin with an axis of one. A matrix may
    have three axes too, and a layout may describe it, but few checkpoints store one so.
    """
    if quantization := quantized(config, shapes):
        return quantization
    deep = {(fold(name), shape): None for name, shape in shapes.items() if len(shape) > 2 and shape[0] != 1}
    listed = [f"{name} {list(shape)}" for name, shape in deep if _LAYER in name]
    if not listed:
        return ""
    more = f" and {len(listed) - LISTED:,} more" if len(listed) > LISTED else ""
    return (
        f"Of the tensors in its layers, these have more than two axes: {', '.join(listed[:LISTED])}{more}. That is a "
        "convolution, or all experts in one tensor. The recipe language has neither: each expert needs tensors of its "
        "own"
    )


def nearest_recipes(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], recipes: Iterable[Recipe]
) -> list[Nearness]:
    """Sorts ``recipes``, the nearest first, for a checkpoint with this ``config.json`` and these tensor ``shapes``. Of
    equally near ones the plainest comes first: one that extends no other, with the shortest text.
    """
    found, sample = _folded(shapes), _sample(shapes)
    known = _numbers_from_shapes(config, found)
    measured = [_nearness(recipe, config, found, sample, known) for recipe in recipes]

    def order(each: Nearness) -> tuple[float, bool, int, str]:
        return -each.score, each.recipe.extends is not None, len(each.recipe.text), each.recipe.name

    return sorted(measured, key=order)


def shapes_in(directory: Path | None) -> dict[str, Shape]:
    """Returns the shapes of the tensors in a checkpoint; nothing if there are none to read."""
    try:
        return _shapes(directory) if directory is not None else {}
    except (FastgenError, OSError):  # a broken checkpoint is reported when it is loaded
        return {}


def hint(
    config: Mapping[str, Any], directory: Path | None, shapes: Mapping[str, Shape], recipes: Iterable[Recipe]
) -> str:
    """Returns sentences for the error about an unknown architecture: the nearest recipe, and how to make a new one.

    The text is empty if there are no tensors.
    """
    if directory is None or not shapes:
        return ""
    best = next(iter(nearest_recipes(config, shapes, recipes)), None)
    advice = f"`fastgen recipe new {shlex.quote(str(directory))}` proposes a recipe for it."
    if best is None or best.explained < _HINT_AT * best.num_tensors:
        return advice
    share = f"{best.explained:,} of its {best.num_tensors:,} tensors"
    return f"The nearest known recipe is {best.recipe.name!r}, which explains {share}. {advice}"


def tensors_of_another(config: Mapping[str, Any], directory: Path, recipe: Recipe, recipes: Iterable[Recipe]) -> str:
    """Returns text to add to an error of ``recipe``: which other recipes fit the tensors, if ``recipe`` does not.

    A recipe that cannot be resolved has no tensors to compare. If it names all modules of the checkpoint, the tensors
    are its own, and what it refuses is a key.
    """
    try:
        shapes = _shapes(directory)
        if _names_all(recipe, shapes):
            return ""
        nearest = nearest_recipes(config, shapes, recipes)
    except (FastgenError, OSError):
        return ""
    fitting = [
        each for each in nearest if each.explained == each.num_tensors and each.structure == nearest[0].structure
    ]
    names = sorted(repr(each.recipe.name) for each in fitting)
    if not names or repr(recipe.name) in names:
        return ""
    said = ", ".join(config.get("architectures") or [])
    return (
        f"; config.json says that this is {said}, but its tensors are those of another model: they fit the recipes "
        f"{', '.join(names)}. If it is one of these, pass its name as recipe="
    )


def _shapes(directory: Path) -> dict[str, Shape]:
    from fastgen.models.checkpoint.checkpoint import Checkpoint  # needs torch, which finding a recipe does not

    return {name: header.shape for name, header in Checkpoint.open(directory).tensors.items()}


def _names_all(recipe: Recipe, tensors: Iterable[str]) -> bool:
    """Returns whether ``recipe`` has a module, or a tensor, of the name of each of ``tensors``, or ignores it."""
    schema = recipe.schema
    modules = tuple(f".{name}" for name in _texts((schema.model, *schema.aliases.values())))

    def named(tensor: str) -> bool:
        name = f".{tensor}"
        return (
            name.rpartition(".")[0].endswith(modules)
            or name.endswith(modules)
            or any(fnmatchcase(tensor, pattern) for pattern in schema.ignores.tensors)
        )

    return all(map(named, tensors))


def _texts(value: object) -> Iterator[str]:
    """Yields every text in the schema of a recipe, or in a part of it, that is no expression."""
    match value:
        case str():
            yield value
        case BaseModel():
            yield from _texts(tuple(getattr(value, name) for name in type(value).model_fields))
        case dict():
            yield from _texts(tuple(value.values()))
        case tuple():
            for each in value:
                yield from _texts(each)


def translated(config: Mapping[str, Any], recipe: Recipe, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with the keys added that the recipe reads under a spelling that ``config`` does not have."""
    mentioned = {path[0] for path in mentioned_paths(recipe)}
    added: dict[str, Any] = {}
    for meaning, spellings in SPELLINGS.items():
        wanted = [key for key in spellings if key in mentioned and key not in config]
        value = next((config[key] for key in spellings if config.get(key) is not None), known.get(meaning))
        if value is not None and not any(key in mentioned and key in config for key in spellings):
            added |= dict.fromkeys(wanted, value)
    return {**config, **added}


def _nearness(
    recipe: Recipe,
    config: Mapping[str, Any],
    found: list[_Folded],
    sample: Mapping[int, int],
    known: Mapping[str, Any],
) -> Nearness:
    total = sum(each.count for each in found)
    mentioned = {path[0] for path in mentioned_paths(recipe)}
    stated = {key for key in config if key not in INERT and key not in HARMLESS}
    known_keys = mentioned | set(recipe.schema.ignores.config)
    keys = len(stated & known_keys) / max(1, len(stated | known_keys))
    try:
        content = translated(config, recipe, known)
        unread = unread_keys(recipe, content)
        spec = resolve(recipe, content, allow_config_keys=unread, only_layers=sample or None, most_experts=1)
    except FastgenError:
        return Nearness(recipe, 0, total, _WEIGHTS_OF_SCORE[2] * keys, 0.0, 0.0, None)
    wanted = _described(spec, sample)
    pairs = _pairs(found, wanted)
    structure = len(pairs) / max(1, len(found) + len(wanted) - len(pairs))
    names = sum(difflib.SequenceMatcher(None, one.name, other.name).ratio() for one, other in pairs)
    names /= max(1, len(pairs))
    score = structure, names, keys
    explained = sum(min(one.count, other.count) for one, other in pairs)
    return Nearness(
        recipe,
        explained,
        total,
        sum(weight * part for weight, part in zip(_WEIGHTS_OF_SCORE, score, strict=True)),
        structure,
        names,
        spec,
    )


def _numbers_from_shapes(config: Mapping[str, Any], found: list[_Folded]) -> dict[str, Any]:
    """Returns the numbers that follow from the shapes of tensors, by their meaning in :data:`SPELLINGS`.

    They stand in for keys that the configuration lacks. The embedding is the largest table outside the layers. The head
    size is the hidden size divided by the number of heads, unless the attention's output has another width; then it is
    one of the other numbers in the configuration.
    """

    def stated(meaning: str) -> int | None:
        return next((config[key] for key in SPELLINGS[meaning] if type(config.get(key)) is int), None)

    inside = [each for each in found if _LAYER in each.name]
    tables = [each.shape for each in found if _LAYER not in each.name and len(each.shape) == 2]
    by_shape: dict[str, Any] = {}
    if counts := Counter(each.count for each in inside if each.name.count("{") == 1):
        by_shape["num_layers"] = counts.most_common(1)[0][0]
    if tables:
        by_shape["vocab_size"], by_shape["hidden_size"] = max(tables, key=math.prod)
    hidden, heads = stated("hidden_size") or by_shape.get("hidden_size"), stated("num_heads")
    if hidden and heads and heads > 0:
        shapes = {each.shape for each in inside}
        sizes = [hidden // heads, *(value for value in config.values() if type(value) is int and value > 0)]
        fitting = (size for size in sizes if {(hidden, heads * size), (heads * size, hidden)} & shapes)
        by_shape["head_dim"] = next(fitting, hidden // heads)
    return by_shape


def _folded(shapes: Mapping[str, Shape]) -> list[_Folded]:
    counts = Counter((fold(name), tuple(shape)) for name, shape in shapes.items())
    return [_Folded(name, shape, count) for (name, shape), count in counts.items()]


def _sample(shapes: Mapping[str, Shape]) -> dict[int, int]:
    """Returns the layers to resolve, and how many layers each stands for: the first and last of each run of equals."""
    tensors: dict[int, set[tuple[str, Shape]]] = defaultdict(set)
    for name, shape in shapes.items():
        if found := _INDEX.search(name):
            tensors[int(found[0])].add((name[found.end() :], tuple(shape)))
    sample: dict[int, int] = {}
    for _, alike in itertools.groupby(sorted(tensors), key=tensors.__getitem__):
        run = list(alike)
        sample |= {run[0]: len(run)} if len(run) == 1 else {run[0]: len(run) // 2, run[-1]: (len(run) + 1) // 2}
    return sample


def _described(spec: ModelSpec, sample: Mapping[int, int]) -> list[_Folded]:
    """Returns the folded tensors of the whole model that ``spec`` samples. A tensor that parameters share
    counts once.
    """
    num_experts = max(
        (part.router.weight.out_features for part in spec.parts() if isinstance(part, MoeSpec)), default=1
    )
    counts: Counter[tuple[str, Shape]] = Counter()
    for name, shape in {each.names[0]: each.stored_shape for each in spec.tensors()}.items():
        index, folded = _INDEX.search(name), fold(name)
        layers = sample.get(int(index[0]), 1) if index else 1
        counts[folded, shape] += layers * (num_experts if _EXPERT in folded else 1)
    return [_Folded(name, shape, count) for (name, shape), count in counts.items()]


def _pairs(found: list[_Folded], wanted: list[_Folded]) -> list[tuple[_Folded, _Folded]]:
    """Pairs the tensors of both sides that may be the same; each is in at most one pair."""
    exact = {(each.name, each.shape): each for each in wanted}
    pairs = [(each, exact.pop((each.name, each.shape))) for each in found if (each.name, each.shape) in exact]
    taken = {each.name for each, _ in pairs}
    by_place: dict[tuple[str, Shape], list[_Folded]] = defaultdict(list)
    for each in exact.values():
        by_place[each.depth, each.shape].append(each)
    for one in found:
        candidates = by_place[one.depth, one.shape] if one.name not in taken else []
        if candidates:
            best = max(candidates, key=lambda other: difflib.SequenceMatcher(None, one.name, other.name).ratio())
            candidates.remove(best)
            pairs.append((one, best))
    return pairs
