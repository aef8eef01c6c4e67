"""Answers that clients do not take are bounded over all connections."""

from __future__ import annotations

import contextlib
import socket

from fastgen.serving.http.unsent import UnsentAnswers, unacknowledged


class Waiting:
    """A connection with so much to send."""

    def __init__(self, num_unsent: int):
        self.num_unsent, self.is_aborted = num_unsent, False

    def abort(self) -> None:
        self.is_aborted = True


def test_the_connections_with_most_are_closed_for_a_new_one() -> None:
    unsent = UnsentAnswers(max_bytes=100)
    small, large, other, new = (Waiting(number) for number in (10, 40, 30, 50))
    for each in (small, large, other):
        unsent.add(each)
    assert not any(each.is_aborted for each in (small, large, other))
    unsent.add(new)
    assert [each.is_aborted for each in (small, large, other, new)] == [False, True, False, False]
    new.num_unsent = 60
    unsent.add(new)
    assert not other.is_aborted, "what is closed, or was added before, does not count twice"
    unsent.add(Waiting(1))
    assert [each.is_aborted for each in (small, other, new)] == [False, False, True]


def test_what_was_taken_does_not_count_and_one_alone_may_have_more() -> None:
    unsent = UnsentAnswers(max_bytes=100)
    taken, huge = Waiting(90), Waiting(1000)
    unsent.add(taken)
    unsent.discard(taken)
    unsent.add(huge)
    assert (taken.is_aborted, huge.is_aborted) == (False, False)
    unsent.add(Waiting(1))
    assert huge.is_aborted


def test_the_system_tells_what_the_other_end_has_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            assert unacknowledged(server) == 0
            server.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += server.send(bytes(1 << 20))
            before = unacknowledged(server)
            assert 0 < before <= sent
            taken = 0
            while taken < sent:
                taken += len(client.recv(1 << 20))
            assert unacknowledged(server) < before
    assert unacknowledged(server) == unacknowledged(None) == 0
