"""The table that a server shares with its router: where requests count, and where they may go."""

from __future__ import annotations

import random
from collections import Counter

from fastgen.runtime.routing import RoutedRequest, make_router
from fastgen.serving.replicas.routing_table import RoutingTable


def routes_to(*ready: str) -> RoutingTable:
    found = RoutingTable(lambda ids: None)
    found.router = make_router("least_tokens", block_size=16)
    found.ready = list(ready)
    return found


def add(table: RoutingTable, number: int, num_tokens: int = 100) -> None:
    table.add(number, RoutedRequest(num_tokens, 0))


def outstanding(table: RoutingTable, *replicas: str) -> list[int]:
    assert table.router is not None
    return [table.router.outstanding(replica) for replica in replicas]


def test_requests_that_come_together_are_spread() -> None:
    table = routes_to("a", "b", "c")
    for number in range(9):
        add(table, number)
    firsts = Counter(table.rank(number)[0] for number in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}


def test_a_request_counts_at_the_first_replica_of_its_last_ranking_until_it_is_removed() -> None:
    table = routes_to("a", "b")
    add(table, 1)
    assert table.rank(1)[0] == "a"
    assert outstanding(table, "a", "b") == [100, 0]
    table.ready = ["b"]
    assert table.rank(1)[0] == "b"
    assert outstanding(table, "a", "b") == [0, 100]
    table.remove(1)
    assert outstanding(table, "a", "b") == [0, 0]
    table.remove(1)
    assert outstanding(table, "a", "b") == [0, 0]


def test_only_ready_replicas_get_requests_and_silent_ones_last() -> None:
    table = routes_to()
    add(table, 1)
    assert table.rank(1) == []
    table.ready = ["a", "b"]
    assert set(table.rank(1)) == {"a", "b"}
    table.silent = frozenset("a")
    for number in range(2, 6):
        add(table, number)
        assert table.rank(number) == ["b", "a"]
    table.silent = frozenset(("a", "b"))
    assert set(table.rank(5)) == {"a", "b"}
    assert table.rank(99) == []  # was cancelled


def test_counts_are_those_of_the_open_requests_after_any_history() -> None:
    draw, table = random.Random(0), routes_to("a", "b", "c")
    places: dict[int, str] = {}
    for number in range(2000):
        add(table, number, number)
        places[number] = table.rank(number)[0]
        for _ in range(draw.randrange(3)):
            one = draw.choice(list(places))
            if draw.randrange(2):
                table.remove(one)
                del places[one]
            else:
                table.ready = draw.sample("abc", draw.randrange(1, 4))
                places[one] = table.rank(one)[0]
            if not places:
                break
        expected = [sum(each for each, place in places.items() if place == replica) for replica in "abc"]
        assert outstanding(table, "a", "b", "c") == expected
