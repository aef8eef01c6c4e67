"""The open requests of a server, and what the reports of engines mean for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastgen.errors import GenerationError
from fastgen.serving.engine.messages import Report
from fastgen.serving.engine.request import EngineRequest, EngineWatcher
from fastgen.serving.refusals import BadRequestError


class OpenRequests:
    """Holds the requests that have not ended, by their numbers. ``on_answered`` is called when an engine has ended an
    answer by itself.
    """

    def __init__(self, watcher: EngineWatcher, on_answered: Callable[[], None] = lambda: None):
        self._watcher, self._on_answered = watcher, on_answered
        self._requests: dict[int, EngineRequest] = {}
        # Requests with news of which those that wait for them do not know, in the order of the news.
        self._with_news: dict[EngineRequest, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(list(self._requests.values()))

    def __contains__(self, request: EngineRequest) -> bool:
        return self._requests.get(request.number) is request

    def add(self, request: EngineRequest) -> None:
        """Adds ``request``, which was sent to an engine."""
        self._requests[request.number] = request

    def numbered(self, number: int) -> EngineRequest | None:
        """Returns the request with this number, if it is open."""
        return self._requests.get(number)

    def renumber(self, request: EngineRequest, number: int) -> None:
        """Lets ``request`` begin again under another number."""
        del self._requests[request.number]
        request.begin_again(number)
        self.add(request)

    def drop(self, request: EngineRequest) -> bool:
        """Forgets ``request``. Returns whether it was open."""
        if self._requests.pop(request.number, None) is None:
            return False
        if request.num_open:
            self._watcher.request_gone(request)
        return True

    def take(self, report: Report) -> None:
        """Adds the news in ``report`` to the open requests; :meth:`tell` tells who waits for them. News of other
        requests are ignored.
        """
        for number in report.started:
            if (request := self._requests.get(number)) is not None:
                self._start(request)
        tokens = iter(report.tokens)
        for number, token_id in zip(tokens, tokens, strict=True):
            if (request := self._requests.get(number)) is not None:
                if not request.has_started:
                    self._start(request)
                request.add_token(token_id)
                self._with_news[request] = None
        for progress in report.progress:
            if (request := self._requests.get(progress.number)) is not None:
                if progress.token_ids and not request.has_started:
                    self._start(request)
                request.add(progress)
                self._with_news[request] = None
                if progress.end is not None:
                    if progress.end.reason in ("stop", "length"):
                        self._on_answered()
                    self._watcher.completion_ended(request, progress)
                    if not request.num_open:
                        self._watcher.request_gone(request)
        for refused in report.refused:
            if (request := self._requests.get(refused.number)) is not None:
                failure = GenerationError(refused.error) if refused.is_failure else BadRequestError(refused.error)
                request.fail(failure)
                self.drop(request)

    def tell(self) -> None:
        """Lets those that wait for news go on with them before this returns, if the caller is no task. In a later turn
        of the event loop tokens would wait for all that is to be done before.
        """
        with_news, self._with_news = self._with_news, {}
        for request in with_news:
            request.tell()

    def _start(self, request: EngineRequest) -> None:
        request.has_started = True
        self._watcher.request_started(request)
