"""What became of a mutant that verify did not reject: no mistake at all, beyond any reference, or missed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fastgen.models.recipe import Recipe
from fastgen.models.resolve import mentioned_paths
from fastgen.verify.cases import Cases
from fastgen.verify.compare import Comparer
from fastgen.verify.essence import Essence, essence
from tests.verify.family import Family, resolved

MAX_WITNESSES = 6


class Survivors:
    """Holds mutants of one recipe against the family of its configurations."""

    def __init__(self, recipe: Recipe, cases: Cases, comparer: Comparer):
        self.recipe, self.cases, self.comparer = recipe, cases, comparer
        self.model_class = cases.classes(recipe)[0]
        self.family = Family(recipe, self.model_class).configs()
        self.essences = [_essence(recipe, config) for config in self.family]

    def fate(self, mutant: Recipe) -> tuple[str, str]:
        """``equivalent``, ``apart`` or ``missed``, and why."""
        pairs = zip(self.family, self.essences, strict=True)
        differing = [(config, old, new) for config, old in pairs if (new := _essence(mutant, config)) != old]
        ignored, before = (set(each.schema.ignores.tensors) for each in (mutant, self.recipe))
        if not differing and ignored < before:
            return "apart", f"refuses files with {', '.join(before - ignored)}, of which the reference writes none"
        if not differing and ignored == before:
            return "equivalent", f"the same model for all of {len(self.family)} configurations"
        answered = [(config, old) for config, old, new in differing if new is not None]
        if not answered:
            return "apart", f"refuses {len(differing)} of {len(self.family)} configurations, else the same model"
        num_run = 0
        for config, old in random.Random(0).sample(answered, len(answered)):
            case = self.cases.case(self.model_class, config, 1)
            if isinstance(case, Exception):
                continue
            num_run += 1
            if old is not None and self.comparer.retry(self.recipe, case).disagreement is not None:
                continue  # the reference reads the file in another way than the recipe it was made from
            if self.comparer.retry(mutant, case).disagreement is not None:
                return "missed", f"wrong for {self._stated(config)}"
            if num_run == MAX_WITNESSES:
                break
        if not num_run:
            return "apart", f"the reference refuses all of the {len(answered)} configurations in which it differs"
        return "missed", f"differs in {len(answered)} configurations, none of {num_run} run shows it"

    def _stated(self, config: dict[str, Any]) -> str:
        """What of ``config`` the recipe asks for and the class does not say by itself."""
        defaults = self.model_class.config_class().to_dict()
        asked = {path[0] for path in mentioned_paths(self.recipe)}
        stated = [f"{key}: {value}" for key, value in config.items() if key in asked and defaults.get(key) != value]
        return ", ".join(stated)


def _essence(recipe: Recipe, config: dict[str, Any]) -> Essence | None:
    spec = resolved(recipe, config)
    return None if spec is None else essence(replace(spec, ignored_tensors=()))
