"""What a server and its router tell one another: where requests count, and where they may go."""

from __future__ import annotations

import random
from collections import Counter

from fastgen.runtime.routing import RoutedRequest, make_router
from fastgen.serving.replicas.routing_table import RoutingTable


def routes_to(*attached: str) -> tuple[RoutingTable, list[tuple[int, str]]]:
    routed: list[tuple[int, str]] = []
    found = RoutingTable(lambda ids: None, lambda number, replica: routed.append((number, replica)))
    found.router = make_router("least_tokens", block_size=16)
    found.attached = frozenset(attached)
    return found, routed


def add(table: RoutingTable, number: int, num_tokens: int = 100) -> None:
    table.add(number, RoutedRequest(num_tokens, 0))


def outstanding(table: RoutingTable, *replicas: str) -> list[int]:
    assert table.router is not None
    return [table.router.outstanding(replica) for replica in replicas]


def test_requests_that_come_together_are_spread() -> None:
    table, routed = routes_to("a", "b", "c")
    for number in range(9):
        add(table, number)
    firsts = Counter(table.rank(number, ["a", "b", "c"])[0] for number in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}  # although none of them was reported as routed yet
    assert routed == []


def test_a_request_counts_where_it_went_and_not_where_it_was_expected() -> None:
    table, routed = routes_to("a", "b")
    add(table, 1)
    assert table.rank(1, ["a", "b"])[0] == "a"
    assert outstanding(table, "a", "b") == [100, 0]
    assert table.place(1) == "a"
    table.routed(1, "b")
    assert table.place(1) == "b"
    assert outstanding(table, "a", "b") == [0, 100]
    assert routed == [(1, "b")]
    table.remove(1)
    assert table.place(1) is None
    assert outstanding(table, "a", "b") == [0, 0]
    table.routed(1, "b")  # Ray reports it after it has ended
    assert outstanding(table, "a", "b") == [0, 0]
    assert routed == [(1, "b")]


def test_only_attached_replicas_get_requests_and_silent_ones_last() -> None:
    table, _ = routes_to("a", "b")
    add(table, 1)
    assert set(table.rank(1, ["a", "b", "new"])) == {"a", "b"}
    table.silent = frozenset("a")
    for number in range(2, 6):
        add(table, number)
        assert table.rank(number, ["a", "b"]) == ["b", "a"]
    table.silent = frozenset(("a", "b"))
    assert set(table.rank(5, ["a", "b"])) == {"a", "b"}
    assert table.rank(99, ["a", "b"]) == []  # was cancelled


def test_counts_are_those_of_the_open_requests_after_any_history() -> None:
    draw, (table, _) = random.Random(0), routes_to("a", "b", "c")
    places: dict[int, str] = {}
    for number in range(2000):
        add(table, number, number)
        places[number] = table.rank(number, ["a", "b", "c"])[0]
        for _ in range(draw.randrange(3)):
            one = draw.choice(list(places))
            match draw.randrange(3):
                case 0:
                    table.remove(one)
                    del places[one]
                case 1:
                    places[one] = draw.choice("abc")
                    table.routed(one, places[one])
                case 2:
                    places[one] = table.rank(one, ["a", "b", "c"])[0]
            if not places:
                break
        expected = [sum(each for each, place in places.items() if place == replica) for replica in "abc"]
        assert outstanding(table, "a", "b", "c") == expected
