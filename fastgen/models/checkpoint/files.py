"""The files of a checkpoint directory, and strict reading of their JSON. Needs no torch.

The first of :data:`WEIGHT_FILES` that is present decides which weight files are read: an index names its shards, and a
single file is the only one. No other file is read.
"""

from __future__ import annotations

import json
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

_MAX_DIGITS = 1000


def weights_entry(names: Collection[str]) -> str | None:
    """Returns the one of a directory's file ``names`` that leads to the weights; ``None`` if there is none."""
    return next((name for name in WEIGHT_FILES if name in names), None)


def is_index(entry: str) -> bool:
    return entry.endswith(".index.json")


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
