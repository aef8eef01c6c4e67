"""What a server and its router tell one another: where requests count, and where they may go."""

from __future__ import annotations

import random
from collections import Counter

from fastgen.runtime.routing import RoutedRequest, make_router
from fastgen.serving.replicas.switchboard import Switchboard


def board(*attached: str) -> tuple[Switchboard, list[tuple[int, str]]]:
    routed: list[tuple[int, str]] = []
    found = Switchboard(lambda ids: None, lambda number, replica: routed.append((number, replica)))
    found.router = make_router("least_tokens", block_size=16)
    found.attached = frozenset(attached)
    return found, routed


def add(switchboard: Switchboard, number: int, num_tokens: int = 100) -> None:
    switchboard.add(number, RoutedRequest(num_tokens, 0))


def outstanding(switchboard: Switchboard, *replicas: str) -> list[int]:
    assert switchboard.router is not None
    return [switchboard.router.outstanding(replica) for replica in replicas]


def test_requests_that_come_together_are_spread() -> None:
    switchboard, routed = board("a", "b", "c")
    for number in range(9):
        add(switchboard, number)
    firsts = Counter(switchboard.rank(number, ["a", "b", "c"])[0] for number in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}  # although none of them was reported as routed yet
    assert routed == []


def test_a_request_counts_where_it_went_and_not_where_it_was_expected() -> None:
    switchboard, routed = board("a", "b")
    add(switchboard, 1)
    assert switchboard.rank(1, ["a", "b"])[0] == "a"
    assert outstanding(switchboard, "a", "b") == [100, 0]
    assert switchboard.place(1) == "a"
    switchboard.routed(1, "b")
    assert switchboard.place(1) == "b"
    assert outstanding(switchboard, "a", "b") == [0, 100]
    assert routed == [(1, "b")]
    switchboard.remove(1)
    assert switchboard.place(1) is None
    assert outstanding(switchboard, "a", "b") == [0, 0]
    switchboard.routed(1, "b")  # Ray reports it after it has ended
    assert outstanding(switchboard, "a", "b") == [0, 0]
    assert routed == [(1, "b")]


def test_only_attached_replicas_get_requests_and_silent_ones_last() -> None:
    switchboard, _ = board("a", "b")
    add(switchboard, 1)
    assert set(switchboard.rank(1, ["a", "b", "new"])) == {"a", "b"}
    switchboard.silent = frozenset("a")
    for number in range(2, 6):
        add(switchboard, number)
        assert switchboard.rank(number, ["a", "b"]) == ["b", "a"]
    switchboard.silent = frozenset(("a", "b"))
    assert set(switchboard.rank(5, ["a", "b"])) == {"a", "b"}
    assert switchboard.rank(99, ["a", "b"]) == []  # was cancelled


def test_counts_are_those_of_the_open_requests_after_any_history() -> None:
    draw, (switchboard, _) = random.Random(0), board("a", "b", "c")
    places: dict[int, str] = {}
    for number in range(2000):
        add(switchboard, number, number)
        places[number] = switchboard.rank(number, ["a", "b", "c"])[0]
        for _ in range(draw.randrange(3)):
            one = draw.choice(list(places))
            match draw.randrange(3):
                case 0:
                    switchboard.remove(one)
                    del places[one]
                case 1:
                    places[one] = draw.choice("abc")
                    switchboard.routed(one, places[one])
                case 2:
                    places[one] = switchboard.rank(one, ["a", "b", "c"])[0]
            if not places:
                break
        expected = [sum(each for each, place in places.items() if place == replica) for replica in "abc"]
        assert outstanding(switchboard, "a", "b", "c") == expected
