"""Tells what memory a function takes without taking it: the function runs once on tensors of the ``meta`` device.

What is recorded is the order in which tensors are made and freed. From it follow the most bytes alive at once and the
memory of an arena that serves the same requests. Tensors on other devices, such as the lengths of sequences that the
function reads, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.compile.capture.arena import SLAB, Space, aligned
from fastgen.compile.capture.recording import recording

_ATEN = torch.ops.aten
_META = torch.device("meta")
_MAKES = {
    *(_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}


@dataclass(frozen=True)
class Allocations:
    """The tensors that a function makes: ``sizes[i]`` bytes each. An event ``i`` makes tensor ``i``, an event ``~i``
    frees it; what is not freed is returned to the caller."""

    sizes: tuple[int, ...]
    events: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        now = most = 0
        for event in self.events:
            now += self.sizes[event] if event >= 0 else -self.sizes[~event]
            most = max(most, now)
        return most

    @property
    def arena_bytes(self) -> int:
        """The memory of an :class:`~fastgen.compile.capture.arena.Arena` that serves them: at first one slab, large
        enough for what is alive at once, then one more for each piece that finds no gap."""
        sizes = [aligned(size) for size in self.sizes]
        spaces = [Space(_slab_bytes(Allocations(tuple(sizes), self.events).peak_bytes))]
        places: dict[int, tuple[Space, tuple[int, int]]] = {}
        for event in self.events:
            if event < 0:
                space, piece = places.pop(~event)
                space.give_back(piece)
                continue
            for space in spaces:
                if (found := space.take(sizes[event])) is not None:
                    break
            else:
                space = Space(_slab_bytes(sizes[event]))
                spaces.append(space)
                found = space.take(sizes[event])
                assert found is not None
            places[event] = space, found
        return sum(space.size_bytes for space in spaces)


@dataclass(frozen=True)
class LinearAllocations:
    """Allocations whose sizes are linear in a number, such as a step's tokens: those at ``at`` and what each size grows
    by."""

    base: Allocations
    at: int
    slopes: tuple[int, ...]

    @classmethod
    def through(cls, record: Callable[[int], Allocations], first: int, second: int) -> LinearAllocations:
        """Returns the line through what is recorded at two numbers. Raises ``ValueError`` where there is none: the
        order of events differs, or a size grows by no whole number of bytes."""
        low, high = record(first), record(second)
        if low.events != high.events:
            raise ValueError(f"allocations at {first} and at {second} differ in more than their sizes")
        growths = [divmod(b - a, second - first) for a, b in zip(low.sizes, high.sizes, strict=True)]
        if any(rest for _, rest in growths):
            raise ValueError(f"sizes at {first} and at {second} lie on no line")
        return cls(low, first, tuple(slope for slope, _ in growths))

    def __call__(self, number: int) -> Allocations:
        """Returns the allocations at ``number``."""
        sizes = (size + slope * (number - self.at) for size, slope in zip(self.base.sizes, self.slopes, strict=True))
        return Allocations(tuple(sizes), self.base.events)


def allocations_of(function: Callable[[], Any], *, number: int = 0) -> Allocations:
    """Returns what ``function`` allocates; nothing is computed and no kernel runs.

    Where the function asks for what depends on data, it gets the answer that takes most memory: all entries are not
    zero (``nonzero``), all rows fall into one bin (``bincount``), a number read on the host is ``number``, and lists
    read there hold zeros.
    """
    recorder = _Recorder(number)
    with torch.inference_mode(False), torch.no_grad(), recording(_NoLaunches()), _ZeroLists(), recorder:
        result = function()
    del result
    return Allocations(tuple(recorder.sizes), tuple(recorder.events))


def _slab_bytes(size_bytes: int) -> int:
    return max(1, -(-size_bytes // SLAB)) * SLAB


class _NoLaunches:
    """Takes the place of a tape's recorder, and drops what it is given."""

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        return

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.events: list[int] = []
        self._number = number
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: else it would import its compiler for this, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in _meta_tensors((args, kwargs))}
        result = self._result(func, args, kwargs or {}, reads_meta=bool(given))
        self._note_freed()
        for each in _meta_tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive and storage.nbytes():
                self._alive[storage._cdata] = StorageWeakRef(storage), len(self.sizes)  # type: ignore[no-untyped-call]
                self.events.append(len(self.sizes))
                self.sizes.append(storage.nbytes())
        return result

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any], *, reads_meta: bool) -> Any:
        if func in _MAKES:
            return func(*args, **{**kwargs, "device": _META, "pin_memory": False})
        if reads_meta and func is _ATEN.nonzero.default:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device=_META)
        if reads_meta and func is _ATEN.bincount.default:
            counts = torch.zeros(max(kwargs.get("minlength", 0), *args[2:3], 1), dtype=torch.int64)
            counts[0] = args[0].numel()
            return counts
        if reads_meta and func is _ATEN._local_scalar_dense.default:
            return float(self._number) if args[0].is_floating_point() else self._number
        return func(*args, **kwargs)

    def _note_freed(self) -> None:
        for key, (storage, index) in list(self._alive.items()):
            if storage.expired():  # type: ignore[no-untyped-call]
                del self._alive[key]
                self.events.append(~index)


class _ZeroLists(TorchFunctionMode):
    """Reads of lists from ``meta`` give zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "tolist" and args[0].device.type == "meta":
            with torch._C.DisableTorchFunction():
                return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def _meta_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_meta else []
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple)) or (not isinstance(value, (str, bytes)) and hasattr(value, "__iter__")):
        return [tensor for each in value for tensor in _meta_tensors(each)]
    return []
