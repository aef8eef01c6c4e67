"""The parser of HTTP responses, fed in pieces of every size."""

from __future__ import annotations

import pytest

from fastgen.lab.load.events import EventParser
from fastgen.lab.load.http_connection import BadResponseError, Response

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
PLAIN = b"HTTP/1.1 404 No\r\ncontent-length: 11\r\nConnection: close\r\n\r\nhello world"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello world"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("data", "keeps"), [(CHUNKED, True), (PLAIN, False), (UNTIL_CLOSED, False)])
def test_a_body_is_read_whatever_the_pieces(data: bytes, keeps: bool, size: int) -> None:
    response, body = Response(), b""
    for begin in range(0, len(data), size):
        assert not response.is_complete
        body += response.feed(data[begin : begin + size])
    if data is UNTIL_CLOSED:
        response.end()
    assert response.is_complete
    assert body == b"hello world"
    assert response.keeps_connection == keeps


@pytest.mark.parametrize("data", [CHUNKED[:-9], PLAIN[:-1], b"HTTP/1.1 200", b""])
def test_a_response_that_was_cut_off_is_not_complete(data: bytes) -> None:
    response = Response()
    response.feed(data)
    with pytest.raises(BadResponseError, match="ended before"):
        response.end()


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"x" * (1 << 17)]
)
def test_what_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponseError):
        Response().feed(data)


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints\r\nlink: </a>"])
def test_interim_answers_come_before_the_response(interim: bytes) -> None:
    response = Response()
    assert response.feed(b"HTTP/1.1 " + interim + b"\r\n\r\n" + PLAIN) == b"hello world"
    assert response.status == 404


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_events_are_read_whatever_the_pieces(size: int) -> None:
    data = b': comment\ndata: {"a": 1}\n\nevent: error\r\ndata: x\r\ndata: y\r\n\r\ndata:z\n\n'
    parser, events = EventParser(), []
    for begin in range(0, len(data), size):
        events += parser.feed(data[begin : begin + size])
    assert events == [("message", b'{"a": 1}'), ("error", b"x\ny"), ("message", b"z")]
