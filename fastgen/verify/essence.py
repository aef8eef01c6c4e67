"""What a resolved recipe says, apart from where and how it says so: two specs of one essence compute the same."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from fastgen.models.spec import BranchSpec, ModelSpec, NodeRef

Essence = bytes
"""A digest."""


def essence(spec: ModelSpec) -> Essence:
    """A digest of all that ``spec`` holds but the names of the recipe and its branches, and the nodes' places.

    The norm of a branch's only part is the branch's, if that has none.
    """
    pieces: list[object] = []
    left: list[object] = [spec]
    while left:
        value = left.pop()
        if isinstance(value, NodeRef):
            continue
        if isinstance(value, BranchSpec) and value.norm is None and len(value.parts) == 1:
            value = replace(value, norm=value.parts[0].norm, parts=(replace(value.parts[0], norm=None),))
        if isinstance(value, tuple):
            pieces.append(len(value))
            left.extend(value)
        elif is_dataclass(value) and not isinstance(value, type):
            pieces.append(type(value).__name__)
            left.extend(getattr(value, name) for name in _names(type(value)))
        else:
            pieces.append(value)
    return hashlib.blake2b(repr(pieces).encode(), digest_size=16).digest()


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields that say what is computed."""
    return tuple(each.name for each in fields(kind) if each.name not in ("recipe", "name", "node", "activation_node"))
