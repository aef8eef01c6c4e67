"""A checkpoint directory: its configuration and the headers of its tensors."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.files import WEIGHT_FILES, is_index, read_index, read_json_object, weights_entry
from fastgen.models.checkpoint.kinds import other_format
from fastgen.models.checkpoint.tensor_files import Ranges, Read, TensorHeader, read_headers, stream_tensors

# Most names that an error lists of each kind.
_LISTED = 20

# Smallest window in bytes: below it, opening a file again costs more than the memory it saves.
_MIN_WINDOW_BYTES = 8 << 20

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """An opened model directory: its ``config.json`` and the headers of its tensors. No file stays open.

    ``tensors`` maps every name to its header. ``unlisted`` holds the tensors that are in a shard although the index
    does not place them there, as (file name, tensor name).
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    unlisted: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Reads ``config.json``, the index if there is one, and the headers of all weight files.

        Raises :class:`CheckpointError` for a file that is missing, damaged or contradicts the index.
        """
        directory = Path(directory)
        config = read_json_object(directory / "config.json")
        entry = weights_entry({file.name for file in directory.iterdir() if file.is_file() or file.is_symlink()})
        if entry is None:
            raise CheckpointError(_no_weights(directory))
        if not (directory / entry).exists():
            target = (directory / entry).readlink()
            raise CheckpointError(
                f"{directory / entry}: is a link to {target}, which does not exist; download it again"
            )
        if not is_index(entry):
            return cls(directory, config, read_headers(directory / entry))
        return cls(directory, config, *_read_shards(directory, entry))

    def read(self, name: str, ranges: tuple[Ranges, ...] | None = None) -> Read:
        """Returns what :meth:`stream` is asked for: a tensor, or the ``ranges`` of each of its axes."""
        return Read(name, self.tensors[name], ranges)

    def stream(self, reads: Sequence[Read]) -> Generator[tuple[Read, Tensor]]:
        """Yields what ``reads`` ask for, each as it is stored and valid until the next one is requested. Files come by
        their names, so that ranks, each of which reads its own pieces, come to a tensor in one order.

        At most the size of the largest of these tensors (or 8 MiB) is resident at a time.
        """
        by_file: dict[Path, list[Read]] = defaultdict(list)
        for read in reads:
            by_file[read.header.file].append(read)
        window_bytes = max([read.size_bytes for read in reads] + [_MIN_WINDOW_BYTES])
        for file in sorted(by_file):
            yield from stream_tensors(file, by_file[file], window_bytes=window_bytes)


def _no_weights(directory: Path) -> str:
    names = sorted(file.name for file in directory.iterdir())
    patterns = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack")
    others = [name for pattern in patterns for name in fnmatch.filter(names, pattern)]
    message = f"{directory}: contains none of the weight files that fastgen reads ({', '.join(WEIGHT_FILES)})"
    if (found := other_format(names, directory)) is not None:
        return f"{message}; {found}"
    if not others:
        return message
    return f"{message}; files under other names are not read: {listing(others, ', ')}"


def _read_shards(directory: Path, index_name: str) -> tuple[dict[str, TensorHeader], tuple[tuple[str, str], ...]]:
    shard_of = read_index(directory / index_name)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of the {len(shards)} files that {index_name} names are missing: "
            f"{listing(missing, ', ')}; download the checkpoint again"
        )
    headers = {shard: read_headers(directory / shard) for shard in shards}
    absent = [f"{name} (in {shard})" for name, shard in shard_of.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(
            f"{directory / index_name}: {len(absent)} tensors are missing from their files: {listing(absent, ', ')}"
        )
    unlisted = tuple((shard, name) for shard in shards for name in headers[shard] if shard_of.get(name) != shard)
    return {name: headers[shard][name] for name, shard in shard_of.items()}, unlisted


def checkpoint_dtype(config: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype that the checkpoint is meant to run in: the one its config names, else that of most bytes."""
    named = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if named is None:
        size_bytes: Counter[torch.dtype] = Counter()
        for header in checkpoint.tensors.values():
            if header.dtype in FLOAT_DTYPES:
                size_bytes[header.dtype] += header.size_bytes
        if not size_bytes:
            raise CheckpointError(f"{checkpoint.directory}: contains no floating-point weights")
        named = str(size_bytes.most_common(1)[0][0])
    dtype = _COMPUTE_DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"{checkpoint.directory}: its dtype is {named!r}; choose one of {', '.join(_COMPUTE_DTYPES)} with dtype="
        )
    return dtype


def listing(names: Sequence[str], separator: str, limit: int = _LISTED) -> str:
    """Returns ``names`` joined by ``separator``, at most ``limit`` of them."""
    more = [f"... and {len(names) - limit} more"] if len(names) > limit else []
    return separator.join([*names[:limit], *more])
