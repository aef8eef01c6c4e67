"""Questions that simultaneous requests share."""

from __future__ import annotations

import asyncio

import pytest

from fastgen.serving.http.shared_query import SharedQueries
from fastgen.serving.refusals import UnavailableError


def test_each_engine_is_asked_once_for_all_that_wait_and_no_answer_is_kept() -> None:
    asked: list[str | None] = []

    async def ask(replica: str | None) -> str:
        asked.append(replica)
        await asyncio.sleep(0)
        return f"recording {len(asked)} of {replica}"

    async def run() -> None:
        queries = SharedQueries(ask)
        for turn in range(2):
            found = await asyncio.gather(*(queries.take(replica) for replica in ("a", "b", "a", None)))
            assert found[0] == found[2] == f"recording {3 * turn + 3} of a"
        assert asked == ["a", "b", None] * 2
        await asyncio.sleep(0)
        assert not queries._asked, "an answer, or a replica that may be gone by now, is kept"

    asyncio.run(run())


def test_a_failed_question_is_asked_anew() -> None:
    num_asked = 0

    async def ask(replica: str | None) -> str:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise UnavailableError("gone")
        return "here"

    async def run() -> None:
        queries = SharedQueries(ask)
        with pytest.raises(UnavailableError):
            await queries.take(None)
        await asyncio.sleep(0)
        assert await queries.take(None) == "here"

    asyncio.run(run())


def test_one_that_leaves_takes_the_answer_from_none_of_the_others() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()

        async def ask(replica: str | None) -> str:
            await may_answer.wait()
            return "here"

        queries = SharedQueries(ask)
        first, second = (asyncio.create_task(queries.take(None)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        may_answer.set()
        assert await second == "here"

    asyncio.run(run())
