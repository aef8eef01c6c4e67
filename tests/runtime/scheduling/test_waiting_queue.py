"""Waiting: strict classes, first come first served within one, and without starvation."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.waiting_queue import WaitingQueue


def arrive(queue: WaitingQueue, request_id: int, priority: int = 0, now_s: float = 0.0, n: int = 1) -> Sequence:
    request = Request(request_id, [1, 2], SamplingParams(priority=priority, n=n), arrival_s=now_s)
    queue.add(request)
    queue.check_integrity()
    return request.sequences[0]


def order(queue: WaitingQueue) -> list[tuple[int, int]]:
    return [seq.key for seq in queue]


def test_the_lower_class_goes_first_and_in_it_the_first_that_came() -> None:
    queue = WaitingQueue()
    for request_id, priority in enumerate([0, 5, -2, 0, -2, 5]):
        arrive(queue, request_id, priority)
    assert [request_id for request_id, _ in order(queue)] == [2, 4, 0, 3, 1, 5]
    assert queue.head is not None
    assert queue.head.key == (2, 0)
    assert len(queue) == 6


def test_by_default_a_wait_of_half_a_minute_counts_as_a_class() -> None:
    assert WaitingQueue().aging_s == 30


def test_a_preempted_sequence_is_requeued_where_it_was() -> None:
    queue = WaitingQueue()
    first, second, third, _ = (arrive(queue, request_id) for request_id in range(4))
    urgent = arrive(queue, 4, priority=-1)
    for seq in (urgent, first, second, third):
        queue.remove(seq)
    for seq in (third, first, urgent, second):
        queue.requeue(seq, now_s=1.0)
        queue.check_integrity()
    assert [request_id for request_id, _ in order(queue)] == [4, 0, 1, 2, 3]


def test_sequences_of_a_request_are_held_until_they_are_released_behind_the_first() -> None:
    queue = WaitingQueue()
    first = arrive(queue, 0, n=3)
    arrive(queue, 1)
    assert order(queue) == [(0, 0), (1, 0)]
    assert [seq.key for seq in queue.held] == [(0, 1), (0, 2)]
    queue.remove(first)
    queue.release(first, now_s=0.0)
    queue.check_integrity()
    assert order(queue) == [(0, 1), (0, 2), (1, 0)]
    queue.release(first, now_s=0.0)
    assert queue.held == []


def test_a_long_wait_moves_it_to_the_end_of_the_next_class_in_use() -> None:
    queue = WaitingQueue(aging_s=10.0)
    low = arrive(queue, 0, priority=100, now_s=0.0)
    arrive(queue, 1, priority=3, now_s=1.0)
    arrive(queue, 2, priority=-4, now_s=2.0)
    arrive(queue, 3, priority=3, now_s=3.0)
    queue.age(9.9)
    assert [request_id for request_id, _ in order(queue)] == [2, 1, 3, 0]
    queue.age(10.0)
    assert low.urgency[0] == 3
    assert [request_id for request_id, _ in order(queue)] == [2, 1, 3, 0]
    arrive(queue, 4, priority=3, now_s=10.0)
    assert [request_id for request_id, _ in order(queue)] == [2, 1, 3, 0, 4], "who comes later comes behind it"
    queue.age(11.0)
    assert [request_id for request_id, _ in order(queue)] == [2, 1, 3, 0, 4], "1 stands in the first class now"
    for _ in range(2):  # two at a time: 2 has nowhere to go, then 3 and 0
        queue.age(20.0)
    assert low.urgency[0] == -4
    assert [request_id for request_id, _ in order(queue)] == [2, 1, 3, 0, 4]
    arrive(queue, 5, priority=-5, now_s=20.0)
    assert [request_id for request_id, _ in order(queue)] == [5, 2, 1, 3, 0, 4]


def test_equals_do_not_age() -> None:
    queue = WaitingQueue(aging_s=1.0)
    for request_id in range(3):
        arrive(queue, request_id, priority=7)
    queue.age(1000.0)
    assert [seq.urgency[0] for seq in queue] == [7, 7, 7]


@pytest.mark.parametrize("aging_s", [0, -1.0, float("nan"), "30", True, None])
def test_a_time_that_is_none_is_refused(aging_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"aging_s=.*: expected a number of seconds above 0"):
        WaitingQueue(aging_s)


def test_no_request_starves_while_more_urgent_ones_keep_coming() -> None:
    """One is served a second, one of the most urgent comes a second, so the queue never gets shorter."""
    rng = random.Random(0)
    queue = WaitingQueue(aging_s=20.0)
    served: dict[int, float] = {}
    came: dict[int, float] = {}
    for now in range(1000):
        priorities = [0] if now >= 20 else [0, rng.randint(1, 4)]
        for priority in priorities:
            came[len(came)] = now
            arrive(queue, len(came) - 1, priority, float(now))
        queue.age(float(now))
        seq = queue.head
        assert seq is not None
        queue.remove(seq)
        served[seq.key[0]] = now
    waits = [served[request_id] - came[request_id] for request_id in range(900)]
    # four classes up at most, then behind those who were in the first class by then
    assert max(waits) <= 4 * 20 + 21


def test_few_move_up_at_a_time_however_many_wait() -> None:
    queue = WaitingQueue(aging_s=1.0)
    for request_id in range(2_000):
        queue.add(Request(request_id, [1], SamplingParams(priority=request_id % 7), arrival_s=0.0))
    before = {seq: seq.urgency for seq in queue}
    queue.age(100.0)
    queue.check_integrity()
    assert 1 <= sum(seq.urgency != urgency for seq, urgency in before.items()) <= 2


def test_integrity_sees_what_is_out_of_place() -> None:
    def fresh() -> tuple[WaitingQueue, Sequence, Sequence]:
        queue = WaitingQueue()
        return queue, arrive(queue, 0, priority=1), arrive(queue, 1, priority=2)

    queue, first, second = fresh()
    first.urgency = second.urgency
    with pytest.raises(AssertionError, match="not in order"):
        queue.check_integrity()
    queue, first, _ = fresh()
    first.urgency = (0, 0, 0)
    with pytest.raises(AssertionError, match="in class 1"):
        queue.check_integrity()
    queue, first, _ = fresh()
    del queue._since_s[first.request]
    with pytest.raises(AssertionError, match="have no time"):
        queue.check_integrity()
    queue, *_ = fresh()
    queue._levels.pop()
    with pytest.raises(AssertionError, match="classes"):
        queue.check_integrity()


def test_two_move_up_in_a_step_when_their_time_has_come() -> None:
    queue = WaitingQueue(aging_s=10.0)
    first, second, third = (arrive(queue, number, priority=3, now_s=0.0) for number in range(3))
    urgent = arrive(queue, 3, priority=0, now_s=5.0)
    for now_s, levels in ((9.5, [3, 3, 3]), (10.0, [0, 0, 3]), (10.5, [0, 0, 0])):
        queue.age(now_s)
        queue.check_integrity()
        assert [seq.urgency[0] for seq in (first, second, third)] == levels
    assert [request_id for request_id, _ in order(queue)] == [3, 0, 1, 2]
    assert queue.entries == [(urgent.request, 5.0), (first, 10.0), (second, 10.0), (third, 10.5)]


def test_a_wait_in_the_most_urgent_class_begins_again() -> None:
    queue = WaitingQueue(aging_s=10.0)
    urgent, other = arrive(queue, 0, priority=0, now_s=0.0), arrive(queue, 1, priority=1, now_s=1.0)
    queue.age(10.0)
    assert queue.entries == [(other.request, 1.0), (urgent.request, 10.0)]
    queue.age(11.0)
    assert queue.entries == [(urgent.request, 10.0), (other, 11.0)]
    assert other.urgency[0] == 0


def test_a_restored_queue_continues_as_the_first_would() -> None:
    """Its sequences keep their places, and new ones come behind them and behind those that run."""
    queue = WaitingQueue()
    first, second, third = (arrive(queue, request_id, n=2) for request_id in range(3))
    urgent = arrive(queue, 3, priority=-1)
    running = arrive(queue, 4)
    for seq in (first, second, third, urgent, running):
        queue.remove(seq)
    held = queue.held
    for running_too in ([running], []):
        restored = WaitingQueue()
        entries = [(third, 7.0), (urgent, 8.0), (first, 9.0)]
        restored.restore(entries, held, running_too)
        restored.check_integrity()
        assert [request_id for request_id, _ in order(restored)] == [3, 0, 2]
        assert (restored.entries, restored.held, restored.num_held) == (entries, held, 3)
        last = 4 if running_too else 3  # the highest turn
        assert arrive(restored, 5).urgency == (0, last + 1, 0)
        assert [request_id for request_id, _ in order(restored)] == [3, 0, 2, 5]
    empty = WaitingQueue()
    empty.restore([], [], [])
    assert arrive(empty, 6).urgency == (0, 1, 0)
