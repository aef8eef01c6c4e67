"""Models to plan with: a recipe and a ``config.json``, no weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastgen.errors import ModelNotFoundError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from fastgen.runtime.config import parse_dtype

# Configurations as their authors published them; values that say nothing about shapes are left out here and there.
_PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True)
class DescribedModel:
    """A model of which no weights are needed. ``name`` is how it was asked for; ``dtype`` is the one to compute in."""

    name: str
    spec: ModelSpec
    dtype: torch.dtype


@cache
def published_names() -> tuple[str, ...]:
    """Returns the names of the published models whose configurations are here."""
    return tuple(sorted(file.stem for file in _PUBLISHED.glob("*.json")))


def describe(model: str, *, dtype: str = "auto", recipe: str | None = None) -> DescribedModel:
    """Returns the model that ``model`` names: a ``config.json``, a directory with one, a built-in, or one of
    :func:`published_names` in any case. Reads no weights, and nothing from a network.

    :raises ModelNotFoundError: if there is no such thing; the message lists the published names.
    :raises RecipeError: if no recipe describes it.
    """
    file = _config_file(model)
    config = _read(file)
    found = find_recipe(config, recipe=recipe, checkpoint_dir=file.parent)
    spec = resolve(found, config, config_file=str(file))
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return DescribedModel(model, spec, parse_dtype(named if dtype == "auto" else dtype))


def _config_file(model: str) -> Path:
    path = Path(os.path.expanduser(model))
    if model and path.is_dir():
        path /= "config.json"
    if model and path.is_file():
        return path
    if model in BUILTINS:
        return BUILTINS[model] / "config.json"
    if model.lower() in published_names():
        return _PUBLISHED / f"{model.lower()}.json"
    raise ModelNotFoundError(
        f"{model!r:.200} is no config.json, no directory with one, no built-in ({', '.join(BUILTINS)}) and none of the "
        f"published models {', '.join(published_names())}; to plan for another model, download its config.json"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{file}: it cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{file}: it is no configuration of a model, but {type(config).__name__}")
    return config
