"""The requests of a server in replicas that a test plays: answers, faults, and what is told of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fastgen.errors import GenerationError
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import Answers
from fastgen.serving.engine.messages import Refused, Reply, Report, Status, encoder
from fastgen.serving.refusals import BadRequestError, EngineDiedError, UnavailableError
from fastgen.serving.replicas import replica_set
from fastgen.serving.replicas.replica_set import ReplicaSet
from fastgen.serving.replicas.routing_table import RoutingTable
from fastgen.serving.service import Running
from tests.serving.fake_engine import FACTS
from tests.serving.replicas.played import (
    GENERATION,
    SAMPLING,
    Noted,
    PlayedHandle,
    PlayedReplica,
    played_set,
    run,
    submit,
    until,
    where,
    whole,
)

pytestmark = pytest.mark.usefixtures("quick")


def test_requests_are_spread_over_replicas_and_answered() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, _, noted):
            requests = [submit(replicas) for _ in range(8)]
            places = [await where(request, a, b) for request in requests]
            assert (len(a.taken), len(b.taken)) == (4, 4)
            tokens = [view.outstanding_tokens for view in replicas.replica_views()]
            assert tokens[0] == tokens[1] > 4 * 3
            for number, (request, place) in enumerate(zip(requests, places, strict=True)):
                assert place.taken[request.number].prompt_ids == [1, 2, 3]
                place.give(request.number, 10 + number, 20 + number)
                place.finish(request.number, 30 + number)
            for number, request in enumerate(requests):
                assert await whole(request) == [10 + number, 20 + number, 30 + number]
                replicas.finish(request)
            assert replicas.num_open == 0
            await until(lambda: not any(view.outstanding_tokens for view in replicas.replica_views()))
            assert noted.notes.count(("routed", "a")) == 4
            assert noted.num_gone == 8

    run(test)


def test_a_request_whose_replica_dies_before_its_first_token_is_answered_by_another() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, noted):
            request = submit(replicas)
            first = await where(request, a, b)
            first_number = request.number
            other = b if first is a else a
            first.close()
            handle.remove(first.name)
            assert await where(request, other) is other
            assert request.number != first_number
            other.give(request.number, 5)
            other.finish(request.number, 6)
            assert await whole(request) == [5, 6]
            assert replicas.place_of(first_number) == (other.name, request.number)
            assert ("ended", first.name) in noted.notes
            assert list(replicas.replicas) == [other.name]
            assert replicas.num_restarts == 1

    run(test)


def test_late_tokens_of_the_first_replica_are_not_taken_for_those_of_the_second() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, _, _noted):
            request = submit(replicas)
            first = await where(request, a, b)
            first_number = request.number
            first.restart()
            await until(lambda: request.number != first_number)
            second = await where(request, a, b)
            first.give(first_number, 98, 99)  # was on its way when the engine ended
            second.give(request.number, 5)
            second.finish(request.number, 6)
            assert await whole(request) == [5, 6]

    run(test)


def test_tokens_that_nobody_took_do_not_keep_a_request_from_beginning_again() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _):
            request = submit(replicas)
            first = await where(request, a, b)
            first.give(request.number, 7)
            await until(lambda: request.has_started)
            first.close()
            handle.remove(first.name)
            second = await where(request, *([b] if first is a else [a]))
            second.finish(request.number, 8)
            assert await whole(request) == [8]

    run(test)


def test_a_request_that_was_read_fails_with_its_replica() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, _, noted):
            request = submit(replicas)
            first = await where(request, a, b)
            first.give(request.number, 7)
            (news,) = await request.news()
            assert news.token_ids == [7]
            first.close()
            with pytest.raises(EngineDiedError, match=rf"engine of replica {first.name} ended while .*; send it again"):
                await request.news()
            assert (replicas.num_open, noted.num_gone) == (0, 1)

    run(test)


def test_an_answer_that_is_not_streamed_begins_again_until_all_its_completions_have_ended() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, noted):
            two = replace(SAMPLING, n=2)
            request = submit(replicas, sampling=two)
            codec = TextCodec(None, eos_token_ids=frozenset(), default_sampling=SAMPLING)
            service: Any = SimpleNamespace(engine=replicas)
            waiting = asyncio.create_task(Running(service, request, Answers([1, 2, 3], two, codec)).output())
            first = await where(request, a, b)
            first.give(request.number, 7)
            first.finish(request.number, 8)
            await until(lambda: request.num_open == 1)
            first.close()
            handle.remove(first.name)
            second = await where(request, *([b] if first is a else [a]))
            second.finish(request.number, 5, index=1)
            second.finish(request.number, 6)
            output = await waiting
            assert [each.token_ids for each in (output, *output.others)] == [[6], [5]]
            assert (replicas.num_open, noted.num_gone) == (0, 1)

    run(test)


def test_a_request_that_ends_every_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_FIRST_DELAY_S", 0.0)

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, _, _noted):
            request = submit(replicas)
            for _ in range(replica_set.MAX_TRIES):
                number = request.number
                place = await where(request, a, b)
                place.restart()
                await until(lambda number=number: request.number != number or not replicas.num_open)
            with pytest.raises(EngineDiedError, match=r"the engine of replica . ended while .*; send it again"):
                await request.news()
            assert len(a.taken) + len(b.taken) == replica_set.MAX_TRIES

    run(test)


def test_the_pauses_between_tries_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def sleep_and_note(delay_s: float) -> None:
        if delay_s >= 0.04:  # others here are shorter
            pauses.append(delay_s)
        await sleep(min(delay_s, 0.01))

    monkeypatch.setattr(asyncio, "sleep", sleep_and_note)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            request = submit(replicas)
            for _ in range(6):
                number = request.number
                await where(request, a)
                a.restart()
                await until(lambda number=number: request.number != number or not replicas.num_open)
            assert pauses == [0.04, 0.08, 0.16, 0.32, 0.64]

    run(test)


def test_a_lost_request_waits_until_an_engine_is_ready_again() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            request = submit(replicas)
            await where(request, a)
            first_number = request.number
            a.beat(is_ready=False)
            await until(lambda: request.number != first_number and request.number in replicas._runs)
            assert replicas._routes is not None
            assert replicas._routes.rank(request.number) == []
            assert list(a.taken) == [first_number]
            a.beat(num_restarts=1)
            await where(request, a)
            a.finish(request.number, 6)
            assert await whole(request) == [6]

    run(test)


def test_a_lost_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_MIN_WAIT_S", 0.1)
    monkeypatch.setattr(replica_set, "_WAIT_LOADS", 0)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, noted):
            request = submit(replicas)
            await where(request, a)
            handle.remove("a")
            a.close()
            with pytest.raises(UnavailableError, match=r"no replica was ready for 0 s; try again later") as refused:
                await request.news()
            assert refused.value.retry_after_s == FACTS.load_s
            assert (replicas.num_open, noted.num_gone) == (0, 1)

    run(test)


def test_a_request_waits_as_long_as_replicas_take_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_MIN_WAIT_S", 0.0)
    monkeypatch.setattr(replica_set, "_WAIT_LOADS", 0.4 / FACTS.load_s)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, _):
            request = submit(replicas)
            await where(request, a)
            handle.remove("a")
            a.close()
            began_s = time.monotonic()
            with pytest.raises(UnavailableError, match="no replica was ready"):
                await request.news()
            assert time.monotonic() - began_s > 0.3

    run(test)


def test_a_request_that_an_engine_refuses_ends_with_the_reason() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, noted):
            request = submit(replicas)
            await where(request, a)
            a.send(Report([], [], [], [Refused(request.number, "the prompt is too long")], None))
            with pytest.raises(BadRequestError, match="the prompt is too long"):
                await request.news()
            assert (replicas.num_open, noted.num_gone) == (0, 1)
            await until(lambda: handle.num_requests == {"a": 0})
            assert [view.outstanding_tokens for view in replicas.replica_views()] == [0]
            assert replicas.num_restarts == 0, "not because the replica was lost"

    run(test)


def test_a_cancelled_request_is_cancelled_at_its_replica() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, noted):
            request = submit(replicas)
            await where(request, a)
            replicas.cancel(request)
            await until(lambda: a.cancelled == [request.number])
            assert (replicas.num_open, noted.num_gone) == (0, 1)

    run(test)


def test_a_request_that_is_cancelled_at_once_leaves_nothing_behind() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, noted):
            replicas.cancel(submit(replicas))
            await until(lambda: not replicas._sending)
            assert (replicas.num_open, noted.num_gone, a.taken) == (0, 1, {})

    run(test)


def test_a_request_that_cannot_be_sent_fails() -> None:
    async def test() -> None:
        def fail(replica: str) -> None:
            raise RuntimeError("no place to count it")

        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, noted):
            handle.began = fail  # type: ignore[method-assign]
            with pytest.raises(GenerationError, match="could not be sent to a replica: no place to count it"):
                await submit(replicas).news()
            assert (replicas.num_open, noted.num_gone) == (0, 1)

    run(test)


def test_ray_serve_counts_a_request_from_its_sending_to_its_end() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, handle, _):
            requests = [submit(replicas) for _ in range(3)]
            for request in requests:
                await where(request, a)
            assert handle.num_requests == {"a": 3}
            a.finish(requests[0].number, 5)
            replicas.cancel(requests[1])
            a.restart()
            await until(lambda: requests[2].number in a.taken and len(a.taken) == 4)
            await until(lambda: handle.num_requests == {"a": 1})
            a.finish(requests[2].number, 5)
            await until(lambda: handle.num_requests == {"a": 0})

    run(test)


def test_sessions_and_prefixes_stay_at_a_replica() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b, router="prefix") as (replicas, _, _noted):

            async def answered(*prompt_ids: int, session: str | None = None) -> PlayedReplica:
                request = submit(replicas, *prompt_ids, session=session)
                place = await where(request, a, b)
                place.finish(request.number, 6)
                assert await whole(request) == [6]
                replicas.finish(request)
                return place

            long = list(range(64))
            first = await answered(*long)
            assert await answered(*long, 1, 2, 3) is first
            own = await answered(9, session="s")
            for number in range(4):
                assert await answered(number, session="s") is own

    run(test)


def test_the_load_of_replicas_is_told_for_each_and_for_all_together() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(b, a) as (replicas, _, _noted):
            assert replicas.status == Status(2, 4, 6)
            views = replicas.replica_views()
            assert [(each.id, each.host, each.num_running, each.num_waiting) for each in views] == [
                ("a", "host of a", 1, 2),
                ("b", "host of b", 1, 2),
            ]
            assert await where(submit(replicas, 1, 2, 3, sampling=replace(SAMPLING, n=5)), a, b) is a
            tokens = [each.outstanding_tokens for each in replicas.replica_views()]
            assert tokens == [3 + 5 * SAMPLING.max_new_tokens, 0]
        assert replicas.state == "stopped"
        assert RoutingTable.current is None
        with pytest.raises(UnavailableError, match="the server is stopped"):
            submit(replicas)

    run(test)


def test_clients_are_told_to_wait_as_long_as_an_engine_takes_to_load() -> None:
    async def test() -> None:
        with pytest.raises(UnavailableError, match="the server is starting") as unknown:
            ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION).check_ready()
        assert unknown.value.retry_after_s == 1.0
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            a.beat(is_ready=False)
            await until(lambda: replicas.state == "restarting")
            with pytest.raises(UnavailableError, match="the server is restarting") as known:
                replicas.check_ready()
            assert known.value.retry_after_s == FACTS.load_s

    run(test)


def test_the_replicas_of_the_last_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_MAX_PLACES", 2)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            numbers = []
            for _ in range(3):
                request = submit(replicas)
                await where(request, a)
                numbers.append(request.number)
            assert [replicas.place_of(number) for number in numbers] == [None, *(("a", each) for each in numbers[1:])]

    run(test)


def test_an_answer_that_comes_twice_or_to_nobody_does_no_harm() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            waiting = asyncio.create_task(replicas.ask("nothing", str))
            await until(lambda: replicas._questions._open)
            (number,) = replicas._questions._open
            for text in ("first", "second"):
                replicas._take(Reply(number, msgspec.Raw(encoder.encode(text)), None))
            assert await waiting == "first"
            replicas._take(Reply(number, msgspec.Raw(encoder.encode("third")), None))
            assert replicas.replicas["a"].num_requests == 0

    run(test)


def test_questions_go_to_the_replica_that_is_named() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _noted):
            assert await replicas.ask("live", str, replica="b") == "live of b"
            assert await replicas.ask("live", str) == "live of a"
            with pytest.raises(GenerationError, match="cannot be checked"):
                await replicas.refusal([1], SAMPLING)
            with pytest.raises(UnavailableError, match="this replica is not there"):
                await replicas.ask("live", str, replica="c")
            waiting = asyncio.create_task(replicas.ask("nothing", str, replica="b"))
            handle.remove("b")  # its link remains while a question is open
            await until(lambda: list(replicas.replicas) == ["a"])
            b.close()
            with pytest.raises(EngineDiedError, match="replica b ended"):
                await waiting
            waiting = asyncio.create_task(replicas.ask("nothing", str, replica="a"))
            await asyncio.sleep(0.01)
            await replicas.stop()
            with pytest.raises(UnavailableError, match="the server is ending"):
                await waiting

    run(test)


def test_before_it_is_started_a_set_has_nothing() -> None:
    found = ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION)
    assert (found.state, found.facts, found.replicas, found.replica_views()) == ("starting", None, {}, [])
    assert (found.num_restarts, found.num_open, found.status) == (0, 0, Status(0, 0, 0))
    assert found.place_of(1) is None


@pytest.mark.parametrize(("load_s", "waited_s"), [(5.0, 60), (19.0, 60), (30.0, 90), (200.0, 600)])
def test_a_request_waits_three_times_as_long_as_loading_took_and_at_least_a_minute(
    load_s: float, waited_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += 0.5

    async def test() -> None:
        found = ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION)
        facts = asyncio.get_running_loop().create_future()
        facts.set_result(msgspec.structs.replace(FACTS, load_s=load_s))
        members: Any = SimpleNamespace(facts=facts, replicas={})
        found._members, found._routes = members, RoutingTable(lambda ids: None)
        monkeypatch.setattr(replica_set, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(replica_set, "asyncio", SimpleNamespace(sleep=sleep))
        with pytest.raises(
            UnavailableError, match=f"no replica was ready for {waited_s} s; try again later"
        ) as refused:
            await found._choose(1)
        assert refused.value.retry_after_s == load_s
        assert now_s == 1000.0 + waited_s + 0.5

    run(test)


def test_the_places_of_10000_requests_are_remembered() -> None:
    found = ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION)
    for number in range(10_002):
        found._remember(number, "a")
    assert [found.place_of(number) for number in (0, 1, 2, 10_001)] == [None, None, ("a", 2), ("a", 10_001)]


def test_servers_number_their_requests_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda num_bits: 2**num_bits - 1)
    found = ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION)
    first = next(found._numbers)
    assert first % 16_777_216 == 0, "16 million numbers are a server's own"
    assert first == 4_611_686_018_410_610_688, "and many servers have other ones"
    assert next(found._numbers) == first + 1


def test_the_answer_counts_at_a_replica_by_all_its_tokens() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            request = submit(replicas, 1, 2, 3, 4, sampling=replace(SAMPLING, max_new_tokens=5, n=3))
            await where(request, a)
            least = replicas.replica_views()[0].outstanding_tokens
            replicas.cancel(request)
            request = submit(replicas, 1, 2, 3, 4, sampling=replace(SAMPLING, max_new_tokens=15))
            await where(request, a)
            await until(lambda: len(replicas._runs) == 1)
            assert replicas.replica_views()[0].outstanding_tokens == least
            replicas.cancel(request)
            request = submit(replicas, 1, 2, 3, 4, sampling=replace(SAMPLING, max_new_tokens=16))
            await where(request, a)
            await until(lambda: len(replicas._runs) == 1)
            assert replicas.replica_views()[0].outstanding_tokens > least

    run(test)


def test_the_table_of_another_server_in_the_process_remains() -> None:
    async def test() -> None:
        for its in (None, RoutingTable(lambda ids: None)):
            other = RoutingTable(lambda ids: None)
            for current, left in ((other, other), (its, None)):
                found = ReplicaSet(PlayedHandle(), Noted(), generation=GENERATION)
                found._routes, RoutingTable.current = its, current
                await found.stop()
                assert RoutingTable.current is left

    run(test)
