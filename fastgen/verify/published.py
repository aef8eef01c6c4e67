"""Keys and tensors in published files of an architecture that its transformers class no longer writes.

The class ignores them, so a recipe has to ignore them too. ``published.yaml`` lists them by the name of the class; for
an architecture that is not listed nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Published:
    """The additions of published files of one architecture.

    ``config`` maps extra keys to their values. ``tensors`` names extra tensors, with ``{layer}`` for each layer.
    ``bare`` means that some files lack the prefix of the base model.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    bare: bool = False


def published(class_name: str) -> Published:
    """Returns the additions of published files of the class's architecture."""
    listed = _listed().get(class_name, {})
    return Published(listed.get("config", {}), tuple(listed.get("tensors", ())), listed.get("bare", False))


@cache
def _listed() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    listed: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return listed
