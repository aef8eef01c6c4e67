"""The models that ship inside the package: name -> checkpoint directory under ``builtin/``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_ROOT = Path(__file__).parents[1] / "builtin"

BUILTINS: Mapping[str, Path] = MappingProxyType(
    {config.parent.name: config.parent for config in sorted(_ROOT.glob("*/config.json"))}
)
