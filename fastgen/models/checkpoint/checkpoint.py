"""A checkpoint directory, and the way of its weights from the files to their final place."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fastgen.compile.weights.rows import Rows
from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.checkpoint.files import WEIGHT_FILES, is_index, read_index, read_json_object, weights_entry
from fastgen.models.checkpoint.tensor_files import TensorHeader, read_headers, stream_tensors
from fastgen.models.spec import Layout, TensorSpec

# How many names an error lists of each kind.
_LISTED = 20

# Below this, opening a file anew costs more than the memory it saves.
_MIN_WINDOW_BYTES = 8 << 20

_COMPARED_ELEMENTS = 1 << 20
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTISED = (
    *("*.qweight", "*.qzeros", "*.g_idx"),  # GPTQ, AWQ
    *("*.SCB", "*.absmax", "*.quant_map", "*.quant_state.*"),  # bitsandbytes
    *("*.weight_scale", "*.weight_scale_inv", "*.weight_packed", "*_scales", "*_blocks"),  # fp8, int4, mxfp4
)


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory, opened: its ``config.json`` and the headers of its tensors. No file stays open.

    ``tensors`` maps every name to its header. ``unlisted`` are tensors that stand in a shard although the index does
    not place them there, as (file name, tensor name).
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    unlisted: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Reads ``config.json``, the index where there is one, and the headers of all weight files.

        Raises :class:`CheckpointError` for a file that is missing, damaged or contradicts the index.
        """
        directory = Path(directory)
        config = read_json_object(directory / "config.json")
        entry = weights_entry({file.name for file in directory.iterdir() if file.is_file() or file.is_symlink()})
        if entry is None:
            raise CheckpointError(_no_weights(directory))
        if not (directory / entry).exists():
            target = (directory / entry).readlink()
            raise CheckpointError(f"{directory / entry}: is a link to {target}, which is not there; fetch it again")
        if not is_index(entry):
            return cls(directory, config, read_headers(directory / entry))
        return cls(directory, config, *_read_shards(directory, entry))

    def stream(self, names: Sequence[str]) -> Generator[tuple[str, Tensor]]:
        """The named tensors, file by file, each as in its file and valid until the next is asked for.

        What is resident of the files is at most the largest of these tensors (or 8 MiB).
        """
        by_file: dict[Path, dict[str, TensorHeader]] = defaultdict(dict)
        for name in names:
            by_file[self.tensors[name].file][name] = self.tensors[name]
        window_bytes = max([self.tensors[name].size_bytes for name in names] + [_MIN_WINDOW_BYTES])
        for file, headers in by_file.items():
            yield from stream_tensors(file, headers, window_bytes=window_bytes)


def _no_weights(directory: Path) -> str:
    patterns = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack")
    others = sorted(file.name for pattern in patterns for file in directory.glob(pattern))
    message = f"{directory}: holds no weights under the names that are read ({', '.join(WEIGHT_FILES)})"
    if not others:
        return message
    return f"{message}; what is there stays unread, as nothing says that it is this model: {_listing(others, ', ')}"


def _read_shards(directory: Path, index_name: str) -> tuple[dict[str, TensorHeader], tuple[tuple[str, str], ...]]:
    shard_of = read_index(directory / index_name)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of the {len(shards)} files that {index_name} names are missing: "
            f"{_listing(missing, ', ')}; fetch the checkpoint again"
        )
    headers = {shard: read_headers(directory / shard) for shard in shards}
    absent = [f"{name} (in {shard})" for name, shard in shard_of.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(
            f"{directory / index_name}: {len(absent)} tensors are not in the files it names: {_listing(absent, ', ')}"
        )
    unlisted = tuple((shard, name) for shard in shards for name in headers[shard] if shard_of.get(name) != shard)
    return {name: headers[shard][name] for name, shard in shard_of.items()}, unlisted


def checkpoint_dtype(config: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    """The dtype the checkpoint is meant to run in: as its config says, else as most bytes of its weights are stored."""
    named = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if named is None:
        size_bytes: Counter[torch.dtype] = Counter()
        for header in checkpoint.tensors.values():
            if header.dtype in _FLOAT_DTYPES:
                size_bytes[header.dtype] += header.size_bytes
        if not size_bytes:
            raise CheckpointError(f"{checkpoint.directory}: holds no floating-point weights")
        named = str(size_bytes.most_common(1)[0][0])
    dtype = _COMPUTE_DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"{checkpoint.directory}: its dtype is {named!r}; ask for one of {', '.join(_COMPUTE_DTYPES)} with dtype="
        )
    return dtype


@dataclass(frozen=True)
class WeightSlot:
    """Where one tensor goes: ``target`` is the final tensor or a view into it, on its device, in its final dtype, or
    rows of a packed or quantised weight.
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
    """Fills every slot from the checkpoint, tensor by tensor, converting to the slot's dtype on the way.

    Strict in both directions: before any weight is read, all that does not fit is raised as one
    :class:`CheckpointError` listing the names: slots nobody fills, tensors nobody claimed (``ignored`` are glob
    patterns of those that may stay unclaimed), shapes and dtypes. Where a slot's tensor is present under several of
    its spellings, they must be equal. A weight that is not finite, in the file or after conversion, is an error.

    ``progress(bytes_done, bytes_total)`` is called after each tensor. Beyond the targets, memory for about one of the
    largest tensors is used.
    """
    fills, copies = _match(checkpoint, slots, ignored)
    bytes_total = sum(checkpoint.tensors[name].size_bytes for name in (*fills, *copies))
    bytes_done = 0
    for assigned, act in ((fills, _fill), (copies, _compare)):
        with closing(checkpoint.stream(list(assigned))) as tensors:
            for name, source in tensors:
                problem = act(assigned[name], source)
                del source  # an error's traceback would keep it, and with it the file, mapped
                if problem:
                    raise CheckpointError(f"{checkpoint.tensors[name].file}: tensor {name!r} {problem}")
                bytes_done += checkpoint.tensors[name].size_bytes
                if progress:
                    progress(bytes_done, bytes_total)


def arrange(layout: Layout, stored: Tensor) -> Tensor:
    """A view of a stored tensor with the axes of ``layout`` apart: the rows' in the order they stand in, ``in`` last.

    Of the axis ``part`` only what the layout takes.
    """
    # `in` is a word of Python, which einops warns about
    pattern = re.sub(r"\bin\b", "inward", layout.pattern)
    sizes = {"inward" if name == "in" else name: size for name, size in layout.sizes}
    axes = re.findall(r"\w+", pattern)
    apart = rearrange(stored, f"{pattern} -> {' '.join(axes)}", **{axis: sizes[axis] for axis in axes})
    if layout.part is not None:
        first, end = layout.part
        apart = apart.narrow(axes.index("part"), first, end - first)
    return apart.movedim(axes.index("inward"), -1) if "inward" in axes else apart


def _views(slot: WeightSlot, source: Tensor) -> tuple[Tensor | Rows, Tensor]:
    """The slot's target and what of ``source`` belongs there, in one shape."""
    layout = slot.spec.layout
    if layout is not None:
        source = arrange(layout, source)
    if not isinstance(slot.target, Tensor):
        return slot.target, source.reshape(slot.target.shape)
    return slot.target if layout is None else slot.target.view(source.shape), source


def _fill(slots: Sequence[WeightSlot], source: Tensor) -> str | None:
    if source.numel():
        dtype = slots[0].target.dtype
        # Conversion keeps order, so the two extremes tell for all elements, without a temporary of the tensor's size.
        extremes = torch.stack(torch.aminmax(source))
        if extremes.isnan().any():
            return f"holds NaN (stored as {source.dtype}); the file is damaged, or training had diverged"
        if extremes.isinf().any():
            return f"holds infinity (stored as {source.dtype}); the file is damaged, or training had diverged"
        if not extremes.to(dtype).isfinite().all():
            return (
                f"reaches {extremes.abs().max().item():g} ({source.dtype}), which {dtype} cannot hold; "
                f"load with dtype='float32' or 'bfloat16'"
            )
    for slot in slots:
        target, values = _views(slot, source)
        target.copy_(values)
    return None


def _compare(slots: Sequence[WeightSlot], source: Tensor) -> str | None:
    for slot in slots:
        target, values = _views(slot, source)
        if not isinstance(target, Tensor):
            if not target.holds(values):
                return _differs(slot)
            continue
        step = max(1, _COMPARED_ELEMENTS // max(1, math.prod(values.shape[1:])))
        mine, other = target.unsqueeze(-1), values.unsqueeze(-1)  # at least one axis to cut along
        pieces = (slice(row, row + step) for row in range(0, len(mine), step))
        if not all(torch.equal(mine[piece], other[piece].to(mine)) for piece in pieces):
            return _differs(slot)
    return None


def _differs(slot: WeightSlot) -> str:
    return (
        f"differs from {slot.spec.names[0]!r}, and both stand for the same weight "
        f"({slot.spec.node}); fastgen cannot tell which one is meant"
    )


def _match(
    checkpoint: Checkpoint, slots: Sequence[WeightSlot], ignored: Sequence[str]
) -> tuple[dict[str, Sequence[WeightSlot]], dict[str, Sequence[WeightSlot]]]:
    """Which tensor fills which slots, and which others must equal it. Raises one error with everything that is wrong.

    Several slots may share a tensor if each takes a part of its own, and they all of it together.
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
            unfilled.append(f"{' or '.join(names)} {list(spec.stored_shape)}, asked for by {spec.node}")
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
        "tensors are claimed by no recipe node, and ignored by none": unclaimed,
        "tensors stand in a file although the index does not place them there": [
            f"{name} (in {file})" for file, name in checkpoint.unlisted if not may_stay(name)
        ],
        "tensors have another shape": [
            f"{name}: found {list(tensors[name].shape)}, expected {list(spec.stored_shape)}, by {spec.node}"
            for name, spec in ((name, sharers[0].spec) for name, sharers in claimed.items())
            if tensors[name].shape != spec.stored_shape
        ],
        "tensors are stored in a dtype that holds no plain weights": [
            f"{name}: {tensors[name].dtype} (in {tensors[name].file.name})"
            for name in claimed
            if tensors[name].dtype not in _FLOAT_DTYPES
        ],
    }
    if any(problems.values()):
        raise CheckpointError(_misfit(checkpoint, problems, slots, nothing_fits=len(fills) * 10 < len(sharing)))
    return fills, {name: sharers for name, sharers in claimed.items() if name not in fills}


def _check_parts(sharers: Sequence[TensorSpec]) -> None:
    """Specs of one tensor take disjoint parts of one layout's axis ``part``, and together all of it."""
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
        node = first.node
        raise RecipeError(
            f"of tensor {first.names[0]!r} nothing takes entry {left[0]} of its axis `part` ({first.layout.pattern})",
            file=node.file,
            line=node.line,
            node=node.path,
        )


def _claimed_twice(name: str, first: TensorSpec, second: TensorSpec) -> RecipeError:
    node = second.node
    return RecipeError(
        f"tensor {name!r} is claimed twice, the first time by {first.node}",
        file=node.file,
        line=node.line,
        node=node.path,
    )


def _misfit(
    checkpoint: Checkpoint, problems: dict[str, list[str]], slots: Sequence[WeightSlot], *, nothing_fits: bool
) -> str:
    quantisation = _quantisation(checkpoint)
    if nothing_fits and not quantisation:
        architectures = checkpoint.config.get("architectures")
        return (
            f"{checkpoint.directory}: the checkpoint does not look like {architectures}, which its config.json names. "
            f"It holds {_listing(list(checkpoint.tensors), ', ', 4) or 'no tensors'}; "
            f"the recipe asks for {_listing([slot.spec.names[0] for slot in slots], ', ', 4)}"
        )
    title = f"{checkpoint.directory}: the checkpoint does not fit the model"
    if quantisation:
        title += f". It is quantised ({quantisation}), and fastgen reads plain weights; take the unquantised one"
    return "\n".join(
        [title]
        + [f"- {len(names)} {what}:\n    " + _listing(names, "\n    ") for what, names in problems.items() if names]
    )


def _quantisation(checkpoint: Checkpoint) -> str | None:
    config = checkpoint.config.get("quantization_config")
    if isinstance(config, dict):
        return str(config.get("quant_method", "quantization_config"))
    return next((name for name in checkpoint.tensors for glob in _QUANTISED if fnmatchcase(name, glob)), None)


def _listing(names: Sequence[str], separator: str, limit: int = _LISTED) -> str:
    more = [f"... and {len(names) - limit} more"] if len(names) > limit else []
    return separator.join([*names[:limit], *more])
