"""What published files of an architecture hold beyond what its class of transformers writes today.

The class passes over all of it, so a recipe has to as well. ``published.yaml`` lists it by the class's name, since no
other source of it is at hand; of an architecture that is not listed nothing is assumed.
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
    """``config``: keys and what files say there. ``tensors``: names beside the weights, ``{layer}`` for each layer.
    ``bare``: some files lack the base model's prefix.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    bare: bool = False


def published(class_name: str) -> Published:
    """What files of the class's architecture hold."""
    listed = _listed().get(class_name, {})
    return Published(listed.get("config", {}), tuple(listed.get("tensors", ())), listed.get("bare", False))


@cache
def _listed() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    listed: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return listed
