"""Formats of answers are compiled on a thread of the engine's process, so that no step waits for one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.matcher import CompiledFormat, lower_priority
from fastgen.runtime.sampling.structured_output import Grammars


class FormatThread:
    """Compiles formats one after the other, at low priority, while requests wait for theirs. ``grammars`` is ``None``
    for a model that can follow no format.
    """

    def __init__(self, grammars: Grammars | None):
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "fastgen-formats", lower_priority)
        self._compiling: dict[ResponseFormat, Future[CompiledFormat]] = {}
        # By the number of each request that waits: its format, and what to do when that is compiled.
        self._waiting: dict[int, tuple[ResponseFormat, Callable[[], None]]] = {}
        # What to do for each request whose format has been compiled since.
        self._ready: dict[int, Callable[[], None]] = {}
        if grammars is not None:
            with contextlib.suppress(InvalidArgumentError):  # without the library; each request with a format says so
                grammars.prepare()

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait."""
        return len(self._waiting) + len(self._ready)

    def when_compiled(self, number: int, response_format: ResponseFormat | None, then: Callable[[], None]) -> None:
        """Calls ``then`` for request ``number`` when its format is compiled: now, or in a later :meth:`proceed`."""
        grammars = self._grammars
        if grammars is None or response_format is None or grammars.is_kept(response_format):
            then()
            return
        self._waiting[number] = response_format, then
        if response_format not in self._compiling:
            self._compiling[response_format] = self._thread.submit(grammars.compiled, response_format)

    def cancel(self, number: int) -> None:
        """Forgets request ``number``, if it waits."""
        if self._ready.pop(number, None) is not None:
            return
        if (waited := self._waiting.pop(number, None)) is None:
            return
        response_format, _ = waited
        if all(other != response_format for other, _ in self._waiting.values()):
            self._compiling.pop(response_format).cancel()

    def proceed(self, until_s: float = math.inf) -> None:
        """Calls what waits for formats that are compiled by now, until ``until_s`` by ``time.monotonic``; the rest in a
        later call.
        """
        ready = [each for each, compiling in self._compiling.items() if compiling.done()]
        for response_format in ready:
            compiling = self._compiling.pop(response_format)
            assert self._grammars is not None
            if compiling.exception() is None:  # else the engine finds the same error, and its text is for the client
                self._grammars.keep(response_format, compiling.result())
            numbers = [number for number, (each, _) in self._waiting.items() if each == response_format]
            for number in numbers:
                _, self._ready[number] = self._waiting.pop(number)
        while self._ready:
            self._ready.pop(next(iter(self._ready)))()
            if time.monotonic() > until_s:
                break

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)
