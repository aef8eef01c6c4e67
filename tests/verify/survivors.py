"""Judges a mutant that verify did not reject: equivalent, not decidable by a reference, or missed.

It is compared over a family of configurations, and strictly: refusing a configuration that the reference reads is as
wrong as another answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from fastgen.models.fingerprint import Fingerprint, fingerprint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import mentioned_paths
from fastgen.verify.cases import Cases
from fastgen.verify.compare import Comparer
from tests.verify.family import Family, resolved

# Most configurations that are run to find one that shows the mistake, if both recipes make a model.
MAX_WITNESSES = 12


@dataclass(frozen=True)
class _Differing:
    """A configuration for which recipe and mutant make different models; ``None`` means no model."""

    config: dict[str, Any]
    old: Fingerprint | None
    new: Fingerprint | None


class Survivors:
    """Compares mutants of one recipe with it over a family of configurations."""

    def __init__(self, recipe: Recipe, cases: Cases, comparer: Comparer):
        self.recipe, self.cases, self.comparer = recipe, cases, comparer
        self.model_class = cases.classes(recipe)[0]
        self.family = Family(recipe, self.model_class).configs()
        self.fingerprints = [_fingerprint(recipe, config) for config in self.family]

    def fate(self, mutant: Recipe) -> tuple[str, str]:
        """Returns ``equivalent``, ``apart`` or ``missed``, and why.

        Equivalent: the same model for every configuration. Apart: the reference refuses every configuration in which
        they differ, or agrees with the mutant in those that only the mutant reads. All else is missed.
        """
        pairs = zip(self.family, self.fingerprints, strict=True)
        differing = [
            _Differing(config, old, new) for config, old in pairs if (new := _fingerprint(mutant, config)) != old
        ]
        lost = sorted(set(self.recipe.schema.ignores.tensors) - set(mutant.schema.ignores.tensors))
        if lost:
            return "missed", f"refuses files with {', '.join(lost)}, which the reference passes over"
        if not differing:
            return "equivalent", f"the same model for all of {len(self.family)} configurations"
        both = [each for each in differing if each.old is not None and each.new is not None]
        refused = [each for each in differing if each.new is None]
        added = [each for each in differing if each.old is None]
        num_read = 0
        for each in (*refused, *random.Random(0).sample(both, len(both)), *added):
            wrong = self._wrong(mutant, each)
            if wrong:
                does = "refuses" if each.new is None else "wrong for"
                return "missed", f"{does} {self._stated(each.config)}"
            num_read += wrong is not None
            if num_read == MAX_WITNESSES and both:
                break
        if num_read and both:
            return "missed", f"differs in {len(both)} configurations, none of {num_read} run shows it"
        if num_read:
            return "apart", f"reads {len(added)} configurations more, {num_read} of them as the reference does"
        return "apart", f"the reference refuses all of the {len(differing)} configurations in which it differs"

    def _wrong(self, mutant: Recipe, each: _Differing) -> bool | None:
        """Returns whether the reference contradicts the mutant; ``None`` if it refuses, or contradicts the
        recipe too.
        """
        case = self.cases.case(self.model_class, each.config, 1)
        if isinstance(case, Exception):
            return None
        if each.old is not None and self.comparer.retry(self.recipe, case).disagreement is not None:
            return None
        return self.comparer.retry(mutant, case).disagreement is not None

    def _stated(self, config: dict[str, Any]) -> str:
        """Returns the keys of ``config`` that the recipe reads or ignores and the class does not fill in."""
        defaults = self.model_class.config_class().to_dict()
        asked = {path[0] for path in mentioned_paths(self.recipe)} | set(self.recipe.schema.ignores.config)
        stated = [f"{key}: {value}" for key, value in config.items() if key in asked and defaults.get(key) != value]
        return ", ".join(stated)


def _fingerprint(recipe: Recipe, config: dict[str, Any]) -> Fingerprint | None:
    spec = resolved(recipe, config)
    return None if spec is None else fingerprint(replace(spec, ignored_tensors=()))
