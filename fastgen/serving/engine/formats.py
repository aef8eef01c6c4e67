"""Formats of answers are compiled on a thread of the engine's process, so that no step waits for one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams, changed
from fastgen.runtime.sampling.mask_threads import lower_priority
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint
from fastgen.runtime.sampling.structured_output import Grammars

# For how long new requests may use a format that is in use already while an older request waits for a place.
_PATIENCE_S = 5.0
_TOO_LARGE = (
    "the formats of open answers take too much memory, and this answer's has grown for the longest time; send fewer at "
    "once, or make it simpler"
)
# A wait that does not count against a time limit, and a limit that has passed at the next step.
_SHORT_WAIT_S, _NO_TIME_S = 0.001, 1e-9


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


class _Question(NamedTuple):
    """A question whether a format can be compiled, what to do then, and whose it is."""

    response_format: ResponseFormat
    then: Callable[[], None]
    owner: object


class FormatThread:
    """Compiles formats one after the other, at low priority, while requests wait for theirs. Open requests have a
    limited number of formats at once, since each takes memory until its last request ends; requests with others wait.
    ``grammars`` is ``None`` for a model that can follow no format.
    """

    def __init__(self, grammars: Grammars | None):
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "fastgen-formats", lower_priority)
        self._compiling: dict[ResponseFormat, Future[CompiledFormat]] = {}
        # The requests that wait: by format and number, in the order of the first one of each format, and by number.
        self._waiting: dict[ResponseFormat, dict[int, _Waiting]] = {}
        self._requests: dict[int, _Waiting] = {}
        # The earliest time at which one of them waits no longer in any case.
        self._until_s = math.inf
        # Those that wait no longer.
        self._ready: dict[int, _Waiting] = {}
        # Questions whether formats can be compiled, by number, and what to do then. One format at a time is compiled
        # for them, so that a request waits for one at most.
        self._checks: dict[int, _Question] = {}
        self._checking: tuple[ResponseFormat, Future[CompiledFormat]] | None = None
        # The formats in use because of which others waited when that was last looked at; ``None`` if a request has come
        # or gone since.
        self._used: set[ResponseFormat] | None = None
        if grammars is not None:
            with contextlib.suppress(InvalidArgumentError):  # without the library; each request with a format says so
                grammars.prepare()

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests and questions that wait."""
        return len(self._requests) + len(self._ready) + len(self._checks)

    @property
    def is_full(self) -> bool:
        """Returns whether requests wait for others to end."""
        return len(self._waiting) > len(self._compiling)

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
        self._wait(number, _Waiting(response_format, then, until_s, owner, time.monotonic()))

    def check(
        self, number: int, response_format: ResponseFormat | None, then: Callable[[], None], *, owner: object = None
    ) -> None:
        """Calls ``then`` for question ``number`` when it is known whether the format can be compiled: now, or in a
        later :meth:`proceed`. It is compiled for that, whatever is in use.
        """
        grammars = self._grammars
        if grammars is None or response_format is None or grammars.kept(response_format) is not None:
            then()
            return
        self._checks[number] = _Question(response_format, then, owner)

    def cancel(self, number: int) -> None:
        """Forgets request or question ``number``, if it waits."""
        self._ready.pop(number, None)
        if self._checks.pop(number, None) is not None:
            self._end_check()
        if number in self._requests:
            self._leave(number)

    def cancel_all(self, owner: object) -> None:
        """Forgets the requests and questions of ``owner`` that wait."""
        waiting: list[tuple[int, _Waiting | _Question]] = [*self._requests.items(), *self._ready.items()]
        waiting += self._checks.items()
        for number, each in waiting:
            if each.owner is owner:
                self.cancel(number)

    def proceed(self, until_s: float = math.inf) -> None:
        """Calls what waits no longer, until ``until_s`` by ``time.monotonic``; the rest in a later call."""
        if (grammars := self._grammars) is not None and (self._requests or self._checks):
            self._end_compiling(grammars)
            self._begin(grammars)
            self._check_next(grammars)
        while self._ready:
            number = next(iter(self._ready))
            ready = self._ready.pop(number)
            if ready.compiled is not None and ready.compiled.is_spoiled:
                self._wait(number, replace(ready, compiled=None))  # the engine would compile it between two steps
                continue
            ready.then()
            if time.monotonic() > until_s:
                break

    def _check_next(self, grammars: Grammars) -> None:
        """Answers questions whose format is compiled, and has that of the next one compiled."""
        if self._checking is not None and self._checking[1].done():
            response_format, compiling = self._checking
            self._checking = None
            if compiling.exception() is None:
                grammars.keep(compiling.result())
            for number, each in list(self._checks.items()):
                if each.response_format == response_format:
                    del self._checks[number]
                    each.then()
        while self._checks and self._checking is None:
            number, asked = next(iter(self._checks.items()))
            if grammars.kept(asked.response_format) is None:
                self._checking = asked.response_format, self._compilation(grammars, asked.response_format)
            else:
                del self._checks[number]
                asked.then()

    def _end_check(self) -> None:
        """Ends the compilation for questions if no question is left for its format and no request shares it."""
        if self._checking is not None and all(
            each.response_format != self._checking[0] for each in self._checks.values()
        ):
            if self._checking[0] not in self._compiling:
                self._checking[1].cancel()
            self._checking = None

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
        if self._until_s <= now_s:
            for number in [number for number, each in self._requests.items() if each.until_s <= now_s]:
                self._ready[number] = self._leave(number)
            self._until_s = min((each.until_s for each in self._requests.values()), default=math.inf)
        used = self._in_use(grammars)
        if used == self._used and not grammars.has_room(len(used)):
            return
        has_room = True
        for response_format, requests in list(self._waiting.items()):
            if response_format in self._compiling:
                continue
            is_shared = response_format in used and not is_held
            has_room = has_room and (is_shared or grammars.has_room(len(used)))
            if is_shared or has_room:
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
        blocked = (each for each in self._requests.values() if each.response_format not in self._compiling)
        oldest = next(blocked, None)
        if oldest is None:
            return response_format in used or grammars.has_room(len(used))
        return response_format in used and oldest.began_s > time.monotonic() - _PATIENCE_S

    def _in_use(self, grammars: Grammars) -> set[ResponseFormat]:
        """Returns the formats that have a place: those of open requests, and those that are on their way to one."""
        ready = (each.response_format for each in self._ready.values() if each.compiled is not None)
        return grammars.in_use().union(self._compiling, ready)

    def _compilation(self, grammars: Grammars, response_format: ResponseFormat) -> Future[CompiledFormat]:
        """Returns what compiles a format, which is compiled once for all requests and questions."""
        if (found := self._compiling.get(response_format)) is not None:
            return found
        if self._checking is not None and self._checking[0] == response_format:
            return self._checking[1]
        try:
            return self._thread.submit(grammars.compiled, response_format)
        except RuntimeError as error:  # no thread can start
            failed: Future[CompiledFormat] = Future()
            failed.set_exception(error)
            return failed

    def _wait(self, number: int, waiting: _Waiting) -> None:
        """Has a request wait behind all others."""
        self._waiting.setdefault(waiting.response_format, {})[number] = self._requests[number] = waiting
        self._until_s, self._used = min(self._until_s, waiting.until_s), None

    def _leave(self, number: int) -> _Waiting:
        """Removes a request from those that wait. Its format is no longer compiled if no other request waits for it."""
        waiting = self._remove(number)
        response_format = waiting.response_format
        if response_format not in self._waiting and response_format in self._compiling:
            compiling = self._compiling.pop(response_format)
            if self._checking is None or compiling is not self._checking[1]:
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
        waiting = self._requests.pop(number)
        requests = self._waiting[waiting.response_format]
        del requests[number]
        if not requests:
            del self._waiting[waiting.response_format]
        return waiting

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def with_time_left(sampling: SamplingParams, waited_s: float) -> SamplingParams:
    """Returns the parameters of a request that waited so long for its format. If its time is over, it ends before its
    first token, and needs no format.
    """
    if sampling.response_format is None or sampling.timeout_s is None:
        return sampling
    if sampling.timeout_s <= waited_s:
        return changed(sampling, timeout_s=_NO_TIME_S, response_format=None)
    if waited_s < _SHORT_WAIT_S:
        return sampling
    return changed(sampling, timeout_s=sampling.timeout_s - waited_s)


def end_large_formats(engine: Engine, generations: Iterable[Generation]) -> None:
    """Ends those of ``generations`` that have one format, running or queued, if formats take too much memory."""
    shed = None if engine.grammars is None else engine.grammars.shed()
    for generation in generations if shed is not None else ():
        constraint = generation.request.constraint
        if isinstance(constraint, Constraint) and constraint.format is shed:
            engine.cancel(generation, "error", _TOO_LARGE)
