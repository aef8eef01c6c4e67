"""A recorded step: every kernel it launches with its grid, numbers and addresses, and its library calls, in order.

Off the GPU a tape stands in for a CUDA graph: replaying runs the tape and none of the Python that made it. So that it
is the whole step, recording refuses whatever a replay would lack: torch operations that compute, values read on the
host, and tensors that outlive the step in memory that the next one is given. As on a GPU, recording computes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.compile.build.builder import BuiltKernel
from fastgen.compile.build.cpp import CppKernel
from fastgen.compile.capture.arena import Arena
from fastgen.compile.capture.recording import recording
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.spec import Argument, KernelSpec
from fastgen.errors import CaptureError

_ATEN = torch.ops.aten
_ALLOCATES = {
    *(_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}
# Copies made on the host that torch presents as views.
_NOT_VIEWS = {_ATEN.lift_fresh.default}
_READS = {"tolist", "numpy", "__array__", "__dlpack__"}


@dataclass(frozen=True)
class Launch:
    """A kernel's launch. Tensors in ``arguments`` stay at their addresses for as long as this lives."""

    kernel: BuiltKernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        with torch.inference_mode():
            self.kernel.launch(self.grid, *self.arguments)

    def __str__(self) -> str:
        return self.kernel.spec.name

    def facts(self) -> dict[str, Any]:
        """What makes it this launch and no other, by what it is called."""
        names = [argument.name for argument in self.kernel.spec.arguments]
        given = {name: _address(value) for name, value in zip(names, self.arguments, strict=False)}
        return {"kernel": self.kernel.spec.name, "grid": self.grid, **given, "kernel object": id(self.kernel)}


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library's function on tensors that stay where they are."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        with torch.inference_mode():
            self.function(*self.args, **self.kwargs)

    def __str__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def facts(self) -> dict[str, Any]:
        given = {**{f"argument {index}": each for index, each in enumerate(self.args)}, **self.kwargs}
        described = {name: (_address(each), *_layout(each)) for name, each in given.items()}
        return {"function": self.function, **described}


Entry = Launch | LibraryCall


class Tape:
    """Made by :func:`record`. ``runner`` is the kernel of :func:`tape_spec`, which launches C++ kernels in one call."""

    def __init__(self, name: str, entries: Sequence[Entry], runner: CppKernel | None = None):
        # On which pool a replay was begun, and its number there.
        self._begun: tuple[ThreadPool, int] | None = None
        self.name = name
        self.entries: Sequence[Entry] = tuple(entries)
        self._closed = False
        self._stretches = _stretches(self.entries, runner)

    def replay(self) -> None:
        """Raises :class:`CaptureError` when it is closed, :class:`KernelError` where a launch fails."""
        if self._closed:
            raise CaptureError(f"{self.name} is replayed after it was closed")
        for run in self._stretches:
            run()

    def begin(self, pool: ThreadPool) -> bool:
        """Begin a replay on threads of the ``pool`` while the calling one goes on. Until :meth:`end` nothing that it
        reads or writes may be touched. ``False``, with nothing done, where it is not C++ kernels from end to end, or
        the pool has no thread for it now.
        """
        if not self._closed and len(self._stretches) == 1 and isinstance(run := self._stretches[0], _NativeStretch):
            number = pool.start(run.entry_point, run.slots)
            self._begun = (pool, number) if number else None
        return self._begun is not None

    def end(self) -> None:
        """Wait for the replay that was begun, if one was, and work with it."""
        if self._begun is not None:
            pool, number = self._begun
            pool.end(number)
            self._begun = None

    def difference(self, other: Tape) -> str | None:
        """The first thing in which another recording of the same step differs from this one; ``None`` if nothing.

        A step that is captured must not differ whatever is in its batch: a length that got into a grid or a number
        shows here.
        """
        for index, (ours, theirs) in enumerate(zip_longest(self.entries, other.entries)):
            if ours is None or theirs is None:
                return f"{len(self.entries)} launches, then {len(other.entries)}; {ours or theirs} is one too many"
            one, two = ours.facts(), theirs.facts()
            for what in dict.fromkeys((*one, *two)):
                if one.get(what) != two.get(what):
                    return f"launch {index}, {ours}: {what} is {one.get(what)}, then {two.get(what)}"
        return None

    def same_as(self, other: Tape) -> bool:
        """Whether the host code recorded the same: kernels, grids, numbers and addresses."""
        return self.difference(other) is None

    def close(self) -> None:
        """Lets go of kernels and tensors."""
        self.end()
        self._closed, self.entries, self._stretches = True, (), []

    def __del__(self) -> None:
        self.end()  # before its tensors go


def tape_spec() -> KernelSpec:
    """The C++ kernel that runs others: ``calls`` has an address of a function and one of its arguments for each."""
    arguments = (Argument("calls", "i64", "in"), Argument("num_calls", "i64", "scalar"))
    return KernelSpec("tape", "cpp", {}, arguments, needed_by=("every captured step",))


def record(name: str, step: Callable[[], None], arena: Arena, runner: CppKernel | None = None) -> Tape:
    """What ``step`` launches, as a tape of that ``name``; nothing runs. Its allocations come from ``arena``.

    Raises :class:`CaptureError` for a step that a tape cannot hold whole, and whatever ``step`` raises.
    """
    if _num_held(arena):
        raise CaptureError(f"{name} cannot be captured: tensors of an earlier capture are still alive")
    recorder = _Recorder(arena)
    with recording(recorder), _RefuseReads(name), _RefuseOperations(name, arena):
        step()
    if num_held := _num_held(arena):
        raise CaptureError(
            f"{name} cannot be captured: {num_held} of the tensors that it allocated are still alive, and the next "
            "capture is given their memory too; what others read belongs in a buffer that is made before"
        )
    return Tape(name, recorder.entries, runner)


def _num_held(arena: Arena) -> int:
    """Pieces that are held, and not only by objects that refer to each other, such as an exception and its frames."""
    if arena.num_pieces:
        gc.collect()
    return arena.num_pieces


class _Recorder:
    def __init__(self, arena: Arena):
        self._arena = arena
        self.entries: list[Entry] = []

    def launch(self, kernel: BuiltKernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if isinstance(kernel, CppKernel):
                kernel.slots(arguments)  # a wrong argument is told here, where the step can be seen
            self.entries.append(Launch(kernel, grid, tuple(map(self._fixed, arguments))))

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            fixed = {name: self._fixed(value) for name, value in kwargs.items()}
            self.entries.append(LibraryCall(function, tuple(map(self._fixed, args)), fixed))

    def _fixed(self, value: Any) -> Any:
        return self._arena.fixed(value) if isinstance(value, Tensor) else value


class _RefuseOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views pass and gives out memory; all else would be missing from the tape."""

    def __init__(self, name: str, arena: Arena):
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._arena = name, arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: else it would import its compiler for this, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATES:
            return self._arena.like(func(*args, **{**kwargs, "device": "meta", "pin_memory": False}))
        if func.is_view and func not in _NOT_VIEWS:
            result = func(*args, **kwargs)
            if _lie_within(result, args):
                return result
        with self:  # under inference mode operations arrive that consist of others
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        raise CaptureError(
            f"{self._name} cannot be captured: {func} is computed by torch, so a replay would lack it; it needs a "
            "kernel or fastgen.compile.capture.recording.library_call"
        )


class _RefuseReads(TorchFunctionMode):
    """What reads a tensor on the host without an operation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise CaptureError(
                f"{self._name} cannot be captured: {func.__name__} reads a tensor on the host, and a replay runs "
                "nothing there"
            )
        return func(*args, **(kwargs or {}))


def _lie_within(result: Any, args: Sequence[Any]) -> bool:
    storages = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
    views = result if isinstance(result, (list, tuple)) else [result]
    return all(view.untyped_storage().data_ptr() in storages for view in views)


def _address(value: Any) -> Any:
    return f"{value.dtype} at {value.data_ptr():#x}" if isinstance(value, Tensor) else value


def _layout(value: Any) -> tuple[Any, ...]:
    return (tuple(value.shape), value.stride()) if isinstance(value, Tensor) else ()


def _stretches(entries: Sequence[Entry], runner: CppKernel | None) -> list[Callable[[], None]]:
    """The entries to run, those that ``runner`` can launch put together as far as they follow each other."""
    stretches: list[Callable[[], None]] = []
    native: list[Launch] = []

    def end_native() -> None:
        if native:
            assert runner is not None
            stretches.append(_NativeStretch(runner, native))
            native.clear()

    for entry in entries:
        if runner is not None and isinstance(entry, Launch) and isinstance(entry.kernel, CppKernel):
            native.append(entry)
        else:
            end_native()
            stretches.append(entry.run)
    end_native()
    return stretches


class _NativeStretch:
    """Launches of C++ kernels, laid out for one call: for each the function's address and its arguments' block."""

    def __init__(self, runner: CppKernel, launches: Sequence[Launch]):
        slots: list[int] = []
        calls: list[int] = []
        for launch in launches:
            assert isinstance(launch.kernel, CppKernel)
            calls += launch.kernel.entry_point, len(slots)
            slots += launch.kernel.slots(launch.arguments)
        table = torch.tensor(calls + slots, dtype=torch.int64)
        table[1 : len(calls) : 2] = table[1 : len(calls) : 2] * table.itemsize + table[len(calls) :].data_ptr()
        arguments = table, len(launches)
        self._run = runner.bind((), *arguments)
        # The same call, as a thread of the pool makes it.
        self.entry_point, self.slots = runner.entry_point, torch.tensor(runner.slots(arguments))

    def __call__(self) -> None:
        self._run()
