"""A model before it is loaded: its files, its recipe, and what the recipe makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fastgen.errors import RecipeError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.checkpoint import Checkpoint, checkpoint_dtype
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry import registry
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from fastgen.options import LoadOptions
from fastgen.runtime.config import parse_dtype


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, the recipe that describes it, and the model spec that the two make."""

    directory: Path
    checkpoint: Checkpoint
    recipe: Recipe
    spec: ModelSpec
    dtype: torch.dtype

    @classmethod
    def open(cls, options: LoadOptions) -> ModelSource:
        """Locates the model of ``options``, opens its checkpoint and resolves its recipe. Reads no weight."""
        directory = hub.locate(options.model, revision=options.revision)
        checkpoint = Checkpoint.open(directory)
        config = checkpoint.config
        recipe = registry.find_recipe(config, recipe=options.recipe, checkpoint_dir=directory)
        try:
            spec = resolve(
                recipe,
                config,
                config_file=str(directory / "config.json"),
                allow_config_keys=options.allow_config_keys,
            )
        except RecipeError as error:
            if options.recipe is None and (note := registry.mismatch_note(recipe, config, directory)):
                raise RecipeError(error.message + note, file=error.file, line=error.line, node=error.node) from error
            raise
        dtype = checkpoint_dtype(config, checkpoint) if options.dtype == "auto" else parse_dtype(options.dtype)
        return cls(directory, checkpoint, recipe, spec, dtype)
