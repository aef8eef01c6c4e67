"""Proposes a recipe for a checkpoint of an unknown architecture, from its configuration and its headers.

No weight is read. What headers leave open is marked in the file by ``# QUESTION: …`` on its line.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.checkpoint.kinds import other_model
from fastgen.models.fingerprint import Fingerprint, fingerprint
from fastgen.models.recipe.lacking import lacks
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.registry.nearest import Nearness, Shape, fold, nearest_recipes, other_tensors
from fastgen.models.resolve.config_keys import HARMLESS, check_config_keys
from fastgen.models.resolve.resolve import mentioned_paths, resolve, stated_architectures, unread_keys
from fastgen.models.spec import ModelSpec
from fastgen.recipe_tools.explain.plain_text import yaml_scalar
from fastgen.recipe_tools.propose.evidence import Evidence, gather
from fastgen.recipe_tools.propose.keys import Keys
from fastgen.recipe_tools.propose.nodes import Leaf, Node, joined, leaf, questions, written
from fastgen.recipe_tools.propose.proposal import Proposer
from fastgen.recipe_tools.propose.recipe_text import QUESTION_MARK, recipe_text
from fastgen.recipe_tools.propose.structure import read_structure
from fastgen.recipe_tools.propose.variant import Difference

# Last parts of the names of tensors that are not parameters: masks, frequencies.
_BUFFERS: Final = ("inv_freq", "masked_bias", "attn.bias", "attention.bias", "embed_positions", "position_ids")
_LIKE_THE_NEAREST: Final = 0.55  # smallest share of common folded tensors at which choices of the nearest recipe count
_LISTED: Final = 12
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_UNREAD: Final = (
    "nothing reads these keys, so the model cannot be loaded; describe in the recipe what a key changes, and let this "
    "line ignore those that change nothing:"
)
_INHERITED: Final = "{} accounts for these keys; do they mean the same here, or change nothing?"
_SCALING: Final = "the language does not read this mapping, so what does it do to the frequencies?"
_UNCLAIMED: Final = "{} tensors are not claimed by any node of this recipe; what are they for?"
_MISSING: Final = "{} tensors that this recipe needs are missing or have another shape"


@dataclass(frozen=True)
class Question:
    """A question that headers leave open about the node ``path``."""

    path: str
    text: str
    line: int


@dataclass(frozen=True)
class Proposal:
    """The ``text`` of a recipe for a checkpoint, the nearest known recipe, and what is left to a person.

    ``missing`` are tensors of the recipe that the checkpoint lacks or has in another shape. ``unread`` are keys of the
    configuration that nothing accounts for, dotted inside mappings. ``only_here`` and ``only_nearest`` are tensors that
    the other side lacks, folded over layers and experts.
    """

    text: str
    recipe: Recipe
    spec: ModelSpec
    nearest: Nearness | None
    questions: tuple[Question, ...]
    unclaimed: tuple[str, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    only_here: tuple[str, ...]
    only_nearest: tuple[str, ...]


def propose(config: Mapping[str, Any], shapes: Mapping[str, Shape], recipes: Sequence[Recipe]) -> Proposal:
    """Proposes a recipe for a checkpoint with this ``config.json`` and these tensor ``shapes``.

    The recipe resolves if the keys in ``unread`` are allowed. A person has to decide about these keys, so the model
    cannot be loaded before that. Tensors without a place are ``unclaimed`` and listed in the text. Raises
    :class:`CheckpointError` if the configuration or the tensors do not look like a decoder of text with plain weights.
    """
    if (found := other_model(config)) is not None:
        raise CheckpointError(f"no recipe can be proposed for this checkpoint: {found}")
    if other := other_tensors(config, shapes):
        raise CheckpointError(f"no recipe can be proposed for this checkpoint. {other}")
    evidence = gather(config, shapes)
    keys = Keys(evidence)
    structure = read_structure(evidence, keys)
    measured = nearest_recipes(config, shapes, recipes)
    nearest = measured[0] if measured else None
    helpful = nearest if nearest is not None and nearest.structure >= _LIKE_THE_NEAREST else None
    tree = Proposer(structure, keys, helpful, evidence.num_layers, evidence.layers_at).tree()
    maker = _Maker(config, shapes, recipes, _name(config, recipes))
    try:
        tree, whole = _whole(maker, tree)
    except RecipeError as error:
        raise CheckpointError(
            f"config.json and the tensors do not describe one model: {error.node}: {error.message}"
        ) from None
    best = whole
    for base in [each for each in measured[:3] if each.structure >= _LIKE_THE_NEAREST]:
        variant = maker.variant(tree, base.recipe, evidence, whole)
        if variant is not None and variant.text.count("\n") < whole.text.count("\n"):
            best = variant
            break
    return maker.proposal(best, nearest)


def _whole(maker: _Maker, tree: Node) -> tuple[Node, _Made]:
    """Returns ``tree`` and its recipe. A rotary mapping that the language does not read becomes a question. Raises
    :class:`RecipeError`.
    """
    try:
        return tree, maker.make(written(tree), None)
    except RecipeError as error:
        if not (error.node or "").endswith(".rotary.scaling"):
            raise
        asked = _with_scaling_asked(tree, error.message.partition(";")[0])
        return asked, maker.make(written(asked), None)


def _with_scaling_asked(node: Node, why: str) -> Node:
    """Returns ``node`` with a question in place of each rotary mapping that the language does not read."""
    asked: Node = {}
    for key, child in node.items():
        if isinstance(child, Leaf):
            asked[key] = Leaf(child.value, f"{_SCALING} {why}", commented=True) if key == "scaling" else child
        else:
            asked[key] = _with_scaling_asked(child, why)
    return asked


@dataclass(frozen=True)
class _Made:
    text: str
    recipe: Recipe
    spec: ModelSpec
    node: Node
    unread: tuple[str, ...]
    unclaimed: tuple[str, ...]
    missing: tuple[str, ...]


class _Maker:
    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, Shape], recipes: Sequence[Recipe], name: str):
        self.config, self.shapes, self.recipes, self.name = config, shapes, recipes, name

    def variant(self, tree: Node, base: Recipe, evidence: Evidence, whole: _Made) -> _Made | None:
        """Returns the proposal as a difference from ``base``, if it describes the same model as the ``whole``."""
        try:
            made = self.make(Difference(base, self.config, evidence.num_layers).of(tree), base, whole.unread)
        except RecipeError:
            return None
        return made if _computed(made.spec) == _computed(whole.spec) else None

    def make(self, node: Node, base: Recipe | None, unproposed: Sequence[str] = ()) -> _Made:
        """Makes ``node`` a recipe, loaded and resolved, with questions for keys that it does not account for.

        ``unproposed`` are keys that the proposal itself does not read. If the ``base`` accounts for them, that is a
        question too.
        """
        head: Node = {"name": leaf(self.name)}
        if base is not None:
            head["extends"] = leaf(base.name)
        names = [name for name in stated_architectures(self.config) if _IDENTIFIER.fullmatch(name)]
        ask = None if names else "config.json names no architecture"
        head["architectures"] = leaf(tuple(names) or ("Unknown",), ask)
        draft = self._load(recipe_text(head | node))
        unread = tuple(self._unread(draft))
        spec = resolve(draft, self.config, allow_config_keys=unread)
        unclaimed = self._unclaimed(spec, ())
        buffers = sorted({f"*.{part}" for name in unclaimed for part in _BUFFERS if name.endswith(f".{part}")})
        unclaimed = self._unclaimed(spec, buffers)
        missing = self._missing(spec)
        ignores = self._ignores(base, unread, [key for key in unproposed if key not in unread], buffers)
        node = head | ({"ignores": ignores} if ignores else {}) | node
        text = recipe_text(node, self._comments(unclaimed, missing))
        recipe = self._load(text)
        return _Made(
            text,
            recipe,
            resolve(recipe, self.config, allow_config_keys=unread),
            node,
            unread,
            tuple(unclaimed),
            tuple(missing),
        )

    def _ignores(
        self, base: Recipe | None, unread: Sequence[str], inherited: Sequence[str], buffers: Sequence[str]
    ) -> Node:
        """Returns the questions about keys that nothing reads or only the ``base`` accounts for, and about buffers."""
        node: Node = {}
        ignored = base.schema.ignores if base is not None else None
        stated = [key for key in inherited if _at(self.config, key) is not None]
        asked = [f"{_UNREAD} {self._listed(unread)}"] if unread else []
        if base is not None and stated:
            asked.append(f"{_INHERITED.format(base.name)} {self._listed(stated)}")
        if asked:
            everything = (*(ignored.config if ignored else ()), *unread)
            node["config"] = Leaf(everything, question=joined(*asked), commented=bool(unread))
        if buffers:
            everything = tuple(dict.fromkeys((*(ignored.tensors if ignored else ()), *buffers)))
            node["tensors"] = leaf(everything, "masks and frequencies, which the model computes itself?")
        return node

    def _listed(self, keys: Sequence[str]) -> str:
        values = {key: _at(self.config, key) for key in keys}
        return "; ".join(f"{key} = {_brief(value)}{_meaning(key, value)}" for key, value in values.items())

    def proposal(self, made: _Made, nearest: Nearness | None) -> Proposal:
        lines = (number for number, line in enumerate(made.text.splitlines(), 1) if QUESTION_MARK in line)
        asked = [Question(path, text, line) for (path, text), line in zip(questions(made.node), lines, strict=True)]
        for names, text in ((made.unclaimed, _UNCLAIMED), (made.missing, _MISSING)):
            if names:
                asked.append(Question("", text.format(len(names)), 1))
        mine = {fold(name) for name in self.shapes}
        spec = nearest.spec if nearest is not None else None
        theirs = {fold(each.names[0]) for each in spec.tensors()} if spec is not None else set()
        return Proposal(
            text=made.text,
            recipe=made.recipe,
            spec=made.spec,
            nearest=nearest,
            questions=tuple(asked),
            unclaimed=made.unclaimed,
            missing=made.missing,
            unread=made.unread,
            only_here=tuple(sorted(mine - theirs)),
            only_nearest=tuple(sorted(theirs - mine)),
        )

    @staticmethod
    def _comments(unclaimed: list[str], missing: list[str]) -> list[str]:
        comments = ["Proposed by `fastgen recipe new` from config.json and the headers of the tensors."]
        for names, text in ((unclaimed, _UNCLAIMED), (missing, _MISSING)):
            folded = sorted({fold(name) for name in names})
            if folded:
                comments.append(f"QUESTION: {text.format(len(names))}")
                comments += [f"- {name}{_lacked(name)}" for name in folded[:_LISTED]]
                comments += [f"- and {len(folded) - _LISTED} more"] if len(folded) > _LISTED else []
        return comments

    def _load(self, text: str) -> Recipe:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / f"{self.name}.yaml"
            file.write_text(text, encoding="utf-8")
            return load_recipe(file, find=self._find)

    def _find(self, name: str, exclude: frozenset[Path]) -> Path | None:
        return next(
            (each.file for each in self.recipes if each.name == name and each.file.resolve() not in exclude), None
        )

    def _unread(self, recipe: Recipe) -> list[str]:
        found = []
        mentioned, ignored = mentioned_paths(recipe), recipe.schema.ignores.config
        for key in unread_keys(recipe, self.config):
            value: Any = _at(self.config, key)
            for part in reversed(key.split(".") if key not in self.config else [key]):
                value = {part: value}
            try:
                check_config_keys(value, mentioned, ignored, config_file="", recipe="")
            except RecipeError:
                found.append(key)
        return found

    def _unclaimed(self, spec: ModelSpec, ignored: Sequence[str]) -> list[str]:
        """Returns the tensors that no node claims, except those that match a pattern of ``ignored``."""
        claimed = {name for each in spec.tensors() for name in each.names}
        left = (name for name in self.shapes if name not in claimed)
        return [name for name in left if not any(fnmatchcase(name, pattern) for pattern in ignored)]

    def _missing(self, spec: ModelSpec) -> list[str]:
        return sorted(
            {
                each.names[0]
                for each in spec.tensors()
                if all(self.shapes.get(name) != each.stored_shape for name in each.names)
            }
        )


def _computed(spec: ModelSpec) -> Fingerprint:
    """Returns what ``spec`` computes, whatever tensors it ignores."""
    return fingerprint(replace(spec, ignored_tensors=()))


def _at(config: Mapping[str, Any], key: str) -> Any:
    if key in config:
        return config[key]
    value: Any = config
    for part in key.split("."):
        value = value[part]
    return value


def _meaning(key: str, value: object) -> str:
    if key in HARMLESS:
        return f" ({HARMLESS[key][1]})"
    return lacks(key.rpartition(".")[2]) if value else ""


def _lacked(name: str) -> str:
    """Returns what the name of a tensor says that the language lacks, as :func:`lacks` does."""
    return next(filter(None, map(lacks, name.split("."))), "")


def _brief(value: object) -> str:
    text = yaml_scalar(value) if isinstance(value, str | int | float | bool | None) else repr(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _name(config: Mapping[str, Any], recipes: Sequence[Recipe]) -> str:
    """Returns a name for the recipe: that of the architecture in snake case, without its common ending."""
    text = next(iter(stated_architectures(config)), str(config.get("model_type") or "new"))
    text = re.sub(r"(ForCausalLM|LMHeadModel|Model)$", "", text)
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()
    name = re.sub(r"[^a-z0-9_.-]+", "_", text).strip("_.-")[:48] or "new"
    taken = {recipe.name for recipe in recipes}
    return name if name not in taken else f"{name}_new"
