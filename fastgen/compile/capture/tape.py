"""A recorded step: every kernel it launches with its grid, numbers and addresses, and its library calls, in order.

Without a GPU a tape replaces a CUDA graph: replaying runs the tape and none of the Python that made it. A tape must be
complete, so recording refuses whatever a replay would lack: torch operations that compute, values read on the host, and
tensors that outlive the step, since the next step reuses their memory. As on a GPU, recording computes nothing.
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
    """A kernel's launch. It keeps the tensors in ``arguments`` at their addresses."""

    kernel: BuiltKernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        with torch.inference_mode():
            self.kernel.launch(self.grid, *self.arguments)

    def __str__(self) -> str:
        return self.kernel.spec.name

    def facts(self) -> dict[str, Any]:
        """Returns everything that distinguishes the launch from another, by name."""
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
        # The pool on which a replay was begun, and its number there.
        self._begun: tuple[ThreadPool, int] | None = None
        self.name = name
        self.entries: Sequence[Entry] = tuple(entries)
        self._closed = False
        self._stretches = _stretches(self.entries, runner)

    def replay(self) -> None:
        """Runs the tape. Raises :class:`CaptureError` after :meth:`close`, :class:`KernelError` where a
        launch fails.
        """
        if self._closed:
            raise CaptureError(f"{self.name} is replayed after it was closed")
        for run in self._stretches:
            run()

    def begin(self, pool: ThreadPool) -> bool:
        """Begins a replay on threads of the ``pool`` while the calling thread continues. Until :meth:`end` the replay's
        buffers must not be read or written. Returns ``False`` and does nothing where the tape is not all C++ kernels,
        or the pool has no free thread.
        """
        if not self._closed and len(self._stretches) == 1 and isinstance(run := self._stretches[0], _NativeStretch):
            number = pool.start(run.entry_point, run.slots)
            self._begun = (pool, number) if number else None
        return self._begun is not None

    def end(self) -> None:
        """Waits for the replay that was begun, if one was, and helps with it."""
        if self._begun is not None:
            pool, number = self._begun
            pool.end(number)
            self._begun = None

    def difference(self, other: Tape) -> str | None:
        """Returns the first difference of another recording of the same step from this one; ``None`` if there is none.

        Recordings of a step must not depend on the batch: a length that got into a grid or a number shows here.
        """
        for index, (ours, theirs) in enumerate(zip_longest(self.entries, other.entries)):
            if ours is None or theirs is None:
                return f"{len(self.entries)} launches, then {len(other.entries)}; {ours or theirs} is one too many"
            one, two = ours.facts(), theirs.facts()
            for what in dict.fromkeys((*one, *two)):
                if one.get(what) != two.get(what):
                    return f"launch {index}, {ours}: {what} is {one.get(what)}, then {two.get(what)}"
        return None

    def close(self) -> None:
        """Releases kernels and tensors."""
        self.end()
        self._closed, self.entries, self._stretches = True, (), []

    def __del__(self) -> None:
        self.end()  # before its tensors are freed


def tape_spec() -> KernelSpec:
    """Returns the C++ kernel that runs others: ``calls`` has the addresses of a function and its arguments for each."""
    arguments = (Argument("calls", "i64", "in"), Argument("num_calls", "i64", "scalar"))
    return KernelSpec("tape", "cpp", {}, arguments, needed_by=("every captured step",))


def record(name: str, step: Callable[[], None], arena: Arena, runner: CppKernel | None = None) -> Tape:
    """Records the launches of ``step`` as a tape of that ``name``; nothing runs. Allocations come from ``arena``.

    Raises :class:`CaptureError` for a step that a tape cannot hold completely, and whatever ``step`` raises.
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
    """Returns the number of held pieces, without those held only by reference cycles, such as an exception's frames."""
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
                kernel.slots(arguments)  # reports a wrong argument here, where the traceback shows the step
            self.entries.append(Launch(kernel, grid, tuple(map(self._fixed, arguments))))

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            fixed = {name: self._fixed(value) for name, value in kwargs.items()}
            self.entries.append(LibraryCall(function, tuple(map(self._fixed, args)), fixed))

    def _fixed(self, value: Any) -> Any:
        return self._arena.fixed(value) if isinstance(value, Tensor) else value


class _RefuseOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allows views, allocates memory, and refuses other operations, which a tape would lack."""

    def __init__(self, name: str, arena: Arena):
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._arena = name, arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler for this, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATES:
            return self._arena.like(func(*args, **{**kwargs, "device": "meta", "pin_memory": False}))
        if func.is_view and func not in _NOT_VIEWS:
            result = func(*args, **kwargs)
            if _lie_within(result, args):
                return result
        with self:  # under inference mode composite operations arrive
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        raise CaptureError(
            f"{self._name} cannot be captured: {func} is computed by torch, so a replay would lack it; it needs a "
            "kernel or fastgen.compile.capture.recording.library_call"
        )


class _RefuseReads(TorchFunctionMode):
    """Refuses reads of a tensor on the host that are not operations."""

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
    """Returns the entries as calls; neighbouring ones that ``runner`` can launch become one call."""
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
    """Launches of C++ kernels in one call: for each the addresses of the function and of its block of arguments."""

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
        # The same call for a thread of the pool.
        self.entry_point, self.slots = runner.entry_point, torch.tensor(runner.slots(arguments))

    def __call__(self) -> None:
        self._run()
