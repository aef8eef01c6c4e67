"""Loads the weights of a checkpoint into their final places, matching tensors and parameters strictly."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from einops import rearrange
from torch import Tensor

from fastgen.compile.weights.rows import Rows, limit_of
from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.checkpoint.checkpoint import FLOAT_DTYPES, Checkpoint, listing
from fastgen.models.checkpoint.kinds import quantized
from fastgen.models.checkpoint.pieces import StoredPiece, stored_piece
from fastgen.models.checkpoint.tensor_files import Read
from fastgen.models.spec import Layout, TensorSpec

_COMPARED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class WeightSlot:
    """The destination of one tensor.

    ``target`` is the final tensor or a view into it, on its device and in its final dtype, or rows of a packed or
    quantized weight.
    """

    spec: TensorSpec
    target: Tensor | Rows

    def __post_init__(self) -> None:
        if tuple(self.target.shape) != self.spec.shape:
            raise ValueError(f"{self.spec.names[0]}: a target of {tuple(self.target.shape)} for {self.spec.shape}")


@torch.no_grad()
def load_weights(
    checkpoint: Checkpoint,
    slots: Sequence[WeightSlot],
    *,
    ignored: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills every slot from the checkpoint, tensor by tensor, and converts to the slot's dtype on the way.

    The match is strict in both directions. Before any weight is read, everything that does not fit is raised as one
    :class:`CheckpointError` that lists the names: slots without a tensor, tensors that no slot claims, wrong shapes and
    dtypes. ``ignored`` holds glob patterns of tensors that may stay unclaimed. If a tensor is present under several of
    its spellings, all copies must be equal. A weight that is not finite, in the file or after conversion, is an error.

    Of a tensor of which a rank holds a piece, only that piece is read.

    ``progress(bytes_done, bytes_total)`` is called after each tensor. Beside the targets, this uses memory for about
    one of the largest tensors.
    """
    filled, compared = (_fills(checkpoint, assigned) for assigned in _match(checkpoint, slots, ignored))
    bytes_total = sum(read.size_bytes for read in (*filled, *compared))
    bytes_done = 0
    for assigned, act in ((filled, _fill), (compared, _compare)):
        with closing(checkpoint.stream(list(assigned))) as tensors:
            for read, source in tensors:
                problem = act(assigned[read], source)
                del source  # the traceback of an error would keep the tensor, and so the file, mapped
                if problem:
                    raise CheckpointError(f"{read.header.file}: tensor {read.name!r} {problem}")
                bytes_done += read.size_bytes
                if progress:
                    progress(bytes_done, bytes_total)


@dataclass(frozen=True)
class _Fill:
    """A slot, and the layout of what is read for it."""

    slot: WeightSlot
    layout: Layout | None

    def views(self, source: Tensor) -> tuple[Tensor | Rows, Tensor]:
        """Returns the slot's target and the part of ``source`` that belongs there, in the same shape."""
        target = self.slot.target
        if self.layout is not None:
            source = arrange(self.layout, source)
        if not isinstance(target, Tensor):
            return target, source.reshape(target.shape)
        return target if self.layout is None else target.view(source.shape), source


def _fills(checkpoint: Checkpoint, assigned: Mapping[str, Sequence[WeightSlot]]) -> dict[Read, list[_Fill]]:
    """Returns what is read of each tensor, and the slots that it is for: once for all slots that take whole tensors, or
    parts of an axis, and once for each slot that takes a piece.
    """
    reads: dict[Read, list[_Fill]] = defaultdict(list)
    for name, slots in assigned.items():
        for slot in slots:
            piece = stored_piece(slot.spec) or StoredPiece(None, slot.spec.layout)
            reads[checkpoint.read(name, piece.ranges)].append(_Fill(slot, piece.layout))
    return reads


def arrange(layout: Layout, stored: Tensor) -> Tensor:
    """Returns a view of a stored tensor with the axes of ``layout`` split: those of the rows in order, then ``in``.

    The axis ``part`` is narrowed to the entries that the layout takes.
    """
    # `in` is a Python keyword, which einops warns about
    pattern = re.sub(r"\bin\b", "inward", layout.pattern)
    sizes = {"inward" if name == "in" else name: size for name, size in layout.sizes}
    axes = re.findall(r"\w+", pattern)
    apart = rearrange(stored, f"{pattern} -> {' '.join(axes)}", **{axis: sizes[axis] for axis in axes})
    if layout.part is not None:
        first, end = layout.part
        apart = apart.narrow(axes.index("part"), first, end - first)
    return apart.movedim(axes.index("inward"), -1) if "inward" in axes else apart


def _fill(fills: Sequence[_Fill], source: Tensor) -> str | None:
    if source.numel():
        # Conversion is monotonic, so checking the two extremes checks all elements, without a full-size temporary.
        extremes = torch.stack(torch.aminmax(source))
        if extremes.isnan().any():
            return f"contains NaN (stored as {source.dtype}); the file is damaged, or training diverged"
        if extremes.isinf().any():
            return f"contains infinity (stored as {source.dtype}); the file is damaged, or training diverged"
        targets = [fill.slot.target for fill in fills]
        limits = (limit_of(extremes, to.dtype) if isinstance(to, Tensor) else to.limit(extremes) for to in targets)
        if limit := next(filter(None, limits), None):
            return f"reaches {extremes.abs().max().item():g} ({source.dtype}), which {limit}"
    for fill in fills:
        target, values = fill.views(source)
        target.copy_(values)
    return None


def _compare(fills: Sequence[_Fill], source: Tensor) -> str | None:
    for fill in fills:
        target, values = fill.views(source)
        if not isinstance(target, Tensor):
            if not target.holds(values):
                return _differs(fill.slot)
            continue
        step = max(1, _COMPARED_ELEMENTS // max(1, math.prod(values.shape[1:])))
        mine, other = target.unsqueeze(-1), values.unsqueeze(-1)  # so that there is an axis to slice
        pieces = (slice(row, row + step) for row in range(0, len(mine), step))
        if not all(torch.equal(mine[piece], other[piece].to(mine)) for piece in pieces):
            return _differs(fill.slot)
    return None


def _differs(slot: WeightSlot) -> str:
    return (
        f"differs from {slot.spec.names[0]!r}, but both are spellings of the same weight "
        f"({slot.spec.node}); fastgen cannot tell which one is right"
    )


def _match(
    checkpoint: Checkpoint, slots: Sequence[WeightSlot], ignored: Sequence[str]
) -> tuple[dict[str, Sequence[WeightSlot]], dict[str, Sequence[WeightSlot]]]:
    """Returns which tensor fills which slots, and which other tensors must equal it.

    Several slots may share a tensor if each takes its own part of it and together they take all of it. Raises one error
    that lists everything that is wrong.
    """
    tensors = checkpoint.tensors
    sharing: dict[tuple[str, ...], list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        sharing[slot.spec.names].append(slot)
    claimed: dict[str, Sequence[WeightSlot]] = {}
    fills: dict[str, Sequence[WeightSlot]] = {}
    unfilled: list[str] = []
    for names, sharers in sharing.items():
        spec = sharers[0].spec
        _check_parts([slot.spec for slot in sharers])
        present = [name for name in names if name in tensors]
        if not present:
            unfilled.append(f"{' or '.join(names)} {list(spec.stored_shape)}, needed by {spec.node}")
            continue
        for name in present:
            if name in claimed:
                raise _claimed_twice(name, claimed[name][0].spec, spec)
            claimed[name] = sharers
        fills[present[0]] = sharers

    def may_stay(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in ignored)

    unclaimed = [name for name in tensors if name not in claimed and not may_stay(name)]
    problems = {
        "parameters of the model have no tensor": unfilled,
        "tensors are neither claimed nor ignored by the recipe": unclaimed,
        "tensors are in a file although the index does not place them there": [
            f"{name} (in {file})" for file, name in checkpoint.unlisted if not may_stay(name)
        ],
        "tensors have a wrong shape": [
            f"{name}: found {list(tensors[name].shape)}, expected {list(spec.stored_shape)}, by {spec.node}"
            for name, spec in ((name, sharers[0].spec) for name, sharers in claimed.items())
            if tensors[name].shape != spec.stored_shape
        ],
        "tensors are stored in a dtype that is not a plain weight's": [
            f"{name}: {tensors[name].dtype} (in {tensors[name].file.name})"
            for name in claimed
            if tensors[name].dtype not in FLOAT_DTYPES
        ],
    }
    if any(problems.values()):
        raise CheckpointError(_misfit(checkpoint, problems, slots, nothing_fits=len(fills) * 10 < len(sharing)))
    return fills, {name: sharers for name, sharers in claimed.items() if name not in fills}


def _check_parts(sharers: Sequence[TensorSpec]) -> None:
    """Checks that the specs of one tensor take disjoint parts of the axis ``part`` of one layout, and all of it."""
    first = sharers[0]
    if first.layout is None or first.layout.part is None:
        if len(sharers) > 1:
            raise _claimed_twice(first.names[0], first, sharers[1])
        return
    taken: dict[int, TensorSpec] = {}
    for spec in sharers:
        layout = spec.layout
        if layout is None or layout.part is None or replace(layout, part=None) != replace(first.layout, part=None):
            raise _claimed_twice(spec.names[0], first, spec)
        for entry in range(*layout.part):
            if entry in taken:
                raise _claimed_twice(spec.names[0], taken[entry], spec)
            taken[entry] = spec
    left = sorted(set(range(dict(first.layout.sizes)["part"])) - taken.keys())
    if left:
        raise first.node.error(
            f"nothing takes entry {left[0]} of the axis `part` of tensor {first.names[0]!r} ({first.layout.pattern})"
        )


def _claimed_twice(name: str, first: TensorSpec, second: TensorSpec) -> RecipeError:
    return second.node.error(f"tensor {name!r} is claimed twice, first by {first.node}")


def _misfit(
    checkpoint: Checkpoint, problems: dict[str, list[str]], slots: Sequence[WeightSlot], *, nothing_fits: bool
) -> str:
    quantization = quantized(checkpoint.config, checkpoint.tensors)
    if nothing_fits and not quantization:
        architectures = checkpoint.config.get("architectures")
        return (
            f"{checkpoint.directory}: the checkpoint does not look like {architectures}, which its config.json names. "
            f"It contains {listing(list(checkpoint.tensors), ', ', 4) or 'no tensors'}; "
            f"the recipe needs {listing([slot.spec.names[0] for slot in slots], ', ', 4)}"
        )
    title = f"{checkpoint.directory}: the checkpoint does not fit the model"
    if quantization:
        title += f". {quantization}"
    return "\n".join(
        [title]
        + [f"- {len(names)} {what}:\n    " + listing(names, "\n    ") for what, names in problems.items() if names]
    )
