"""What a resolved recipe says, apart from where and how it says so: two specs of one essence compute the same."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.models.spec import BranchSpec, Layout, MlpSpec, ModelSpec, NodeRef, PartSpec, RouterSpec, TensorSpec

# A digest.
Essence = bytes


def essence(spec: ModelSpec) -> Essence:
    """A digest of all that ``spec`` holds but the names of the recipe and its branches, and the nodes' places.

    What can be said in two ways counts as said in one: see :func:`_usual`.
    """
    pieces: list[object] = []
    left: list[object] = [spec]
    while left:
        value = left.pop()
        if isinstance(value, NodeRef):
            continue
        value = _usual(value)
        if isinstance(value, tuple):
            pieces.append(len(value))
            left.extend(value)
        elif is_dataclass(value) and not isinstance(value, type):
            pieces.append(type(value).__name__)
            left.extend(getattr(value, name) for name in _names(type(value)))
        else:
            pieces.append(value)
    return hashlib.blake2b(repr(pieces).encode(), digest_size=16).digest()


def _usual(value: object) -> object:
    """``value`` as it is said of what computes the same.

    The norm of a branch's only part is the branch's, if that has none. Softmax over all, of which the chosen are
    divided by their sum, is softmax over the chosen. Activations have several names, and so have a layout's axes.
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
            return replace(value, layout=_usual_layout(layout))
    return value


def _usual_layout(layout: Layout) -> Layout | None:
    """``layout`` with axes named by what becomes of them, neighbours that stay so as one; ``None`` if it says nothing.

    Axes of one entry are left out, so those of several stored axes are told apart by the tensor's stored shape.
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
    """The fields that say what is computed."""
    return tuple(each.name for each in fields(kind) if each.name not in ("recipe", "name", "node", "activation_node"))
