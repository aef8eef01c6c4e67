"""Compares one configuration with its reference: numbers, weight map, then node by node to the log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fastgen.errors import FastgenError, RecipeError
from fastgen.models.fingerprint import Fingerprint, fingerprint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import resolve, unread_keys
from fastgen.models.spec import ModelSpec, NodeRef
from fastgen.verify.cases import Case
from fastgen.verify.disagreement import (
    COMPLAINT,
    Comparison,
    Disagreement,
    branch_path,
    common_path,
    node_at,
    parent_path,
)
from fastgen.verify.numbers import number_disagreements, wrong_number
from fastgen.verify.subject import load_subject, trace_subject
from fastgen.verify.walk import node_disagreements
from fastgen.verify.weight_map import weight_disagreements

_CLAIMED_TWICE: Final = re.compile(r"is claimed twice, first by .*: (model\.\S+)$")
_MISSING_NAME: Final = re.compile(r"has no key '(\w+)'")


class Comparer:
    """Compares recipes with cases. Recipes that resolve to the same model in a case are compared once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Fingerprint, str | None], Comparison] = {}
        # Number of models that were loaded and run so far.
        self.num_runs = 0

    def read(self, recipe: Recipe, case: Case) -> Comparison:
        """Compares what needs no run of the model: numbers and the weight map."""
        try:
            spec, _, complaint = _resolved(recipe, case)
        except RecipeError as error:
            return Comparison(disagreement=_refusal(recipe, case, error))
        comparison = Comparison(spec=spec)
        comparison.disagreement = next(_reading(recipe, case, spec, complaint, comparison), None)
        return comparison

    def compare(self, recipe: Recipe, case: Case) -> Comparison:
        """Compares ``recipe`` with the reference of ``case``; stops at the first disagreement."""
        return self._compared(recipe, case, located=True)

    def retry(self, recipe: Recipe, case: Case) -> Comparison:
        """Compares for the outcome only: a disagreement may be located in another recipe that resolves equally."""
        return self._compared(recipe, case, located=False)

    def _compared(self, recipe: Recipe, case: Case, *, located: bool) -> Comparison:
        try:
            spec, allowed, complaint = _resolved(recipe, case)
        except RecipeError as error:
            return Comparison(disagreement=_refusal(recipe, case, error))
        key = id(case), fingerprint(spec), complaint
        known = self._known.get(key)
        if known is not None and (known.disagreement is None or not located):
            return known
        comparison = self._known[key] = Comparison(spec=spec)
        wrong = next(_reading(recipe, case, spec, complaint, comparison), None)
        if wrong is None and not case.headers_only:
            wrong = self._run(recipe, case, spec, allowed, comparison)
        if wrong is None and complaint is not None:
            around = ("ignores", "model", "config")
            wrong = Disagreement("numbers", _own_ignores(recipe), complaint, around, COMPLAINT)
        comparison.disagreement = wrong
        return comparison

    def _run(
        self,
        recipe: Recipe,
        case: Case,
        spec: ModelSpec,
        allowed: list[str],
        comparison: Comparison,
    ) -> Disagreement | None:
        self.num_runs += 1
        try:
            with load_subject(
                case.directory,
                recipe,
                spec,
                allow_config_keys=allowed,
                token_budget=sum(map(len, case.prompts)),
                max_num_seqs=len(case.prompts),
            ) as llm:
                ours = trace_subject(llm, case.prompts)
        except RecipeError as error:
            return _refusal(recipe, case, error)
        except FastgenError as error:
            return Disagreement("load", node_at(recipe, "model"), str(error), ("model",), "load")
        return next(node_disagreements(recipe, case, spec, ours, comparison), None)


def _reading(
    recipe: Recipe, case: Case, spec: ModelSpec, complaint: str | None, comparison: Comparison
) -> Iterator[Disagreement]:
    if complaint is None:
        comparison.agree("numbers", COMPLAINT)
    yield from number_disagreements(recipe, case, spec, comparison)
    yield from weight_disagreements(recipe, case, spec, comparison)


def _own_ignores(recipe: Recipe) -> NodeRef:
    """Returns the node `ignores` in the file of ``recipe``, where keys are added even if the node is inherited."""
    node = node_at(recipe, "ignores")
    return node if node.file == str(recipe.file) else NodeRef("ignores", str(recipe.file), 1)


def _refusal(recipe: Recipe, case: Case, error: RecipeError) -> Disagreement:
    path, message = error.node or "recipe", error.message
    wrong = wrong_number(recipe, case) if path.startswith("config.") else None
    if wrong is not None:
        return wrong
    node = NodeRef(path, error.file or str(recipe.file), error.line or 1)
    region = tuple(dict.fromkeys((path, parent_path(path), branch_path(path))))
    missing = _MISSING_NAME.search(message)
    if missing is not None and path.startswith("model.") and case.filled_in and missing[1] not in case.config:
        # no file has such a key, so a definition is missing
        return Disagreement("numbers", node_at(recipe, f"define.{missing[1]}"), message, region, COMPLAINT)
    first = _CLAIMED_TWICE.search(message)
    if first is not None and branch_path(first[1]) != branch_path(path):  # branches that must exclude each other
        node = node_at(recipe, common_path([first[1], path]))
    if path == "model.layers":
        node = node_at(recipe, "model.layers.residual")  # which lists the parts of a layer
    return Disagreement("numbers", node, message, region, COMPLAINT)


def _resolved(recipe: Recipe, case: Case) -> tuple[ModelSpec, list[str], str | None]:
    """Returns the spec; if only unaccounted keys prevent resolving, also these keys and the complaint about them.

    Running the model without these keys shows better than their names which node should use them.
    """
    try:
        return resolve(recipe, case.config), [], None
    except RecipeError as error:
        allowed = unread_keys(recipe, case.config)
        try:
            return resolve(recipe, case.config, allow_config_keys=allowed), allowed, error.message
        except RecipeError as other:
            raise (other if other.node else error) from None
