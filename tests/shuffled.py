"""The shipped recipes with their names shuffled among them: same content, other names.

The names of recipes, architectures and ``model_type``s are each permuted, so that code that looks one of them up by
name gets another one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from fastgen.models.recipe import search_path
from fastgen.models.spec import ModelSpec

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
_ARCHITECTURES = re.compile(r"^architectures: \[(.*)\]$", re.M)
_NAME = re.compile(r"^(name|extends): (\S+)$", re.M)


def shipped_texts() -> dict[str, str]:
    return {file.stem: file.read_text("utf-8") for file in sorted(RECIPES.glob("*.yaml"))}


def shipped_architectures() -> list[str]:
    found = [_ARCHITECTURES.search(text) for text in shipped_texts().values()]
    return [name.strip() for match in found if match for name in match[1].split(",")]


def model_types() -> list[str]:
    """Returns the ``model_type`` of every shipped architecture that transformers knows."""
    classes = [getattr(transformers, name, None) for name in shipped_architectures()]
    return sorted({cls.config_class.model_type for cls in classes if cls is not None})


def turned(names: Iterable[str], rng: random.Random) -> dict[str, str]:
    """Returns a new name for each name; none keeps its own."""
    names = sorted(names)
    rng.shuffle(names)
    return dict(zip(names, names[1:] + names[:1], strict=True))


@dataclass(frozen=True)
class Shuffled:
    """The shipped recipes in ``directory`` under other names; each mapping goes from an old name to the new one."""

    directory: Path
    recipes: Mapping[str, str]
    architectures: Mapping[str, str]
    model_types: Mapping[str, str]

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``config`` as it would be written under the new names."""
        changed = dict(config)
        if "architectures" in config:
            changed["architectures"] = [self.architectures.get(name, name) for name in config["architectures"]]
        if "model_type" in config:
            changed["model_type"] = self.model_types.get(config["model_type"], config["model_type"])
        return changed

    def rename_checkpoint(self, directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(self.config(json.loads(file.read_text()))))

    def with_old_names(self, spec: ModelSpec) -> str:
        """Returns ``spec`` with the old names restored."""
        text = without_names(spec)
        old = {new: name for name, new in self.recipes.items()}
        found = re.escape(f"{self.directory}/") + r"([\w.-]+)\.yaml"
        return re.sub(found, lambda match: f"{RECIPES}/{old[match[1]]}.yaml", text)


def without_names(spec: ModelSpec) -> str:
    """Returns ``spec`` with locations but without the names of recipe and architecture."""
    return repr(replace(spec, recipe="", architecture=""))


def shuffle(directory: Path, seed: int) -> Shuffled:
    """Writes the shipped recipes into ``directory`` with their names permuted by ``seed``."""
    rng = random.Random(seed)
    texts = shipped_texts()
    shuffled = Shuffled(
        directory,
        turned(texts, rng),
        turned(shipped_architectures(), rng),
        turned(model_types(), rng),
    )
    for name, text in texts.items():
        text = _NAME.sub(lambda match: f"{match[1]}: {shuffled.recipes[match[2]]}", text)
        text = _ARCHITECTURES.sub(lambda match: f"architectures: [{_renamed(match[1], shuffled.architectures)}]", text)
        (directory / f"{shuffled.recipes[name]}.yaml").write_text(text, "utf-8")
    return shuffled


def _renamed(listed: str, names: Mapping[str, str]) -> str:
    return ", ".join(names[name.strip()] for name in listed.split(","))


def ship(shuffled: Shuffled, patch: pytest.MonkeyPatch) -> None:
    """Makes ``shuffled`` the built-in recipes, and the only ones."""
    patch.setattr(search_path, "_built_in_directory", lambda: shuffled.directory)
    patch.setattr(search_path, "_entry_point_directories", lambda: iter(()))
    patch.delenv(search_path.ENVIRONMENT_VARIABLE, raising=False)
