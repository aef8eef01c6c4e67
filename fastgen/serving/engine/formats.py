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

# For how long new requests may use a format that is in use already while an older request waits for a place.
_PATIENCE_S = 5.0


@dataclass
class _Waiting:
    """A request that waits for its format: what to do then, or at the time ``until_s`` by ``time.monotonic``."""

    response_format: ResponseFormat
    then: Callable[[], None]
    until_s: float
    # Whose request it is.
    owner: object
    # Since when it waits, by ``time.monotonic``.
    began_s: float
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
        # The requests that wait, by format and number, in the order of the first one of each format; and their formats.
        self._waiting: dict[ResponseFormat, dict[int, _Waiting]] = {}
        self._formats: dict[int, ResponseFormat] = {}
        # Those that wait no longer.
        self._ready: dict[int, _Waiting] = {}
        # By number: questions whether formats can be compiled, what compiles each, and what to do then.
        self._checks: dict[int, tuple[ResponseFormat, Future[CompiledFormat], Callable[[], None]]] = {}
        # The formats in use because of which others waited when that was last looked at; ``None`` if a request has gone
        # since.
        self._used: set[ResponseFormat] | None = None
        if grammars is not None:
            with contextlib.suppress(InvalidArgumentError):  # without the library; each request with a format says so
                grammars.prepare()

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests and questions that wait."""
        return len(self._formats) + len(self._ready) + len(self._checks)

    def when_compiled(
        self,
        number: int,
        response_format: ResponseFormat | None,
        then: Callable[[], None],
        *,
        until_s: float = math.inf,
        owner: object = None,
    ) -> None:
        """Calls ``then`` for request ``number`` when its format is compiled and may be used, and from ``until_s`` by
        ``time.monotonic`` on in any case: now, or in a later :meth:`proceed`.
        """
        grammars = self._grammars
        if grammars is None or response_format is None:
            then()
            return
        if response_format not in self._compiling and self._may_begin(grammars, response_format):
            if grammars.kept(response_format) is not None:
                then()
                return
            self._compiling[response_format] = self._compilation(grammars, response_format)
        waiting = _Waiting(response_format, then, until_s, owner, time.monotonic())
        self._waiting.setdefault(response_format, {})[number] = waiting
        self._formats[number] = response_format

    def check(self, number: int, response_format: ResponseFormat | None, then: Callable[[], None]) -> None:
        """Calls ``then`` for question ``number`` when it is known whether the format can be compiled: now, or in a
        later :meth:`proceed`. It is compiled for that, whatever is in use.
        """
        grammars = self._grammars
        if grammars is None or response_format is None or grammars.kept(response_format) is not None:
            then()
            return
        self._checks[number] = response_format, self._compilation(grammars, response_format), then

    def cancel(self, number: int) -> None:
        """Forgets request or question ``number``, if it waits."""
        self._ready.pop(number, None)
        self._checks.pop(number, None)
        if number in self._formats:
            self._leave(number)

    def cancel_all(self, owner: object) -> None:
        """Forgets the requests of ``owner`` that wait."""
        waiting = [each for requests in (*self._waiting.values(), self._ready) for each in requests.items()]
        for number, each in waiting:
            if each.owner is owner:
                self.cancel(number)

    def proceed(self, until_s: float = math.inf) -> None:
        """Calls what waits no longer, until ``until_s`` by ``time.monotonic``; the rest in a later call."""
        if self._grammars is not None and (self._formats or self._checks):
            self._end_checks(self._grammars)
            self._end_compiling(self._grammars)
            self._begin(self._grammars)
        while self._ready:
            ready = self._ready.pop(next(iter(self._ready)))
            ready.then()
            if time.monotonic() > until_s:
                break

    def _end_checks(self, grammars: Grammars) -> None:
        for number in [number for number, (_, compiling, _) in self._checks.items() if compiling.done()]:
            _, compiling, then = self._checks.pop(number)
            if compiling.exception() is None:
                grammars.keep(compiling.result())
            then()

    def _end_compiling(self, grammars: Grammars) -> None:
        """Keeps the formats that are compiled by now. Requests whose format cannot be compiled wait no longer: the
        engine finds the same error, and its text is for the client.
        """
        for response_format in [each for each, compiling in self._compiling.items() if compiling.done()]:
            compiling, compiled = self._compiling.pop(response_format), None
            if compiling.exception() is None:
                compiled = compiling.result()
                grammars.keep(compiled)
            self._let_go(response_format, compiled)

    def _begin(self, grammars: Grammars) -> None:
        """Finds whose time is over, who may use a format that is there, and which formats are to be compiled."""
        now_s, is_held = time.monotonic(), False
        late = (each for each, format_of in self._formats.items() if self._waiting[format_of][each].until_s <= now_s)
        for number in list(late):
            self._ready[number] = self._leave(number)
        used = self._in_use(grammars)
        if used == self._used and len(used) >= grammars.max_in_use:
            return
        for response_format, requests in list(self._waiting.items()):
            if response_format in self._compiling:
                continue
            if (response_format in used and not is_held) or len(used) < grammars.max_in_use:
                used.add(response_format)
                compiled = grammars.kept(response_format)
                if compiled is None:
                    self._compiling[response_format] = self._compilation(grammars, response_format)
                else:
                    self._let_go(response_format, compiled)
            else:
                is_held = is_held or next(iter(requests.values())).began_s <= now_s - _PATIENCE_S
        self._used = used

    def _may_begin(self, grammars: Grammars, response_format: ResponseFormat) -> bool:
        """Returns whether a new request may use the format, which may be one that others wait for."""
        used = self._in_use(grammars)
        blocked = ((number, each) for number, each in self._formats.items() if each not in self._compiling)
        oldest = next((self._waiting[each][number] for number, each in blocked), None)
        if oldest is None:
            return response_format in used or len(used) < grammars.max_in_use
        return response_format in used and oldest.began_s > time.monotonic() - _PATIENCE_S

    def _in_use(self, grammars: Grammars) -> set[ResponseFormat]:
        """Returns the formats that have a place: those of open requests, and those that are on their way to one."""
        ready = (each.response_format for each in self._ready.values() if each.compiled is not None)
        return grammars.in_use().union(self._compiling, ready)

    def _compilation(self, grammars: Grammars, response_format: ResponseFormat) -> Future[CompiledFormat]:
        """Returns what compiles a format, which is compiled once for all requests and questions."""
        checked = (compiling for each, compiling, _ in self._checks.values() if each == response_format)
        found = self._compiling.get(response_format) or next(checked, None)
        return found or self._thread.submit(grammars.compiled, response_format)

    def _leave(self, number: int) -> _Waiting:
        """Removes a request from those that wait. Its format is no longer compiled if no other request waits for it."""
        waiting = self._remove(number)
        response_format = waiting.response_format
        if response_format not in self._waiting and response_format in self._compiling:
            compiling = self._compiling.pop(response_format)
            if all(compiling is not other for _, other, _ in self._checks.values()):
                compiling.cancel()
        return waiting

    def _let_go(self, response_format: ResponseFormat, compiled: CompiledFormat | None) -> None:
        """Ends the wait of all requests with a format."""
        for number in list(self._waiting.get(response_format, ())):
            self._ready[number] = ready = self._remove(number)
            ready.compiled = compiled

    def _remove(self, number: int) -> _Waiting:
        """Removes a request from those that wait."""
        self._used = None
        requests = self._waiting[response_format := self._formats.pop(number)]
        waiting = requests.pop(number)
        if not requests:
            del self._waiting[response_format]
        return waiting

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)
