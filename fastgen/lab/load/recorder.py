"""Makes a record of each request that is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastgen.errors import FastgenError
from fastgen.lab.load.target import Answer, Target
from fastgen.lab.records import RequestRecord
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.sessions import Conversations

INTERRUPTED = "the run was interrupted before the answer was whole"


@dataclass(frozen=True)
class Prepared:
    """A request that can be sent at once: its number in the workload, its whole prompt, and the target's form of it."""

    number: int
    request: PlannedRequest
    form: Any


class Recorder:
    """Sends requests to ``target`` and keeps a record of each. Its times are seconds since it was made.

    ``progress`` gets the number of requests that have ended.
    """

    def __init__(self, target: Target, progress: Callable[[int], None] = lambda done: None):
        self.target = target
        self._progress = progress
        self._records: list[RequestRecord] = []
        self._conversations = Conversations()
        self._began = time.perf_counter()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """Returns the records in the order of the requests."""
        return tuple(sorted(self._records, key=lambda record: record.request))

    async def until(self, time_s: float) -> None:
        """Sleeps until ``time_s``; without sleeping, other tasks get to run all the same."""
        await asyncio.sleep(max(0.0, time_s - self.now_s))
        while self.now_s < time_s:  # timers may be a little early
            await asyncio.sleep(0)

    def prepare(self, number: int, request: PlannedRequest) -> Prepared:
        """Returns request ``number`` of the workload, ready to be sent. What it continues must have been answered."""
        said = self._conversations
        whole = replace(request, prompt_ids=said.prompt(request), message_ends=said.message_ends(request))
        return Prepared(number, whole, self.target.prepare(whole))

    async def send(self, prepared: Prepared, *, due_s: float, client: int | None = None) -> RequestRecord:
        """Sends a request now, and returns its record when it has ended. A failure is part of the record and is not
        raised.
        """
        request, answer, error = prepared.request, Answer(), None
        sent = time.perf_counter()
        try:
            await self.target.send(prepared.form, answer)
            error = _lack(request, answer)
        except FastgenError as failure:
            error = str(failure)
        except asyncio.CancelledError:
            error = None if _lack(request, answer) is None else INTERRUPTED
            raise
        finally:
            ended = answer.ended if answer.ended is not None else time.perf_counter()
            num_prompt = answer.num_prompt_tokens
            record = RequestRecord(
                request=prepared.number,
                client=client,
                session=request.session,
                num_prompt_tokens=len(request.prompt_ids) if num_prompt is None else num_prompt,
                num_new_tokens=request.num_new_tokens,
                due_s=due_s,
                sent_s=sent - self._began,
                token_times_s=tuple(each - self._began for each in answer.token_times),
                ended_s=ended - self._began,
                num_cached_tokens=answer.num_cached_tokens,
                finish_reason=answer.finish_reason,
                error=error,
            )
            self._records.append(record)
            if request.session is not None:
                self._conversations.answered(request, request.prompt_ids, self.target.ids_of(answer))
            self._progress(len(self._records))
        return record


def _lack(request: PlannedRequest, answer: Answer) -> str | None:
    """Returns what is wrong with an answer that came without an error: it must have exactly as many tokens as it should
    have."""
    found, wanted = len(answer.token_times), request.num_new_tokens
    if found == wanted:
        return None
    reason = "" if answer.finish_reason is None else f" (finish_reason {answer.finish_reason!r})"
    return f"the answer has {found} tokens, not the {wanted} that were asked for{reason}"
