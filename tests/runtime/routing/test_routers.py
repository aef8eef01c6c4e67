"""Routers over random histories: what counts where, what comes first, and what is forgotten."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.routing import ROUTERS, RoutedRequest, Router, block_hashes, make_router, prefix
from fastgen.runtime.routing.block_hashes import MAX_HASHED_BLOCKS
from fastgen.runtime.routing.known_blocks import KNOWN_BLOCKS, KnownBlocks
from fastgen.runtime.routing.prefix import MAX_SESSIONS, PrefixAffinity
from fastgen.runtime.routing.router import ReplicaLoad
from tests.pages import DOCS

BLOCK = 16
REPLICAS = [f"replica {number}" for number in range(5)]


def request(prompt_ids: Sequence[int], num_new: int = 50, session: str | None = None) -> RoutedRequest:
    return RoutedRequest(len(prompt_ids), num_new, block_hashes(prompt_ids, BLOCK), session)


def text(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(num_tokens)]


def drawn(draw: random.Random) -> RoutedRequest:
    """Returns a request; some prompts begin alike, some have sessions, some have neither blocks nor tokens."""
    prompt = text(draw.randrange(4), draw.choice([0, 5, 40, 200])) + text(draw.randrange(10**6), draw.randrange(60))
    return request(prompt, draw.randrange(100), draw.choice([None, "a", "b"]))


@pytest.mark.parametrize("name", list(ROUTERS))
@given(seed=st.integers(0, 2**32))
def test_outstanding_tokens_are_those_of_the_open_requests(name: str, seed: int) -> None:
    draw, router = random.Random(seed), make_router(name, block_size=BLOCK, num_blocks=64)
    counted: list[tuple[RoutedRequest, str]] = []  # open, and neither ended nor forgotten
    ended: list[tuple[RoutedRequest, str]] = []
    for _ in range(60):
        event = draw.choice(["send", "send", "end", "end again", "forget", "send again"])
        if event == "send":
            new = drawn(draw)
            before = {replica: router.outstanding(replica) for replica in REPLICAS}
            ranked = router.rank(new, REPLICAS)
            assert sorted(ranked) == REPLICAS
            assert {replica: router.outstanding(replica) for replica in REPLICAS} == before
            router.sent(new, ranked[0])
            counted.append((new, ranked[0]))
        elif event == "send again" and counted:  # elsewhere, after a failure
            again, replica = draw.choice(counted)
            other = draw.choice(REPLICAS)
            router.sent(again, other)
            if (again, other) not in counted:
                counted.append((again, other))
        elif event == "end" and counted:
            counted.remove(gone := draw.choice(counted))
            router.ended(*gone)
            ended.append(gone)
        elif event == "end again" and ended and (gone := draw.choice(ended)) not in counted:
            router.ended(*gone)
        elif event == "forget":
            replica = draw.choice(REPLICAS)
            router.forget(replica)
            ended += [each for each in counted if each[1] == replica]
            counted = [each for each in counted if each[1] != replica]
            assert router.outstanding(replica) == 0
        for replica in REPLICAS:
            here = [each for each, at in counted if at == replica]
            most = sum(each.num_prompt_tokens + each.num_new_tokens for each in here)
            least = most if name != "prefix" else sum(each.num_new_tokens for each in here)
            assert least <= router.outstanding(replica) <= most
    for gone in counted:
        router.ended(*gone)
    assert [router.outstanding(replica) for replica in REPLICAS] == [0] * len(REPLICAS)


def test_round_robin_takes_replicas_in_turn() -> None:
    router = make_router("round_robin", block_size=BLOCK)
    taken = []
    for _ in range(10):
        each = request([1])
        taken.append(router.rank(each, REPLICAS)[0])
        assert router.rank(each, REPLICAS)[0] == taken[-1], "a request that is only ranked takes no turn"
        router.sent(each, taken[-1])
    assert taken == REPLICAS * 2
    assert router.rank(request([1]), []) == []


def test_random_takes_every_replica_and_repeats_with_its_seed() -> None:
    def taken(seed: int) -> list[str]:
        router = make_router("random", block_size=BLOCK, seed=seed)
        return [router.rank(request([1]), REPLICAS)[0] for _ in range(100)]

    assert set(taken(0)) == set(REPLICAS)
    assert taken(0) == taken(0) != taken(1)


@pytest.mark.parametrize("name", ["least_tokens", "prefix"])
def test_the_fewest_tokens_come_first_and_equal_ones_take_turns(name: str) -> None:
    router = make_router(name, block_size=BLOCK)
    for number, replica in enumerate(REPLICAS):
        router.sent(request(text(100 + number, 100 * (5 - number))), replica)
    assert router.rank(request(text(0, 300)), REPLICAS) == REPLICAS[::-1]
    idle = make_router(name, block_size=BLOCK)
    first = request(text(1, 10))
    idle.sent(first, idle.rank(first, REPLICAS)[0])
    idle.ended(first, REPLICAS[0])
    assert idle.rank(request(text(2, 10)), REPLICAS)[0] != REPLICAS[0], "it was sent the last request"


def holder_of(prompt: Sequence[int], replica: str, session: str | None = None) -> PrefixAffinity:
    """Returns a router that has sent ``prompt`` to ``replica``, where it was answered with 50 tokens."""
    router = PrefixAffinity(block_size=BLOCK)
    before = request(prompt, session=session)
    router.sent(before, replica)
    router.ended(before, replica)
    return router


@pytest.mark.parametrize(("num_held", "num_prompt"), [(160, 160), (320, 400), (16, 480)])
def test_affinity_wins_up_to_its_margin(num_held: int, num_prompt: int) -> None:
    """The margin: a token for each that is held, and the held share of the least outstanding tokens."""
    own, least = REPLICAS[2], 1000
    beginning = text(1, num_held)
    router = PrefixAffinity(block_size=BLOCK)
    before = request(beginning + text(2, 100))
    router.sent(before, own)
    router.ended(before, own)
    new = request(beginning + text(3, num_prompt - num_held))
    for replica in REPLICAS:
        router.sent(request([], least), replica)
    margin = num_held + least * num_held // num_prompt
    more = request([], margin - 1)
    router.sent(more, own)
    assert router.rank(new, REPLICAS)[0] == own, "as busy as the margin allows"
    router.sent(request([], 2), own)
    assert router.rank(new, REPLICAS)[0] != own, "busier than that"
    router.ended(more, own)
    assert router.rank(new, REPLICAS)[0] == own


def test_the_replica_that_holds_more_of_the_prompt_comes_first() -> None:
    router, prompt = holder_of(text(1, 64), REPLICAS[1]), text(1, 320)
    longer = request(prompt[:160])
    router.sent(longer, REPLICAS[3])
    router.ended(longer, REPLICAS[3])
    assert router.rank(request(prompt), REPLICAS)[:2] == [REPLICAS[3], REPLICAS[1]]
    assert router.rank(request(text(2, 320)), REPLICAS)[0] not in (REPLICAS[1], REPLICAS[3]), "nothing is known of it"


def test_a_frequent_prefix_spreads_before_its_replicas_are_far_busier_than_others() -> None:
    """With thirty prompts of one prefix open at once and nothing else to do, all replicas share them."""
    router, prefix = make_router("prefix", block_size=BLOCK), text(1, 640)
    for number in range(30):
        each = request(prefix + text(100 + number, 40), num_new=20)
        router.sent(each, router.rank(each, REPLICAS)[0])
    counts = [router.outstanding(replica) for replica in REPLICAS]
    assert min(counts) >= 680 + 20, "every replica has learned the prefix"
    assert max(counts) < 2 * min(counts) + 680, "and none is busier than the margin allows"


def test_what_a_replica_holds_is_not_outstanding_there() -> None:
    prompt = text(1, 320)
    router = holder_of(prompt, REPLICAS[0])
    again = request(prompt + text(3, 200), num_new=30)
    router.sent(again, REPLICAS[0])
    router.sent(again, REPLICAS[1])
    assert router.outstanding(REPLICAS[0]) == 200 - 50 + 30, "the prompt and the answer to it, 50 tokens, are held"
    assert router.outstanding(REPLICAS[1]) == 520 + 30


def test_sessions_stay_where_they_were_also_without_common_blocks() -> None:
    router = holder_of(text(1, 10), REPLICAS[4], session="chat")
    assert router.rank(request(text(7, 300), session="chat"), REPLICAS)[0] == REPLICAS[4]
    assert router.rank(request(text(7, 300), session="other"), REPLICAS)[0] != REPLICAS[4]
    router.sent(request([], 10_000), REPLICAS[4])
    moved = request(text(7, 300), session="chat")
    ranked = router.rank(moved, REPLICAS)
    assert ranked[0] != REPLICAS[4], "it is too busy"
    router.sent(moved, ranked[0])
    router.ended(moved, ranked[0])
    assert router.rank(request(text(8, 300), session="chat"), REPLICAS)[0] == ranked[0], "it stays where it moved to"


@pytest.mark.parametrize(("num_known", "num_new", "num_held"), [(320, 10, 320), (32, 248, 280)])
def test_a_replica_holds_the_longer_of_a_session_and_of_the_known_blocks(
    num_known: int, num_new: int, num_held: int
) -> None:
    """It is first while its outstanding tokens are fewer than those that it holds. The session has 32 prompt tokens."""
    router, prompt, own = PrefixAffinity(block_size=BLOCK), text(1, 320), REPLICAS[4]
    for before in (request(prompt[:num_known], 0), request(text(2, 32), num_new, session="chat")):
        router.sent(before, own)
        router.ended(before, own)
    again = request(prompt, session="chat")
    router.sent(request([], num_held - 1), own)
    assert router.rank(again, REPLICAS)[0] == own
    router.sent(request([], 1), own)
    assert router.rank(again, REPLICAS)[-1] == own
    router.forget(own)
    for before in (request(prompt[:num_known], 0), request(text(2, 32), num_new, session="chat")):
        router.sent(before, own)
        router.ended(before, own)
    router.sent(again, own)
    assert router.outstanding(own) == 320 - num_held + 50


def test_a_forgotten_replica_is_learned_again() -> None:
    prompt = text(1, 320)
    router = holder_of(prompt, REPLICAS[2], session="chat")
    again = request(prompt, session="chat")
    router.sent(again, REPLICAS[2])
    router.forget(REPLICAS[2])
    router.ended(again, REPLICAS[2])
    assert router.outstanding(REPLICAS[2]) == 0
    busy = request([], 1)
    router.sent(busy, REPLICAS[2])
    assert router.rank(request(prompt, session="chat"), REPLICAS)[-1] == REPLICAS[2], "nothing of it is known"
    router.ended(busy, REPLICAS[2])
    router.sent(again, REPLICAS[2])
    router.ended(again, REPLICAS[2])
    assert router.rank(request(prompt), REPLICAS)[0] == REPLICAS[2]
    assert router.rank(request(text(5, 40), session="chat"), REPLICAS)[0] == REPLICAS[2]


def test_only_given_replicas_are_ranked() -> None:
    router = holder_of(text(1, 320), REPLICAS[0], session="chat")
    assert router.rank(request(text(1, 320), session="chat"), ["new"]) == ["new"]
    assert router.rank(request(text(1, 320), session="chat"), []) == []


def test_memory_is_bounded() -> None:
    router = PrefixAffinity(block_size=BLOCK, known_blocks=100)
    for number in range(300):
        router.sent(request(text(number, 10 * BLOCK)), "a")
        assert len(router._known["a"]) <= 100
    assert len(router._known["a"]) >= 50
    assert router._known["a"].num_blocks(request(text(299, 10 * BLOCK))) == 10
    assert router._known["a"].num_blocks(request(text(0, 10 * BLOCK))) == 0, "evicted"
    router.sent(request(text(0, 1000 * BLOCK)), "a")
    assert len(router._known["a"]) <= 100, "one prompt larger than all that is remembered"
    for number in range(MAX_SESSIONS + 10):
        router.sent(RoutedRequest(0, 0, (), str(number)), "b")
    assert len(router._sessions) == MAX_SESSIONS
    assert "0" not in router._sessions


def test_the_sessions_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_SESSIONS", 2)
    router = PrefixAffinity(block_size=BLOCK)
    for session in ("first", "second", "first", "third"):
        each = request(text(1, 10), session=session)
        router.sent(each, REPLICAS[4])
        router.ended(each, REPLICAS[4])
    for session, is_remembered in (("first", True), ("second", False), ("third", True)):
        chosen = router.rank(request(text(7, 300), session=session), REPLICAS)[0]
        assert (chosen == REPLICAS[4]) is is_remembered, session


def test_the_documentation_states_what_is_remembered() -> None:
    page = (DOCS / "routing.md").read_text("utf-8")
    assert f"if their number is not given, {KNOWN_BLOCKS:,} is assumed |" in page
    assert f"| blocks of a prompt that are hashed | the first {MAX_HASHED_BLOCKS:,} |" in page
    assert f"| sessions that are remembered | the {MAX_SESSIONS:,} used last |" in page


@given(seed=st.integers(0, 2**32))
def test_known_blocks_are_found_whatever_is_guessed(seed: int) -> None:
    draw, router = random.Random(seed), PrefixAffinity(block_size=BLOCK, known_blocks=120)
    sent: list[RoutedRequest] = []
    for _ in range(30):
        sent.append(request(text(draw.randrange(3), draw.randrange(400)) + text(draw.randrange(99), 40)))
        router.sent(sent[-1], "a")
        each, known = draw.choice(sent), router._known.get("a")
        if known is not None:
            held = known._newer.hashes | known._older.hashes
            count = next((n for n, own in enumerate(each.block_hashes) if own not in held), len(each.block_hashes))
            assert held.isdisjoint(each.block_hashes[count:]), "a prefix is not forgotten before what continues it"
            for guess in range(len(each.block_hashes) + 1):
                assert known.num_blocks(each, guess) == count


def test_blocks_of_a_full_half_are_forgotten_together() -> None:
    """Each half of the twenty blocks holds those of two prompts."""
    known, prompts = KnownBlocks(20, BLOCK), [request(text(seed, 5 * BLOCK)) for seed in range(6)]
    held = []
    for each in prompts:
        known.note(each)
        held.append(([known.num_blocks(other) for other in prompts], len(known)))
    assert held == [
        ([5, 0, 0, 0, 0, 0], 5),
        ([5, 5, 0, 0, 0, 0], 10),
        ([5, 5, 5, 0, 0, 0], 15),
        ([5, 5, 5, 5, 0, 0], 20),
        ([0, 0, 5, 5, 5, 0], 15),
        ([0, 0, 5, 5, 5, 5], 20),
    ]


def test_what_is_held_of_a_prompt_ends_with_the_answer_to_an_earlier_one_or_with_the_prompt() -> None:
    known, prompt = KnownBlocks(8, BLOCK), text(1, 4 * BLOCK)
    known.note(request(prompt[: 2 * BLOCK + 3], num_new=20))
    for num_tokens, num_blocks, num_held in ((60, 0, 0), (60, 1, 16), (60, 2, 55), (55, 2, 55), (50, 2, 50)):
        assert known.num_tokens(request(prompt[:num_tokens]), num_blocks) == num_held
    known.note(request(text(2, 3 * BLOCK)))
    assert known.num_tokens(request(prompt[:60]), 2) == 55, "the older half knows the answer too"


@pytest.mark.parametrize("name", ["least_tokens", "prefix"])
def test_one_token_more_counts_more_than_any_order_of_sending(name: str) -> None:
    router = make_router(name, block_size=BLOCK)
    router.sent(request([], 11), "more")
    for _ in range(50):
        ended = request([], 1)
        router.sent(ended, "fewer")
        router.ended(ended, "fewer")
    router.sent(request([], 10), "fewer")
    assert router.rank(request([1]), ["more", "fewer"]) == ["fewer", "more"]


def test_threads_may_call_it_at_once() -> None:
    router = make_router("prefix", block_size=BLOCK, num_blocks=200)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(150):
                each = drawn(draw)
                replica = router.rank(each, REPLICAS)[0]
                router.sent(each, replica)
                if draw.random() < 0.1:
                    router.forget(draw.choice(REPLICAS))
                router.ended(each, replica)
        except BaseException as error:
            errors.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []
    assert [router.outstanding(replica) for replica in REPLICAS] == [0] * len(REPLICAS)


def test_an_unknown_router_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="'fewest' is not known; expected one of 'round_robin', 'random'"):
        make_router("fewest", block_size=BLOCK)


def test_a_request_is_equal_to_itself_only() -> None:
    """There are many of them, so they hold no more than their fields."""
    one = request([1])
    assert one != request([1])
    assert not hasattr(one, "__dict__")
    assert not hasattr(ReplicaLoad(), "__dict__")


def test_routers_are_routers() -> None:
    routers: list[Router] = [make_router(name, block_size=BLOCK) for name in ROUTERS]
    assert len(routers) == 4
