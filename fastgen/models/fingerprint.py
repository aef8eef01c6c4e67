"""The fingerprint of a resolved recipe: two specs with the same fingerprint compute the same."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.models.spec import BranchSpec, Layout, MlpSpec, ModelSpec, NodeRef, PartSpec, RouterSpec, TensorSpec

Fingerprint = bytes


def fingerprint(spec: ModelSpec) -> Fingerprint:
    """Returns a digest of ``spec`` without the names of the recipe and its branches and without node locations.

    Equivalent ways to describe the same computation have the same digest: see :func:`_canonical`.
    """
    pieces: list[object] = []
    left: list[object] = [spec]
    while left:
        value = left.pop()
        if isinstance(value, NodeRef):
            continue
        value = _canonical(value)
        if isinstance(value, tuple):
            pieces.append(len(value))
            left.extend(value)
        elif is_dataclass(value) and not isinstance(value, type):
            pieces.append(type(value).__name__)
            left.extend(getattr(value, name) for name in _names(type(value)))
        else:
            pieces.append(value)
    return hashlib.blake2b(repr(pieces).encode(), digest_size=16).digest()


def _canonical(value: object) -> object:
    """Returns the canonical form of ``value``.

    The norm of a branch's only part becomes the norm of the branch, if that has none. Softmax over all experts, with
    the chosen weights divided by their sum, becomes softmax over the chosen experts. An activation or an axis with
    several names gets one of them.
    """
    match value:
        case BranchSpec(norm=None, parts=(PartSpec() as part,)):
            return replace(value, norm=part.norm, parts=(replace(part, norm=None),))
        case RouterSpec(scoring="softmax", normalize=True, correction=None, num_groups=1):
            return replace(value, scoring="softmax_top_k", normalize=False)
        case RouterSpec(scoring="softmax_top_k", normalize=True):
            return replace(value, normalize=False)
        case MlpSpec(activation=activation) if activation in ACTIVATIONS:
            same = ACTIVATIONS[activation]
            return replace(value, activation=next(name for name, other in ACTIVATIONS.items() if other is same))
        case TensorSpec(layout=Layout() as layout):
            return replace(value, layout=_canonical_layout(layout))
    return value


def _canonical_layout(layout: Layout) -> Layout | None:
    """Returns ``layout`` with axes named by their role, adjacent row axes merged; ``None`` if it changes nothing.

    Axes of size 1 are left out; the tensor's stored shape, which is part of the digest, has them.
    """
    sizes, groups = dict(layout.sizes), list[str]()
    for group in re.findall(r"\(([^)]*)\)|(\w+)", layout.pattern):
        axes: list[tuple[str, int]] = []
        for name in (group[0] or group[1]).split():
            kind = name if name in ("in", "part") else "rows"
            if kind == "rows" and axes and axes[-1][0] == "rows":
                axes[-1] = kind, axes[-1][1] * sizes[name]
            elif kind != "rows" or sizes[name] > 1:
                axes.append((kind, sizes[name]))
        groups.append(" ".join(f"{kind}:{size}" for kind, size in axes))
    plain = [group for group in groups if group]
    if layout.part is None and len(plain) <= 2 and all(" " not in group for group in plain):
        kinds = [group.split(":")[0] for group in plain]
        if kinds in (["rows", "in"], ["rows"]):
            return None
    return replace(layout, pattern=", ".join(groups), sizes=())


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    """Returns the names of the fields that affect what is computed."""
    return tuple(each.name for each in fields(kind) if each.name not in ("recipe", "name", "node", "activation_node"))
