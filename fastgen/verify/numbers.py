"""Compares the numbers of a resolved recipe with those that the reference states."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from torch import Tensor

from fastgen.models.frequencies import inverse_frequencies
from fastgen.models.recipe.expression_grammar import ExpressionError
from fastgen.models.recipe.expressions import Scope
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec, RotarySpec
from fastgen.verify.cases import Case
from fastgen.verify.configs import SPELLINGS, flattened
from fastgen.verify.disagreement import Comparison, Disagreement, node_at

_SIZES: Final = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
# The names that files use for the numbers of the rotation.
_ROTATION: Final = {
    "theta": ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base", "theta"),
    "trained_positions": ("original_max_position_embeddings", *SPELLINGS["max_positions"]),
}
_FREQUENCY_TOLERANCE: Final = 1e-5


def number_disagreements(recipe: Recipe, case: Case, spec: ModelSpec, comparison: Comparison) -> Iterator[Disagreement]:
    """Compares sizes, windows and rotary frequencies; numbers that the reference does not state are skipped."""
    for name in _SIZES:
        ours, theirs = getattr(spec, name), case.numbers.get(name)
        if ours is None or not isinstance(theirs, int) or (name == "max_positions" and _stretched(spec)):
            continue
        if ours != theirs:
            yield _other_size(recipe, case, name, ours, theirs)
        comparison.agree("numbers", f"config.{name}")
    yield from _windows(recipe, case, spec)
    rotary = next((found for each in spec.attentions() if (found := getattr(each, "rotary", None))), None)
    if rotary is not None:
        yield from _rotation(recipe, case, rotary, comparison)


def wrong_number(recipe: Recipe, case: Case) -> Disagreement | None:
    """Returns the first size that differs from the reference's, for a recipe whose sizes do not fit together."""
    scope = Scope(case.config)
    for name in _SIZES:
        theirs = case.numbers.get(name)
        try:
            ours = getattr(recipe.schema.config, name).evaluate(scope)
        except ExpressionError:
            continue  # the error that is being explained reports it
        if isinstance(ours, int | float) and isinstance(theirs, int) and ours != theirs:
            return _other_size(recipe, case, name, ours, theirs)
    return None


def _other_size(recipe: Recipe, case: Case, name: str, ours: float, theirs: int) -> Disagreement:
    path = f"config.{name}"
    message = f"{name} is {ours}, the reference's is {theirs}{_where(case, theirs, SPELLINGS[name])}"
    return Disagreement("numbers", node_at(recipe, path), message, (path,), path)


def _where(case: Case, value: float, names: Collection[str]) -> str:
    """Returns where the configuration states ``value`` under one of ``names``, or that it states none of them."""
    stated = [(path, found) for path, found in flattened(case.config) if path[-1] in names and found is not None]
    places = [".".join(path) for path, found in stated if found == value]
    if places:
        return f", which this config.json states as {' and '.join(places)}"
    return "" if stated else ", which is its default: this config.json states none"


def _windows(recipe: Recipe, case: Case, spec: ModelSpec) -> Iterator[Disagreement]:
    longest = max(map(len, case.prompts), default=0)
    theirs = case.numbers.get("sliding_window")
    windowed = case.numbers.get("windowed")
    for index, attention in enumerate(spec.attentions()):
        window = getattr(attention, "sliding_window", None)
        if windowed is not None and (window is not None) != windowed[index]:
            node = node_at(recipe, f"{attention.node.path}.sliding_window")
            has, other = ("no", "one") if window is None else ("a", "none")
            message = f"layer {index} has {has} window, the reference has {other}"
            yield Disagreement("numbers", node, message, (attention.node.path,), f"window {index}")
        # If a prompt is longer than the window, a difference shows in the outputs.
        if window is None or window == theirs or min(window, theirs or window) <= longest:
            continue
        message = f"layer {index} sees {window} tokens, the reference {theirs}"
        if theirs is None:
            if windowed is not None or not longest:  # the reference has none, or nothing is run in this case
                continue
            message = (
                f"layer {index} sees {window} tokens, and no prompt has more than {longest}, so nothing shows whether "
                "the reference does so, since its configuration has no sliding_window; give a checkpoint whose "
                "config.json states a smaller number"
            )
        node = node_at(recipe, f"{attention.node.path}.sliding_window")
        yield Disagreement("numbers", node, message, (attention.node.path,), f"window {index}")


def _rotation(recipe: Recipe, case: Case, rotary: RotarySpec, comparison: Comparison) -> Iterator[Disagreement]:
    """Compares theta, the trained length and the frequencies: a small error in them shows only in long prompts."""
    region = (rotary.node.path,)
    scaling = rotary.scaling
    stretched = None if scaling is None or scaling.kind == "linear" else scaling.original_max_positions
    for key, name, ours in (
        ("theta", "rope_theta", rotary.theta),
        ("trained_positions", "trained_positions", stretched),
    ):
        theirs = case.numbers.get(name)
        if ours is None or not isinstance(theirs, int | float):
            continue
        if ours != theirs:
            message = f"{key} is {ours:.15g}, the reference's is {theirs:.15g}{_where(case, theirs, _ROTATION[key])}"
            node = node_at(recipe, f"{rotary.node.path}.{key}")
            yield Disagreement("numbers", node, message, region, key)
        comparison.agree("numbers", key)
    wanted, found = case.numbers.get("frequencies"), inverse_frequencies(rotary)
    if isinstance(wanted, Tensor) and wanted.shape == found.shape:
        difference = float(((found - wanted) / wanted).abs().max())
        if difference > _FREQUENCY_TOLERANCE:
            message = f"the rotary frequencies differ by {difference:.1e}"
            yield Disagreement("numbers", rotary.node, message, region, "frequencies", difference)
        comparison.agree("numbers", "frequencies", difference)


def _stretched(spec: ModelSpec) -> bool:
    rotaries = [getattr(attention, "rotary", None) for attention in spec.attentions()]
    return any(rotary and rotary.scaling and rotary.scaling.kind == "dynamic" for rotary in rotaries)
