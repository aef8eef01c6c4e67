"""Formats of answers are compiled on a thread of the engine's process, so that no step waits for one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.matcher import CompiledFormat, lower_priority
from fastgen.runtime.sampling.structured_output import Grammars


@dataclass
class _Waiting:
    """A request that waits for its format: what to do then, or at the time ``until_s`` by ``time.monotonic``."""

    response_format: ResponseFormat
    then: Callable[[], None]
    until_s: float
    # Held from when it is there, so that it is not dropped before the request has it.
    compiled: CompiledFormat | None = None


class FormatThread:
    """Compiles formats one after the other, at low priority, while requests wait for theirs. Open requests have a
    limited number of formats at once, since each takes memory until its last request ends; requests with others wait.
    ``grammars`` is ``None`` for a model that can follow no format.
    """

    def __init__(self, grammars: Grammars | None):
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "fastgen-formats", lower_priority)
        self._compiling: dict[ResponseFormat, Future[CompiledFormat]] = {}
        # By the number of each request that waits, in their order.
        self._waiting: dict[int, _Waiting] = {}
        # Those that wait no longer.
        self._ready: dict[int, _Waiting] = {}
        # The formats because of which others waited when that was last looked at.
        self._used: set[ResponseFormat] = set()
        if grammars is not None:
            with contextlib.suppress(InvalidArgumentError):  # without the library; each request with a format says so
                grammars.prepare()

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait."""
        return len(self._waiting) + len(self._ready)

    def when_compiled(
        self,
        number: int,
        response_format: ResponseFormat | None,
        then: Callable[[], None],
        until_s: float = math.inf,
    ) -> None:
        """Calls ``then`` for request ``number`` when its format is compiled and may be used, and from ``until_s`` by
        ``time.monotonic`` on in any case: now, or in a later :meth:`proceed`.
        """
        if self._grammars is None or response_format is None:
            then()
            return
        self._waiting[number] = _Waiting(response_format, then, until_s)
        self._begin(self._grammars, is_new=True)
        if (ready := self._ready.pop(number, None)) is not None:
            ready.then()

    def cancel(self, number: int) -> None:
        """Forgets request ``number``, if it waits."""
        if self._ready.pop(number, None) is not None:
            return
        if (waited := self._waiting.pop(number, None)) is None:
            return
        is_last = all(other.response_format != waited.response_format for other in self._waiting.values())
        if is_last and (compiling := self._compiling.pop(waited.response_format, None)) is not None:
            compiling.cancel()

    def proceed(self, until_s: float = math.inf) -> None:
        """Calls what waits no longer, until ``until_s`` by ``time.monotonic``; the rest in a later call."""
        if self._grammars is not None and self._waiting:
            self._end_compiling(self._grammars)
            self._begin(self._grammars)
        while self._ready:
            ready = self._ready.pop(next(iter(self._ready)))
            ready.then()
            if time.monotonic() > until_s:
                break

    def _end_compiling(self, grammars: Grammars) -> None:
        """Keeps the formats that are compiled by now. Requests whose format cannot be compiled wait no longer: the
        engine finds the same error, and its text is for the client.
        """
        for response_format in [each for each, compiling in self._compiling.items() if compiling.done()]:
            compiling, compiled = self._compiling.pop(response_format), None
            if compiling.exception() is None:
                compiled = compiling.result()
                grammars.keep(compiled)
            numbers = [number for number, each in self._waiting.items() if each.response_format == response_format]
            for number in numbers:
                self._let_go(number, compiled)

    def _begin(self, grammars: Grammars, *, is_new: bool = False) -> None:
        """Finds who waits no longer, and has formats compiled that may be used. ``is_new`` says that a request has
        come."""
        used, now_s = grammars.in_use(), time.monotonic()
        used.update(self._compiling, (each.response_format for each in self._ready.values()))
        if used == self._used and not is_new and all(each.until_s > now_s for each in self._waiting.values()):
            return
        for number, waiting in list(self._waiting.items()):
            response_format = waiting.response_format
            if waiting.until_s <= now_s:
                self._let_go(number)
            elif response_format not in self._compiling and (
                response_format in used or len(used) < grammars.max_in_use
            ):
                used.add(response_format)
                if (compiled := grammars.kept(response_format)) is not None:
                    self._let_go(number, compiled)
                else:
                    self._compiling[response_format] = self._thread.submit(grammars.compiled, response_format)
        self._used = used

    def _let_go(self, number: int, compiled: CompiledFormat | None = None) -> None:
        waiting = self._waiting.pop(number)
        waiting.compiled = compiled
        self._ready[number] = waiting

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)
