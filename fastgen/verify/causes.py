"""Finds why a node disagrees: tries single changes of the recipe, one by one, that often are the cause.

A change is a cause if with it everything that agreed before still agrees, and the failing comparison agrees too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Final

from fastgen.models.recipe.expressions import parse_expression
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.recipe.tree import NodePath, Scalar, Tree
from fastgen.verify.cases import Case
from fastgen.verify.compare import Comparer
from fastgen.verify.configs import flattened
from fastgen.verify.disagreement import COMPLAINT, Comparison, Disagreement, node_at
from fastgen.verify.edits import nodes, replaced, replaced_tree
from fastgen.verify.report import Cause

# Most models that are run, and most changes that are tried, to find a cause.
MAX_RUNS: Final = 40
MAX_HYPOTHESES: Final = 400
_MAX_NEW_NORMS: Final = 3

_NORM_PLACES: Final = ("norm", "output_norm", "sum_norm")
_PARTS: Final = ("attention", "latent_attention", "mlp", "moe")
_MODULE_KEYS: Final = ("q", "k", "v", "gate", "up", "down", "weight")
_USUAL: Final[dict[str, tuple[Scalar, ...]]] = {
    "eps": (1e-5, 1e-6, 1e-12, 1e-8),
    "theta": (10000, 500000, 1000000),
    "kind": ("rms", "layer", "plain", "gated", "half", "interleaved"),
    "offset": (0, 1, 2),
    "activation": ("'silu'", "'gelu'", "'gelu_new'", "'relu'", "'relu2'", "'quick_gelu'"),
    "sliding_window": ("none",),
    "scale": (1, "sqrt(hidden_size)", "1 / sqrt(head_dim)", "1 / head_dim", "1 / sqrt(hidden_size)"),
    "scaling": ("none",),
    "softcap": ("none",),
    "dim": ("head_dim", "head_dim / 2", "head_dim / 4"),
    "scoring": ("softmax", "softmax_top_k", "sigmoid"),
    "over": ("head", "all"),
}
_ABSENT: Final[dict[str, tuple[tuple[str, Scalar], ...]]] = {  # keys that a node may lack, and their values
    "attention": (("scale", 1), ("sliding_window", "none")),
    "embedding": (("scale", "sqrt(hidden_size)"),),
    "norm": (("bias", True), ("offset", 1)),
    "router": (("scale", "routed_scaling_factor"),),
    "head": (("scale", "logit_scale"), ("bias", True)),
}
_TOKEN: Final = re.compile(r"(?<![\w.'])\d+\.?\d*(?:e-?\d+)?(?![\w.'])|[a-z]+|==|!=|<=|>=|//|[-+*/<>]")
_OTHER_OPERATORS: Final[dict[str, tuple[str, ...]]] = {
    **{"true": ("false",), "false": ("true",), "and": ("or",), "or": ("and",), "not": ("",), "min": ("max",)},
    **{"max": ("min",), "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "//": ("*",)},
    **{"==": ("!=",), "!=": ("==",), "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<")},
}
_DEFAULT: Final = re.compile(r"\b(default|otherwise)\(")
_FLAGS: Final = ("bias", "affine", "tied", "when", "normalize", "scaled")
_FROM_CONFIG: Final[dict[str, tuple[str, ...]]] = {  # recipe key: parts of config.json names
    "eps": ("eps", "epsilon"),
    "theta": ("theta", "rotary_emb_base"),
    "activation": ("act", "activation"),
    "sliding_window": ("window",),
    "scale": ("scal", "multiplier"),
    "softcap": ("softcap",),
    "size": ("intermediate", "ffn", "inner"),
    "tied": ("tie",),
    "bias": ("bias",),
    "top_k": ("per_tok",),
    "num_layers": ("layer",),
    "num_heads": ("head",),
    "num_kv_heads": ("head", "kv"),
    "head_dim": ("head_dim",),
    "hidden_size": ("hidden", "embd", "d_model"),
    "vocab_size": ("vocab",),
    "max_positions": ("position",),
    "rows": ("position",),
    "trained_positions": ("position",),
    "affine": ("affine",),
}


@dataclass(frozen=True)
class Hypothesis:
    """A changed recipe: ``change`` describes the change at ``path``.

    It is ``narrow`` if a number replaces what read the configuration, so that it may be right for one file alone.
    """

    path: NodePath
    change: str
    recipe: Recipe
    narrow: bool = False


def _unread(result: Comparison) -> str:
    """Returns the complaint about keys that are not accounted for, if nothing else disagrees."""
    wrong = result.disagreement
    if wrong is None or wrong.key != COMPLAINT or wrong.node.path != "ignores":
        return ""
    return "; ".join(line.removeprefix("- ") for line in wrong.message.splitlines() if line.startswith("- "))


def find_cause(
    recipe: Recipe, failed: Comparison, case: Case, others: Sequence[Case], comparer: Comparer
) -> Cause | None:
    """Returns the first change with which everything agrees, also in ``others``; else the change that agrees furthest.

    ``failed`` is the comparison of the recipe in ``case``.
    """
    wrong = failed.disagreement
    assert wrong is not None
    most = comparer.num_runs + MAX_RUNS
    best: tuple[int, Cause] | None = None
    for hypothesis in islice(hypotheses(recipe, wrong, case.config), MAX_HYPOTHESES):
        if comparer.num_runs >= most:
            break
        result = comparer.retry(hypothesis.recipe, case)
        complete = result.disagreement is None
        further = wrong.key != COMPLAINT and {*failed.agreed, wrong.key} <= result.agreed.keys()
        if not complete and not further:
            continue
        agreeing = sum(_holds(comparer.retry(hypothesis.recipe, other)) for other in others) + 1 if complete else 0
        if hypothesis.narrow and agreeing <= len(others):
            continue
        if best is None or agreeing > best[0]:
            best = (
                agreeing,
                Cause(node_at(recipe, ".".join(hypothesis.path)), hypothesis.change, complete, _unread(result)),
            )
        if agreeing == len(others) + 1:
            break
    return best[1] if best else None


def _holds(comparison: Comparison) -> bool:
    """Returns whether a change is compatible with a configuration: all agrees, or the key that it reads is absent."""
    wrong = comparison.disagreement
    return wrong is None or "has no key" in wrong.message


def hypotheses(recipe: Recipe, wrong: Disagreement, config: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Yields valid changed recipes: those in the first region first, the simplest first."""
    seen: set[str] = set()
    roots: list[NodePath] = []
    for path in wrong.region:
        root = tuple(node_at(recipe, path).path.split("."))
        if root not in roots and recipe.tree.child(root[0]) is not None:
            roots.append(root)
    if not wrong.node.path.startswith("config."):
        roots += [path for path in _definitions(recipe, roots) if path not in roots]
    for changes, change, at in _changes(recipe, roots, wrong, config):
        if change not in seen:
            seen.add(change)
            changed = replaced(recipe, changes)
            if changed is not None:
                yield Hypothesis(at, change, changed, _is_narrow(recipe, changes))


def _is_narrow(recipe: Recipe, changes: Mapping[NodePath, Tree | Scalar]) -> bool:
    """Returns whether a number replaces an expression that reads a key."""
    for path, value in changes.items():
        old = recipe.tree.find(path).value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and isinstance(old, str) and parse_expression(old).paths:
            return True
    return False


def _definitions(recipe: Recipe, roots: list[NodePath]) -> Iterator[NodePath]:
    """Yields the entries of ``define:`` that expressions below ``roots`` mention, and numbers that all parts need."""
    entries = _entries(recipe)
    texts = [str(tree.value) for root in roots for _, tree in nodes(recipe.tree.find(root)) if tree.value is not None]
    found: dict[str, None] = {}
    while texts:
        words = set(re.findall(r"\w+", texts.pop()))
        new = [name for name in entries if name in words and name not in found]
        found |= dict.fromkeys(new)
        texts += [str(entries[name].value) for name in new]
    yield from (("define", name) for name in found)
    yield from (("config", name) for name in ("head_dim", "num_kv_heads", "num_heads", "max_positions"))


def _entries(recipe: Recipe) -> Mapping[str, Tree]:
    """Returns the entries of ``define:`` by their names."""
    define = recipe.tree.child("define")
    return define.value if define is not None and isinstance(define.value, Mapping) else {}


_Change = tuple[Mapping[NodePath, Tree | Scalar], str, NodePath]


def _changes(
    recipe: Recipe, roots: list[NodePath], wrong: Disagreement, config: Mapping[str, Any]
) -> Iterator[_Change]:
    """Yields changes by region: literals and operators of all regions first, then values, names and places."""
    yield from _new_norms(recipe, wrong.unclaimed)
    regions = [list(nodes(recipe.tree.find(root), root)) for root in roots]
    for region in regions:
        for path, tree in region:
            yield from _literals(path, tree)
    yield from _everywhere(recipe)
    for region in regions:
        for path, tree in region:
            yield from _values(recipe, path, tree, config)
        yield from _swaps(region)
        for path, tree in region:
            if isinstance(tree.value, Mapping):
                yield from _moves(path, tree)
                yield from _additions(path, tree)
                yield from _removals(path, tree)
    yield from _swaps([each for region in regions for each in region])
    if any(root[0] == "model" for root in roots):
        yield from _moved_between(recipe)


def _literals(path: NodePath, tree: Tree) -> Iterator[_Change]:
    if isinstance(tree.value, str) and (path[0] in ("config", "define") or re.search(r"[ (']", tree.value)):
        for value in _other_literals(tree.value):
            yield {path: value}, f"{path[-1]} {_shown(tree.value)} -> {_shown(value)}", path


def _everywhere(recipe: Recipe) -> Iterator[_Change]:
    """Yields changes of a default that several nodes repeat, in all of them: a flag that is absent means one thing."""
    places: dict[str, list[NodePath]] = defaultdict(list)
    for path, tree in nodes(recipe.tree.find(("model",)), ("model",)):
        if isinstance(tree.value, str) and _DEFAULT.search(tree.value):
            places[tree.value].append(path)
    for text, paths in places.items():
        for value in _other_literals(text) if len(paths) > 1 else ():
            yield dict.fromkeys(paths, value), f"{paths[0][-1]} {text} -> {value}, in {len(paths)} nodes", paths[0]


def _values(recipe: Recipe, path: NodePath, tree: Tree, config: Mapping[str, Any]) -> Iterator[_Change]:
    """Yields other values of one key: keys of config.json with a similar name, or names of ``define:`` that read them,
    and the usual ones."""
    key, old = path[-1], tree.value
    if isinstance(old, Mapping | tuple):
        return
    stated = list(_from_config(key, config))
    reading = {name: set(re.findall(r"\w+", str(entry.value))) for name, entry in _entries(recipe).items()}
    defined = [name for name, words in reading.items() if path[0] == "model" and words & set(stated)]
    if isinstance(old, str) and old.startswith("first("):  # one path more, so that no other file loses its own
        rest = old.removeprefix("first(")
        stated = [f"first({name!r}, {rest}" for name in stated if f"'{name}'" not in rest]
    usual = [*defined, *stated, *_USUAL.get(key, ())]
    if key in _FLAGS:
        usual += [True, False]
        usual += [f"not ({old})"] if isinstance(old, str) else []
    if isinstance(old, int) and not isinstance(old, bool):
        usual += [old - 1, old + 1]
    if key == "sliding_window" and isinstance(old, str):
        usual += [f"({old}) - 1", f"({old}) + 1"]
    for value in usual:
        if value != old or type(value) is not type(old):
            yield {path: value}, f"{key} {_shown(old)} -> {_shown(value)}", path


def _other_literals(text: str) -> Iterator[str]:
    """Yields the expression with one literal or operator changed: a flag flipped, an integer one more or less, …"""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.isdecimal():
            others = [str(int(token) - 1), str(int(token) + 1)]
        elif token[0].isdigit():
            others = [f"{float(token) / 10:g}", f"{float(token) * 10:g}"]
        else:
            others = list(_OTHER_OPERATORS.get(token, ()))
        for other in others:
            yield f"{text[: match.start()]}{other}{text[match.end() :]}".strip()
    yield f"not ({text})"


def _from_config(key: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of the configuration with a name like those that ``key`` reads, dotted inside mappings."""
    parts = _FROM_CONFIG.get(key, ())
    for path, value in flattened(config):
        named = any(part in path[-1] for part in parts) and all(name.isidentifier() for name in path)
        if named and not isinstance(value, list):
            yield ".".join(path)


def _swaps(below: list[tuple[NodePath, Tree]]) -> Iterator[_Change]:
    """Yields changes that swap the names of two modules."""
    named = [(where, node) for where, node in below if where[-1] in _MODULE_KEYS and isinstance(node.value, str)]
    for (one, first), (other, second) in combinations(named, 2):
        if len(one) == len(other) and first.value != second.value:
            yield {one: second, other: first}, f"{first.value} and {second.value} are swapped", one


def _moves(path: NodePath, tree: Tree) -> Iterator[_Change]:
    """Yields changes that move a norm to another place of its branch."""
    assert isinstance(tree.value, Mapping)
    for place in _NORM_PLACES:
        for other in _NORM_PLACES:
            if place in tree.value and other not in tree.value:
                changes = {(*path, place): None, (*path, other): tree.value[place]}
                yield changes, f"{place} should be {other}", (*path, place)
    for place, other in combinations(_NORM_PLACES, 2):
        if place in tree.value and other in tree.value:
            swapped = {(*path, place): tree.value[other], (*path, other): tree.value[place]}
            yield swapped, f"{place} and {other} are swapped", (*path, place)


def _moved_between(recipe: Recipe) -> Iterator[_Change]:
    """Yields changes that move a norm to another branch, between a branch and its part, or to an end of the model."""
    residual = ("model", "layers", "residual")
    branches = recipe.tree.find(residual).value
    homes: list[NodePath] = [("model", "embedding"), ("model",)]
    for name, branch in branches.items() if isinstance(branches, Mapping) else ():
        homes.append((*residual, name))
        homes += [(*residual, name, part) for part in _PARTS if branch.child(part) is not None]
    places = [(*home, key) for home in homes for key in _norms_of(home)]
    there = {place: node_at(recipe, ".".join(place)).path == ".".join(place) for place in places}
    for place in places:
        for other in places if there[place] else ():
            if not there[other]:
                moved = {place: None, other: recipe.tree.find(place)}
                yield moved, f"{place[-1]} of {place[-2]} should be {other[-1]} of {other[-2]}", place


def _norms_of(home: NodePath) -> tuple[str, ...]:
    if home == ("model",):
        return ("final_norm",)
    return ("norm",) if home[-1] in ("embedding", *_PARTS) else _NORM_PLACES


def _additions(path: NodePath, tree: Tree) -> Iterator[_Change]:
    assert isinstance(tree.value, Mapping)
    kind = "norm" if path[-1].endswith("norm") else path[-1]
    for key, value in _ABSENT.get(kind, ()):
        if key not in tree.value:
            yield {(*path, key): value}, f"{key}: {_shown(value)} is missing", (*path, key)
    if path[-1] == "attention" and "rotary" not in tree.value:
        yield {(*path, "rotary", "theta"): 10000}, "rotary: {theta: 10000} is missing", (*path, "rotary")


def _new_norms(recipe: Recipe, unclaimed: tuple[str, ...]) -> Iterator[_Change]:
    """Yields changes that add a norm for a weight that no node claims, as a copy of another norm of the recipe."""
    residual = ("model", "layers", "residual")
    branches = recipe.tree.find(residual).value
    norms = [node for where, node in nodes(recipe.tree) if where[-1:] and where[-1] in (*_NORM_PLACES, "final_norm")]
    if not norms or not isinstance(branches, Mapping):
        return
    places: list[NodePath] = [(*residual, name, place) for name in branches for place in _NORM_PLACES]
    parts = [(name, part) for name, branch in branches.items() for part in _PARTS if branch.child(part) is not None]
    places += [(*residual, *part, "norm") for part in parts]
    prefix = recipe.schema.model.layers.at.replace("{layer}", "0") + "."
    modules = dict.fromkeys(name.rpartition(".")[0].removeprefix(prefix) for name in unclaimed)
    for module in list(modules)[:_MAX_NEW_NORMS]:
        for path in (*places, ("model", "final_norm")):
            if node_at(recipe, ".".join(path)).path != ".".join(path):
                new = replaced_tree(norms[0], {("weight",): module, ("when",): None})
                yield {path: new}, f"{path[-1]}: {{weight: {module}}} is missing", path


def _removals(path: NodePath, tree: Tree) -> Iterator[_Change]:
    assert isinstance(tree.value, Mapping)
    for key in tree.value:
        yield {(*path, key): None}, f"{key} should be removed", (*path, key)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
