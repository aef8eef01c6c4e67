"""The questions of a server to its replicas: each is answered by the replica that it was sent to, or fails with it."""

from __future__ import annotations

import asyncio

import msgspec

from fastgen.errors import GenerationError
from fastgen.serving.engine.messages import Ask, Check, Reply, encoder
from fastgen.serving.refusals import EngineDiedError
from fastgen.serving.replicas.membership import Replica


class Questions:
    """Holds the questions that have no answer yet. All methods belong to one event loop."""

    def __init__(self) -> None:
        # The replicas that they went to, and their answers, by their numbers.
        self._open: dict[int, tuple[Replica, asyncio.Future[msgspec.Raw]]] = {}

    async def ask(self, replica: Replica, message: Ask | Check) -> msgspec.Raw:
        """Sends a question to ``replica`` and returns its answer. Raises ``EngineDiedError`` if the replica or its
        engine ends before it has answered, and ``GenerationError`` if it cannot answer.
        """
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open[message.number] = replica, answer
        replica.num_requests += 1
        try:
            replica.send(encoder.encode(message))
            return await answer
        finally:
            del self._open[message.number]
            replica.num_requests -= 1

    def take(self, reply: Reply) -> None:
        """Takes an answer. One to a question that is no longer open is ignored."""
        if reply.error is not None:
            self._fail(reply.number, GenerationError(reply.error))
        elif (answer := self._answer_to(reply.number)) is not None:
            answer.set_result(reply.body)

    def lose(self, replica: Replica, why: str) -> None:
        """Ends the questions that ``replica`` has not answered."""
        for number, (asked, _) in self._open.items():
            if asked is replica:
                self._fail(number, EngineDiedError(why))

    def fail_all(self, failure: Exception) -> None:
        """Ends all questions with ``failure``."""
        for number in self._open:
            self._fail(number, failure)

    def _fail(self, number: int, failure: Exception) -> None:
        if (answer := self._answer_to(number)) is not None:
            answer.set_exception(failure)

    def _answer_to(self, number: int) -> asyncio.Future[msgspec.Raw] | None:
        _, answer = self._open.get(number, (None, None))
        return None if answer is None or answer.done() else answer
