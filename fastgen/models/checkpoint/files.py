"""The files of a checkpoint directory, and strict reading of their JSON. Needs no torch.

The first of :data:`WEIGHT_FILES` that is present decides which weight files are read: an index names its shards, and a
single file is the only one. No other file is read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from fastgen.errors import CheckpointError

WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)

# The folder of further chat templates; no other folder of a checkpoint is read.
_TEMPLATES = "additional_chat_templates"
_MAX_DIGITS = 1000


def weights_entry(names: Collection[str]) -> str | None:
    """Returns the one of a directory's file ``names`` that leads to the weights; ``None`` if there is none."""
    return next((name for name in WEIGHT_FILES if name in names), None)


def is_index(entry: str) -> bool:
    return entry.endswith(".index.json")


def check_links(directory: Path) -> None:
    """Raises :class:`CheckpointError` if a file of the checkpoint is a symbolic link to a file outside of it.

    A downloaded directory may contain links to any file of this machine, whose content would reach clients as a chat
    template or a vocabulary. In the hub's cache files are links to the blobs of their repository.
    """
    places = _own_places(Path(os.path.realpath(directory)))
    for file in (*directory.iterdir(), *(directory / _TEMPLATES).glob("*")):
        real = os.path.realpath(file)
        is_outside = not any(Path(real).is_relative_to(place) for place in places)
        if is_outside and os.path.exists(real) and not os.path.isdir(real):
            raise CheckpointError(
                f"{file}: is a link to {real}, outside of the checkpoint, where fastgen reads nothing. If that file "
                "belongs to the model, put a copy or a hard link of it in this place"
            )


def _own_places(directory: Path) -> list[Path]:
    """Returns the directories of a checkpoint's files: its own, and in the hub's cache that of the blobs."""
    blobs = directory.parent.parent / "blobs"
    is_snapshot = directory.parent.name == "snapshots" and not blobs.is_symlink()
    return [directory, blobs] if is_snapshot else [directory]


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads the JSON object in ``file`` strictly: no repeated keys, no ``NaN``. Raises :class:`CheckpointError`."""
    try:
        value = json.loads(
            file.read_text("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_integer
        )
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file}:{error.lineno}:{error.colno}: is not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a repeated key, a number too long, nested too deep
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: contains a JSON {type(value).__name__}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"key {repeated[0]!r} occurs more than once")
    return dict(pairs)


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # Python's own limit is per process, and any code may change it
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def read_index(index: Path) -> dict[str, str]:
    """Returns the ``weight_map`` of an index file: tensor name -> name of its shard, a file beside the index."""
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: has no 'weight_map' that maps tensors to files")
    suffix = ".safetensors" if index.name.endswith(".safetensors.index.json") else ".bin"
    for name, shard in shards.items():
        if not isinstance(shard, str) or not shard.endswith(suffix):
            raise CheckpointError(f"{index}: tensor {name!r}: {shard!r} is not the name of a {suffix} file")
        if "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{index}: tensor {name!r}: {shard!r} is outside the checkpoint's directory")
    return shards
