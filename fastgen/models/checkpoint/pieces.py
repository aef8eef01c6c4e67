"""Finds a rank's piece of a parameter in the stored tensor, so that only the piece is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from fastgen.models.checkpoint.tensor_files import Ranges
from fastgen.models.spec import Layout, TensorSpec


@dataclass(frozen=True)
class StoredPiece:
    """The ``ranges`` of each stored axis that a parameter's piece takes, or all if ``None``; and the ``layout`` of
    what they make, end to end.
    """

    ranges: tuple[Ranges, ...] | None
    layout: Layout | None


class _Range(NamedTuple):
    """Indices ``first`` to ``end`` of an axis of ``size``."""

    size: int
    first: int
    end: int


def stored_piece(spec: TensorSpec) -> StoredPiece | None:
    """Returns where the piece of ``spec`` is stored; ``None`` if it has none.

    A piece consists of whole heads, or of neighbouring features of all of its heads. So on each axis of the layout it
    takes neighbouring indices.
    """
    if spec.piece is None:
        return None
    if spec.layout is None:
        return StoredPiece(tuple((ends,) for ends in spec.piece), None)
    rows, *columns = spec.piece
    axes = _axis_ranges(spec.layout, rows, columns[0] if columns else None)
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", spec.layout.pattern)]
    ranges = tuple(_merged([axes[name] for name in group]) for group in groups)
    sizes = tuple((name, each.end - each.first) for name, each in axes.items())
    return StoredPiece(ranges, replace(spec.layout, sizes=sizes, part=None))


def _axis_ranges(layout: Layout, rows: tuple[int, int], columns: tuple[int, int] | None) -> dict[str, _Range]:
    """Returns the indices of each axis of ``layout`` that the piece takes."""
    ranges: dict[str, _Range] = {}
    axes = [name for name, _ in layout.sizes if name != "in"]
    taken = {name: (0, size) for name, size in layout.sizes}
    if layout.part is not None:
        taken["part"] = layout.part
    counts = [taken[name][1] - taken[name][0] for name in axes]
    first, end = rows
    for place, (name, (start, _)) in enumerate((name, taken[name]) for name in axes):
        inner = prod(counts[place + 1 :])
        low, high = first // inner, -(-end // inner)
        assert high - low == 1 or first % inner == end % inner == 0, f"{rows} of {layout} are no neighbours"
        ranges[name] = _Range(dict(layout.sizes)[name], start + low, start + high)
        # Several entries of an axis are taken with all that is inside; inside a single one the search continues.
        first, end = (first - low * inner, end - low * inner) if high - low == 1 else (0, inner)
    if columns is not None:
        ranges["in"] = _Range(dict(layout.sizes)["in"], *columns)
    return ranges


def _merged(axes: Sequence[_Range]) -> Ranges:
    """Returns the indices that the ranges take of one stored axis, into which ``axes`` are merged, the last varying
    fastest.
    """
    found = [(0, 1)]
    for axis in axes:
        if axis.end - axis.first == axis.size:
            found = [(first * axis.size, end * axis.size) for first, end in found]
        else:
            found = [
                (index * axis.size + axis.first, index * axis.size + axis.end)
                for first, end in found
                for index in range(first, end)
            ]
    return tuple(found)
