"""Events of streams, as clients split them into lines."""

from __future__ import annotations

import json

import httpx2

from fastgen.serving.http.json_answers import event_of, json_line


def test_what_unicode_takes_for_the_end_of_a_line_ends_no_event() -> None:
    body = {"text": "".join(map(chr, range(0x3000))) + "Größe 👍"}
    assert json.loads(json_line(body)) == body
    lines = list(httpx2.Response(200, content=event_of(body)).iter_lines())
    assert [line != "" for line in lines] == [True, False]
    assert json.loads(lines[0].removeprefix("data: ")) == body
