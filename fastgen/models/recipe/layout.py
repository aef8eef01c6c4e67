"""Layouts: how a stored tensor is read into a parameter, as the left side of an einops pattern.

``(num_kv_heads part head_dim) in`` is a matrix whose rows are grouped by KV head, then by part, then by feature. Names
stand for sizes; ``in`` is the input axis, and ``part`` is the axis that several parameters share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from fastgen.models.recipe.spelling import close_to
from fastgen.models.spec import Layout

_AXIS: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_PATTERN: Final = re.compile(rf"(?:{_AXIS}|\({_AXIS}(?: {_AXIS})*\))(?: (?:{_AXIS}|\({_AXIS}(?: {_AXIS})*\)))*")
_GROUP: Final = re.compile(rf"\(([^)]*)\)|({_AXIS})")
_MAX_LENGTH: Final = 200


@dataclass(frozen=True)
class Axes:
    """The axes of a stored tensor; each is one named axis or a group of named axes."""

    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    def of_bias(self) -> Axes:
        """Returns the axes of the bias: these without the input axis."""
        groups = (tuple(name for name in group if name != "in") for group in self.groups)
        return Axes(tuple(group for group in groups if group))

    def fit(
        self, sizes: Mapping[str, int], *, rows: int, part: tuple[int, int] | None = None
    ) -> tuple[Layout, tuple[int, ...]]:
        """Returns the layout of a parameter of ``rows`` with every size known, and the stored shape.

        Raises ``ValueError`` for a name without a size, and if the sizes do not multiply to ``rows``.
        """
        for name in self.names:
            if name not in sizes:
                raise ValueError(f"the layout's axis {name!r} has no size here{close_to(name, sizes)}")
        found = prod(sizes[name] for name in self.names if name not in ("in", "part"))
        found *= 1 if part is None else part[1] - part[0]
        if found != rows:
            kept = [name for name in self.names if name != "in"]
            counts = {name: sizes[name] for name in kept} | ({} if part is None else {"part": part[1] - part[0]})
            product = " * ".join(f"{counts[name]} ({name})" for name in kept)
            raise ValueError(f"the layout makes {product} = {found} rows, but {rows} are needed")
        stored_shape = tuple(prod(sizes[name] for name in group) for group in self.groups)
        return Layout(str(self), tuple((name, sizes[name]) for name in self.names), part), stored_shape

    def __str__(self) -> str:
        return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in self.groups)


def parse_layout(value: object) -> Axes:
    """Parses the layout in the text ``value``. Raises ``ValueError``."""
    if isinstance(value, Axes):
        return value
    text = re.sub(r" +", " ", value.strip()) if isinstance(value, str) and len(value) <= _MAX_LENGTH else ""
    if not _PATTERN.fullmatch(text):
        raise ValueError(
            f"{value!r:.80} is not a layout: it consists of names of axes, with merged axes in brackets, such as "
            "'(num_heads part head_dim) in'"
        )
    axes = Axes(tuple(tuple((several or one).split()) for several, one in _GROUP.findall(text)))
    for name in axes.names:
        if axes.names.count(name) > 1:
            raise ValueError(f"the layout names the axis {name!r} twice")
    if "in" not in axes.names:
        raise ValueError("the layout of a matrix names its input axis, `in`")
    return axes
