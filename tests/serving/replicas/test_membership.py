"""Replicas that come, fall silent, hang, leave, and differ, as a server deals with them; a test plays them."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from ray.exceptions import RayActorError

from fastgen.errors import FastgenError
from fastgen.serving.engine.messages import Reply, encoder
from fastgen.serving.engine.remote_socket import RemoteAddress
from fastgen.serving.refusals import UnavailableError
from fastgen.serving.replicas import membership
from fastgen.serving.replicas.link import Link
from fastgen.serving.replicas.messages import AttachAnswer
from fastgen.serving.replicas.replica_set import ReplicaSet
from tests.serving.replicas.played import (
    GENERATION,
    WAIT_S,
    Noted,
    PlayedHandle,
    PlayedReplica,
    played_set,
    run,
    submit,
    until,
    until_linked,
    where,
    whole,
)

pytestmark = pytest.mark.usefixtures("quick")


def test_a_replica_that_falls_silent_loses_its_requests_and_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SILENT_S", 0.1)
    monkeypatch.setattr(membership, "LOST_S", 0.3)
    monkeypatch.setattr(membership, "_ATTACH_S", 0.1)

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _noted):
            with beating(a, b):
                request = submit(replicas)
                first = await where(request, a, b)
                other, first_number = (b if first is a else a), request.number
                first.is_silent = True
                assert await where(request, other) is other
                assert request.number != first_number
                for _ in range(4):
                    assert await where(submit(replicas), a, b) is other
                other.finish(request.number, 6)
                assert await whole(request) == [6]
                first.is_silent = False
                await until(
                    lambda: {one.state for one in replicas.replica_views()} == {"ready"} and len(replicas.replicas) == 2
                )
                first.is_silent = True  # and requests come before it is noticed, which it does not answer
                together = [submit(replicas) for _ in range(4)]
                for each in together:
                    assert await where(each, a, b)
                for each in together:
                    await until(lambda each=each: each.number in other.taken)
                assert handle.killed == []
                handle.remove(first.name)  # Ray Serve has noticed, and waits until it has finished its requests
                await until(lambda: handle.killed == [first.name])

    run(test)


def test_a_replica_that_hangs_while_it_finishes_its_requests_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOST_S", 0.3)

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _):
            with beating(a, b):
                request = submit(replicas)
                first = await where(request, a, b)
                handle.remove(first.name)
                await until(lambda: len(replicas.replicas) == 1)
                first.is_silent = True
                assert await where(request, *([b] if first is a else [a]))
                assert handle.killed == [first.name]

    run(test)


def test_a_replica_that_hung_before_the_server_came_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_ATTACH_S", 0.1)

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a) as (replicas, handle, _):
            b.is_silent = True
            handle.add(b)
            await until(lambda: b.num_asked > 1)  # the first time was in vain
            assert (list(replicas.replicas), handle.killed) == (["a"], [])
            handle.remove("b")  # Ray Serve has noticed, and waits until it has finished its requests
            await until(lambda: handle.killed == ["b"])

    run(test)


def test_a_replica_that_ray_no_longer_lists_gets_no_more_requests_and_finishes_those_it_has() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _):
            request = submit(replicas)
            first = await where(request, a, b)
            other = b if first is a else a
            handle.remove(first.name)
            await until(lambda: list(replicas.replicas) == [other.name])
            for _ in range(4):
                assert await where(submit(replicas), a, b) is other
            first.give(request.number, 5)
            assert [news.token_ids for news in await request.news()] == [[5]]
            assert first.links
            first.finish(request.number, 6)
            assert await whole(request) == [6]

            def has_no_link() -> bool:
                first.beat()  # by which it notices
                return not first.links

            await until(has_no_link)

    run(test)


@pytest.mark.parametrize("has_question", [False, True])
def test_a_replica_that_ray_no_longer_lists_is_let_go_once_it_has_nothing_of_the_server(has_question: bool) -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, noted):
            assert await replicas.ask("live", str, replica="a") == "live of a"
            waiting = asyncio.create_task(replicas.ask("nothing", str, replica="a")) if has_question else None
            await until(lambda: len(replicas._questions._open) == has_question)
            handle.remove("a")
            await until(lambda: list(replicas.replicas) == ["b"])
            if waiting is not None:
                assert ("ended", "a") not in noted.notes
                (number,) = replicas._questions._open
                a.send(Reply(number, msgspec.Raw(encoder.encode("late")), None))
                assert await waiting == "late"
            await until(lambda: ("ended", "a") in noted.notes)
            assert (replicas.num_restarts, handle.killed) == (0, [])

    run(test)


@pytest.mark.parametrize("next_comes", [True, False])
def test_the_last_replica_is_used_until_another_is_ready_or_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, next_comes: bool
) -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a) as (replicas, handle, _):
            handle.remove("a")
            await until(lambda: replicas.replicas["a"].unlisted_s > 0.0)
            request = submit(replicas)
            assert await where(request, a) is a
            if next_comes:
                b.is_ready = False
                handle.add(b)
                await until(lambda: "b" in replicas.replicas)
                assert await where(submit(replicas), a, b) is a
                await until_linked(replicas, b)
                assert list(replicas.replicas) == ["b"]
                assert await where(submit(replicas), a, b) is b
            else:
                monkeypatch.setattr(membership, "KEEP_S", 0.0)
                await until(lambda: not replicas.replicas)
                with pytest.raises(UnavailableError, match="no replica is ready"):
                    submit(replicas)
            a.finish(request.number, 5)
            assert await whole(request) == [5]

    run(test)


def test_a_replica_whose_link_is_lost_is_attached_again() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, noted):
            request = submit(replicas)
            await where(request, a)
            a.close()  # the connection, while the actor lives
            first_number = request.number
            await until(lambda: request.number != first_number)
            await where(request, a)
            a.finish(request.number, 6)
            assert await whole(request) == [6]
            assert noted.notes.count(("ready", "a")) == 2

    run(test)


def test_a_replica_whose_engine_cannot_be_reached_loses_its_requests_and_is_attached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_APART_S", 0.1)

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, noted):
            with beating(a, b):
                request = submit(replicas)
                first = await where(request, a, b)
                other, first_number = (b if first is a else a), request.number
                (engine,) = first.engines.values()
                engine.close()  # the connection, while the actor still names its address
                assert await where(request, other) is other
                assert request.number != first_number
                assert not replicas.replicas[first.name].is_ready
                other.finish(request.number, 6)
                assert await whole(request) == [6]
                await until(lambda: first.num_asked == 2)
                await until(lambda: len(replicas.replicas) == 2 and replicas.replicas[first.name].is_ready)
                assert {await where(submit(replicas), a, b) for _ in range(2)} == {a, b}
                assert handle.killed == []
                assert ("ended", first.name) not in noted.notes  # its counters go on

    run(test)


def test_a_server_starts_once_a_replica_has_an_engine() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        a.is_ready = False
        handle = PlayedHandle(a)
        replicas = ReplicaSet(handle, Noted(), generation=GENERATION, router="least_tokens")
        starting = asyncio.create_task(replicas.start())
        async with asyncio.timeout(WAIT_S):
            await until(lambda: "a" in replicas.replicas)
            assert (replicas.state, replicas.facts, starting.done()) == ("starting", None, False)
            with beating(a):
                assert await starting == a.facts
                assert replicas.state == "ready"
                await where(submit(replicas), a)
            await replicas.stop()
        a.close()
        a.context.term()

    run(test)


def test_the_last_tokens_of_an_engine_that_ends_are_taken() -> None:
    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a) as (replicas, _, _noted):
            request = submit(replicas)
            await where(request, a)
            a.finish(request.number, 5)
            time.sleep(0.2)  # it arrives, and the loop has yet to look
            members = replicas._members
            assert members is not None
            members._part(replicas.replicas["a"])
            assert await whole(request) == [5]

    run(test)


def test_a_replica_is_attached_after_errors_that_nothing_foresees(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[zmq.ZMQError] = []

    class Refusing(PlayedReplica):
        async def attach(self, server: str) -> AttachAnswer:
            if len(errors) == 2:
                raise errors.pop()
            return await super().attach(server)

    def connect(self: Link, address: RemoteAddress) -> None:
        if errors:
            raise errors.pop()
        connects(self, address)

    connects = Link.connect
    monkeypatch.setattr(Link, "connect", connect)

    async def test() -> None:
        a, b = PlayedReplica("a"), Refusing("b")
        async with played_set(a) as (replicas, handle, _):
            errors.extend([zmq.ZMQError(errno.EMFILE), zmq.ZMQError(errno.EMFILE)])
            handle.add(b)
            await until(lambda: "b" in replicas.replicas)
            assert (errors, b.num_asked) == ([], 2)
            assert {await where(submit(replicas), a, b) for _ in range(2)} == {a, b}

    run(test)


def test_a_new_replica_is_used_and_a_restarting_engine_is_not() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a) as (replicas, handle, noted):
            handle.add(b)
            await until(lambda: "b" in replicas.replicas)
            await until_linked(replicas, b)
            a.beat(is_ready=False)
            await until(lambda: not replicas.replicas["a"].is_ready)
            assert ("ended", "a") in noted.notes
            for _ in range(4):
                assert await where(submit(replicas), a, b) is b
            b.beat(is_ready=False)
            await until(lambda: replicas.state == "restarting")
            with pytest.raises(UnavailableError, match="no replica is ready: the server is restarting"):
                submit(replicas)
            a.beat(num_restarts=1)
            await until(lambda: replicas.state == "ready")
            assert replicas.num_restarts == 1

    run(test)


def test_another_version_on_a_machine_is_named() -> None:
    async def test() -> None:
        with pytest.raises(FastgenError, match=r"replica a on host of a runs fastgen 0\.0\.1, and the server"):
            async with played_set(PlayedReplica("a", version="0.0.1")):
                pass

    run(test)


def test_a_replica_of_another_version_that_comes_later_is_named_too() -> None:
    async def test() -> None:
        async with played_set(PlayedReplica("a")) as (replicas, handle, _):
            handle.add(PlayedReplica("b", version="0.0.1"))
            assert "replica b on host of b runs fastgen 0.0.1, and the server" in await replicas.failed()

    run(test)


def test_a_silent_replica_gets_requests_only_where_there_is_no_other() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, _):

            def states() -> list[str]:
                return [view.state for view in replicas.replica_views()]

            assert states() == ["ready", "ready"]
            await until_silent(replicas, "a")
            assert states() == ["silent", "ready"]
            for _ in range(4):
                assert await where(submit(replicas), a, b) is b
            handle.remove("b")
            await until(lambda: list(replicas.replicas) == ["a"])
            assert await where(submit(replicas), a, b) is a
            a.beat()
            await until(lambda: states() == ["ready"])

    run(test)


def test_a_pause_of_the_server_itself_is_no_silence_of_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    paused_s = 0.0
    beats: list[float] = []
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + paused_s))

    async def test() -> None:
        nonlocal paused_s
        async with played_set(PlayedReplica("a"), on_beat=lambda: beats.append(paused_s)) as (replicas, _, _noted):
            replica = replicas.replicas["a"]
            await until(lambda: replica.silent_s > 0.0)
            paused_s = 1000.0
            await until(lambda: beats.count(paused_s) >= 2)
            assert replica.silent_s < 1.0
            assert replicas.replicas == {"a": replica}
            assert [view.state for view in replicas.replica_views()] == ["ready"]

    run(test)


@pytest.mark.parametrize("error", [None, RayActorError()], ids=["hung", "died"])
def test_a_replica_that_could_not_be_attached_at_first_is_not_killed_when_it_leaves(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_ATTACH_S", 0.1)

    class Late(PlayedReplica):
        async def attach(self, server: str) -> AttachAnswer:
            if error is None:
                return await super().attach(server)
            self.num_asked += 1
            raise error

    async def test() -> None:
        a, b = PlayedReplica("a"), Late("b")
        async with played_set(a) as (replicas, handle, _):
            b.is_silent = True
            handle.add(b)
            await until(lambda: b.num_asked > 1)
            if error is None:  # it goes on
                b.is_silent = False
                await until(lambda: "b" in replicas.replicas)
            handle.remove("b")
            members = replicas._members
            assert members is not None
            await until(lambda: members._ids == {"a"})
            assert handle.killed == []

    run(test)


def test_a_replica_that_dies_while_it_finishes_its_requests_is_a_loss() -> None:
    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b) as (replicas, handle, noted):
            request = submit(replicas)
            first = await where(request, a, b)
            other = b if first is a else a
            handle.remove(first.name)
            await until(lambda: list(replicas.replicas) == [other.name])
            for link in first.links.values():
                link.close()
            assert await where(request, other) is other
            assert ("ended", first.name) in noted.notes
            assert (replicas.num_restarts, handle.killed) == (1, [])

    run(test)


def test_what_an_engine_held_that_is_gone_is_forgotten_by_the_router() -> None:
    prompt = tuple(range(64))

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b, router="prefix") as (replicas, _, _noted):

            async def answered(*prompt_ids: int) -> PlayedReplica:
                request = submit(replicas, *prompt_ids)
                place = await where(request, a, b)
                place.finish(request.number, 6)
                assert await whole(request) == [6]
                return place

            some = await answered(*prompt[:32])
            await until_silent(replicas, some.name)
            most = await answered(*prompt)
            some.beat()
            await until(lambda: {view.state for view in replicas.replica_views()} == {"ready"})
            assert (await answered(*prompt, 1), some is most) == (most, False)
            most.restart()
            replica = replicas.replicas[most.name]
            await until(lambda: replica.num_restarts == 1 and replica.is_ready)
            assert await answered(*prompt, 2) is some

    run(test)


async def until_silent(replicas: ReplicaSet, name: str) -> None:
    """Waits until what a replica has sent was heard, and makes it one that was not heard for some seconds since."""
    replica = replicas.replicas[name]
    await until(lambda: replica.silent_s > 0.05)
    replica.silent_s = membership.SILENT_S + 1.0
    await until(lambda: "silent" in {view.state for view in replicas.replica_views() if view.id == name})


@contextmanager
def beating(*replicas: PlayedReplica) -> Iterator[None]:
    """Lets the replicas report their state until the block is left."""
    tasks = [asyncio.create_task(_beat(replica)) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _beat(replica: PlayedReplica) -> None:
    while True:
        replica.beat()
        await asyncio.sleep(0.02)


def test_a_replica_is_apart_only_while_its_engine_waits_and_cannot_be_reached() -> None:
    num_beats = 0

    def count() -> None:
        nonlocal num_beats
        num_beats += 1

    async def watched() -> None:
        until_beat = num_beats + 4
        await until(lambda: num_beats >= until_beat)

    async def test() -> None:
        a = PlayedReplica("a")
        async with played_set(a, on_beat=count) as (replicas, _, _noted):
            replica = replicas.replicas["a"]
            await watched()
            assert (replica.is_ready, replica.apart_s) == (True, 0.0)
            a.beat(is_ready=False)  # the engine has ended, and another is started
            await until(lambda: not replica.is_ready)
            await watched()
            assert (replica.address, replica.apart_s, replica.unlisted_s) == (None, 0.0, 0.0)
            a.beat(num_restarts=1)
            await until(lambda: replica.is_ready)
            assert replica.engine is not None
            replica.engine.close()
            replica.engine = None
            await watched()
            assert replica.apart_s > 0.0

    run(test)


def test_a_replica_may_take_as_long_to_answer_a_server_as_it_may_be_silent() -> None:
    assert membership._ATTACH_S == membership.LOST_S == 10.0


def test_the_silence_of_a_replica_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    num_beats = 0

    def count() -> None:
        nonlocal num_beats
        num_beats += 1

    def silences() -> list[str]:
        return [each for each in caplog.messages if "was not heard" in each]

    async def test() -> None:
        a, b = PlayedReplica("a"), PlayedReplica("b")
        async with played_set(a, b, on_beat=count) as (replicas, _, _noted):
            await until(lambda: num_beats >= 4)
            assert silences() == []
            await until_silent(replicas, "a")
            before = num_beats
            await until(lambda: num_beats >= before + 4)
            (said,) = silences()
            assert said.startswith("replica a was not heard for 4.")

    run(test)
