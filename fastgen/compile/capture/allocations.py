"""Records what memory a function takes: the order in which it makes tensors and frees them.

From that follow the most bytes alive at once, and the memory of an arena that serves the same requests. On tensors of
the ``meta`` device nothing is computed, and no memory is taken. Only tensors on one device are counted, so that a
function may read lengths of sequences on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.compile.capture.arena import SLAB, Space, aligned
from fastgen.compile.capture.recording import recording

_ATEN = torch.ops.aten
META = torch.device("meta")
_MAKES = {
    *(_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}
_ARITHMETIC = {
    *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.pow.Tensor_Scalar, _ATEN.rsqrt.default),
    *(_ATEN.floor_divide.default, _ATEN.remainder.Scalar, _ATEN.relu.default),
}
_COMPARISONS = {
    *(_ATEN.gt.Tensor, _ATEN.ge.Tensor, _ATEN.lt.Tensor, _ATEN.le.Tensor, _ATEN.eq.Tensor, _ATEN.ne.Tensor),
    *(_ATEN.gt.Scalar, _ATEN.ge.Scalar, _ATEN.lt.Scalar, _ATEN.le.Scalar, _ATEN.eq.Scalar, _ATEN.ne.Scalar),
}


@dataclass(frozen=True)
class Allocations:
    """The tensors that a function makes: ``sizes[i]`` bytes each. An event ``i`` makes tensor ``i``, an event ``~i``
    frees it; what is not freed is returned to the caller."""

    sizes: tuple[int, ...]
    events: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes alive at once."""
        now = most = 0
        for event in self.events:
            now += self.sizes[event] if event >= 0 else -self.sizes[~event]
            most = max(most, now)
        return most

    @property
    def arena_bytes(self) -> int:
        """Returns the bytes of an :class:`~fastgen.compile.capture.arena.Arena` that serves them: at first one slab,
        large enough for what is alive at once, then one more for each piece that finds no gap."""
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


def allocations_of(function: Callable[[], Any], *, device: torch.device = META, at_least: int = 1) -> Allocations:
    """Returns what ``function`` allocates on ``device``, tensors of ``at_least`` so many bytes; no kernel runs.

    On ``meta``, where a function asks how many rows fall into each bin (``bincount``), all are in the first: what an
    expert takes is most when it gets them all.
    """
    recorder = _Recorder(device, at_least)
    with torch.inference_mode(False), torch.no_grad(), recording(_NoLaunches()), recorder:
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
    def __init__(self, device: torch.device, at_least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.events: list[int] = []
        self._device, self._at_least = device, at_least
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler for this, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {})) if self._device != META else _described(func, args, kwargs or {})
        self._note_freed()
        for each in tensors_in(result):
            storage = each.untyped_storage()
            is_new = storage._cdata not in given and storage._cdata not in self._alive
            if is_new and storage.nbytes() >= self._at_least and storage.device == self._device:
                self._alive[storage._cdata] = StorageWeakRef(storage), len(self.sizes)  # type: ignore[no-untyped-call]
                self.events.append(len(self.sizes))
                self.sizes.append(storage.nbytes())
        return result

    def _note_freed(self) -> None:
        for key, (storage, index) in list(self._alive.items()):
            if storage.expired():  # type: ignore[no-untyped-call]
                del self._alive[key]
                self.events.append(~index)


def _described(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns what ``func`` makes, on ``meta``: what it makes on the host without an argument there, too. Functions
    whose results torch would describe in Python, for which it imports its compiler, are described here."""
    if func is _ATEN.empty_like.default and kwargs.get("memory_format") in (None, torch.contiguous_format):
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=META)
    if (made := _of_each_element(func, args, kwargs)) is not None:
        return made
    if func is _ATEN.new_zeros.default:
        return torch.empty(args[1], dtype=kwargs.get("dtype") or args[0].dtype, device=META)
    if func in _MAKES:
        return func(*args, **{**kwargs, "device": META, "pin_memory": False})
    if func is _ATEN.bincount.default and args[0].is_meta:
        counts = torch.zeros(kwargs.get("minlength") or args[2], dtype=torch.int64)
        counts[0] = args[0].numel()
        return counts
    return func(*args, **kwargs)


def _of_each_element(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the result of an elementwise ``func`` on ``meta``; ``None`` for other functions, and for tensors whose
    dimensions are permuted. Torch describes such results in Python, which takes a tenth of a millisecond each."""
    compares = func in _COMPARISONS
    if kwargs or not (compares or func in _ARITHMETIC):
        return None
    tensors = [each for each in args if isinstance(each, Tensor)]
    if not all(map(_is_in_order, tensors)) or not any(each.is_meta for each in tensors):
        return None
    dtype = torch.bool if compares else torch.result_type(*args) if len(args) == 2 else tensors[0].dtype
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=dtype, device=META)


def _is_in_order(tensor: Tensor) -> bool:
    """Returns whether no stride is larger than the one before it, as in slices of a contiguous tensor."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return all(first >= second for first, second in pairwise(strides))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in ``value``, also in its dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
