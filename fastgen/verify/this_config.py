"""The checkpoint at hand: its own configuration, shrunk where it is large, and its own names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from fastgen.errors import FastgenError
from fastgen.models.checkpoint.files import read_json_object
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import stated_architectures
from fastgen.verify.cases import Case, Looks, class_config, make_case, model_classes, quiet, stated_numbers
from fastgen.verify.reference import ModuleReference, Trace
from fastgen.verify.shrink import differences, shrunk


class ThisConfig:
    """The two cases of a checkpoint, for an architecture that transformers knows.

    The first has the checkpoint's configuration, shrunk where it is large, and random weights. It states the keys that
    the checkpoint states, so no default of the architecture matters that the checkpoint does not use. The second is the
    checkpoint itself, of which only numbers, names and shapes are compared: its weights are not read.
    """

    num_configs = 2

    def __init__(self, directory: Path, scratch: Path, *, seed: int, model_class: Any = None):
        self.directory, self.scratch, self.seed, self.model_class = directory, scratch, seed, model_class
        self.config = read_json_object(directory / "config.json")
        # By key: the number in config.json, and the smaller one that is run.
        self.shrunk: dict[str, tuple[Any, Any]] = {}
        self._cases: list[Case] = []

    def of(self, recipe: Recipe) -> Iterator[Case]:
        """Yields the cases. Raises :class:`FastgenError` if transformers does not know the model or refuses it."""
        if not self._cases:
            self._cases = list(self._made(recipe))
        yield from self._cases

    def _made(self, recipe: Recipe) -> Iterator[Case]:
        cls = self.model_class or self._class(recipe)
        try:
            with quiet():
                whole = class_config(cls, self.config)
                smaller = shrunk(self.config, whole.to_dict())
                self.shrunk = differences(self.config, smaller)
                yield make_case(cls, smaller, 0, self.seed, self.scratch / "shrunk", Looks())
        except FastgenError:
            raise
        except Exception as error:  # transformers refuses configurations, each in its own way
            raise FastgenError(
                f"transformers cannot make a model of {self.directory / 'config.json'}, shrunk to "
                f"{', '.join(f'{key}={new}' for key, (_, new) in self.shrunk.items()) or 'nothing smaller'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        numbers = stated_numbers(whole, nn.Module())
        nothing = ModuleReference(nn.Module())
        yield Case(1, self.directory, self.config, nothing, (), Trace(), numbers, headers_only=True)

    def _class(self, recipe: Recipe) -> Any:
        """Returns the class that the checkpoint names, else one of those that the recipe is for."""
        import transformers

        named = (getattr(transformers, name, None) for name in stated_architectures(self.config))
        known = next((cls for cls in named if getattr(cls, "config_class", None) is not None), None)
        return known or model_classes(recipe)[0]
