"""Reads the two kinds of weight file, ``.safetensors`` and PyTorch's ``.bin``: headers first, then tensor by tensor.

safetensors and torch map the file into memory. A page that was read stays in the process's resident memory until the
file is unmapped, so a file is read in *windows*: each window opens the file again and closes it before the next window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastgen.errors import CheckpointError

T = TypeVar("T")

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_GIT_LFS_POINTER = b"version https://git-lfs"
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class TensorHeader:
    """The file, shape and dtype of a tensor, known without reading the tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Index ranges of one axis, each its first index and the index after its last.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Read:
    """A stored tensor that is read: all of it, or on each axis the ``ranges``, end to end."""

    name: str
    header: TensorHeader
    ranges: tuple[Ranges, ...] | None = None

    @property
    def size_bytes(self) -> int:
        if self.ranges is None:
            return self.header.size_bytes
        lengths = (sum(end - first for first, end in axis) for axis in self.ranges)
        return math.prod(lengths) * self.header.dtype.itemsize


def read_headers(file: Path) -> dict[str, TensorHeader]:
    """Returns the headers of all tensors of ``file`` without reading a weight.

    Raises :class:`CheckpointError`, which names the file, if it is missing, empty, truncated, damaged, not a plain
    table of tensors, or contains code.
    """
    read = _safetensors_headers if file.suffix == ".safetensors" else _torch_headers
    return _explained(file, lambda: read(file))


def stream_tensors(file: Path, reads: Sequence[Read], *, window_bytes: int) -> Generator[tuple[Read, Tensor]]:
    """Yields the tensors of ``reads``, in that order, on the CPU, as they are stored. All of them are in ``file``.

    Each tensor is valid until the next one is requested and must be dropped by then, because a live tensor keeps its
    window mapped. At most ``window_bytes``, or one tensor if that is larger, are resident at a time. ``.bin`` files in
    the format before PyTorch 1.6 are an exception: they cannot be mapped, so the whole file is in memory, and each
    tensor is freed after use.
    """
    open_file = _open_safetensors if file.suffix == ".safetensors" else _open_torch
    for window in _windows(reads, window_bytes if _can_map(file) else None):
        with open_file(file) as take:
            for read in window:
                yield read, take(read)


def _windows(reads: Sequence[Read], window_bytes: int | None) -> Iterator[list[Read]]:
    window: list[Read] = []
    held = 0
    for read in reads:
        if window and window_bytes is not None and held + read.size_bytes > window_bytes:
            yield window
            window, held = [], 0
        window.append(read)
        held += read.size_bytes
    if window:
        yield window


def _joined(source: Any, ranges: Sequence[Ranges]) -> Tensor:
    """Returns the ranges of each axis of ``source``, end to end. ``source`` is a tensor, or a file's entry, which reads
    only what is indexed.
    """
    whole = [slice(None)] * len(ranges)
    for axis, found in enumerate(ranges):
        if len(found) != 1:
            # One axis at a time, so that each piece is read once.
            parts = (_joined(source, [*ranges[:axis], (one,), *ranges[axis + 1 :]]) for one in found)
            return torch.cat(list(parts), dim=axis)
        whole[axis] = slice(*found[0])
    piece: Tensor = source[tuple(whole)]
    return piece


def _safetensors_headers(file: Path) -> dict[str, TensorHeader]:
    with safe_open(file, framework="pt") as opened:
        return {name: _safetensors_header(file, name, opened.get_slice(name)) for name in sorted(opened.keys())}


def _safetensors_header(file: Path, name: str, entry: Any) -> TensorHeader:
    dtype = _SAFETENSORS_DTYPES.get(entry.get_dtype())
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name!r} is stored as {entry.get_dtype()}, which fastgen cannot read")
    return TensorHeader(file, tuple(entry.get_shape()), dtype)


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Callable[[Read], Tensor]]:
    with _explained(file, lambda: safe_open(file, framework="pt")) as opened:

        def take(read: Read) -> Tensor:
            if read.ranges is None:
                whole: Tensor = opened.get_tensor(read.name)
                return whole
            return _joined(opened.get_slice(read.name), read.ranges)

        yield take


def _torch_headers(file: Path) -> dict[str, TensorHeader]:
    table = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{file}: contains a {type(table).__name__}, not a table of tensors")
    for name, value in table.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{file}: entry {name!r} is a {type(value).__name__}, not a plain tensor; save a model's state_dict()"
            )
    return {name: TensorHeader(file, tuple(value.shape), value.dtype) for name, value in table.items()}


@contextmanager
def _open_torch(file: Path) -> Iterator[Callable[[Read], Tensor]]:
    mapped = _can_map(file)
    table = _explained(file, lambda: torch.load(file, map_location="cpu", weights_only=True, mmap=mapped))

    def take(read: Read) -> Tensor:
        stored: Tensor = table[read.name]
        if stored.is_meta:
            raise CheckpointError(
                f"{file}: tensor {read.name!r} has a shape and no numbers: it was saved from the meta device"
            )
        if read.ranges is None:
            del table[read.name]
            return stored
        return _joined(stored, read.ranges).clone()

    yield take


def _can_map(file: Path) -> bool:
    return file.suffix == ".safetensors" or _first_bytes(file).startswith(_ZIP)


def _explained(file: Path, action: Callable[[], T]) -> T:
    """Returns ``action()`` and turns every error inside the libraries into a :class:`CheckpointError` about ``file``.

    The error has neither cause nor context, because their tracebacks would keep the frames of the libraries alive, and
    with them the file.
    """
    try:
        return action()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # a damaged pickle may raise any error
        problem = f"{file}: {_explanation(file, error)}"
    raise CheckpointError(problem)


def _explanation(file: Path, error: Exception) -> str:
    if not file.exists():
        return "the file is missing"
    if not file.is_file():
        return "is not a file"
    first = _first_bytes(file)
    if not first:
        return "the file is empty"
    if first.startswith(_GIT_LFS_POINTER):
        return "is a git-lfs pointer, not the weights; run `git lfs pull` in the directory"
    if isinstance(error, SafetensorError):
        if "not fully covered" in str(error):
            return f"is truncated, or longer than its header says ({file.stat().st_size} bytes); download it again"
        return f"has a damaged header, or is not a safetensors file; download it again ({error})"
    if isinstance(error, UnpicklingError):
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), None)
        if reason:
            return f"refused: it asks to run code, and fastgen runs no code from a checkpoint ({reason.strip()})"
        return "is damaged, or contains more than tensors; download it again, or save it again as safetensors"
    return f"is truncated or damaged; download it again ({type(error).__name__}: {str(error).partition('. ')[0]})"


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_GIT_LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
