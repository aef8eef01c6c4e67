"""JSON that is parsed in pieces is what it is when parsed at once, whatever it holds and wherever it is cut."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest

from fastgen.serving.admission import json_pieces
from fastgen.serving.admission.json_pieces import Part, parsing, parts
from fastgen.serving.admission.turns import at_once

CHARACTERS = ["a", '"', "\\", "[", "]", "{", "}", ",", ":", "é", "\u2028", "0", " ", "\n", "xxxxx"]
INSERTED = [b",", b'"', b"[", b"]", b"{", b"}", b":", b"\\", b"1", b'"a":', b"0", b"\xff"]


class Members(list[tuple[str, Any]]):
    """The members of an object, whose names may repeat."""


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth <= 0 or kind < 0.4:
        return rng.choice([0, -5, 1.5, True, None, 12345678, drawn_text(rng)])
    if kind < 0.7:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(7))]
    return Members((rng.choice(["a", "b", drawn_text(rng)]), drawn(rng, depth - 1)) for _ in range(rng.randrange(6)))


def drawn_text(rng: random.Random) -> str:
    return "".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(6)))


def text_of(rng: random.Random, value: Any) -> str:
    def space() -> str:
        return rng.choice(["", "", "", " ", "\n"])

    def dumps(item: Any) -> str:
        return json.dumps(item, ensure_ascii=rng.random() < 0.5)

    if isinstance(value, Members):
        members = (f"{space()}{dumps(name)}{space()}:{text_of(rng, each)}" for name, each in value)
        return "{" + ",".join(members) + space() + "}"
    if isinstance(value, list):
        return "[" + ",".join(space() + text_of(rng, each) + space() for each in value) + "]"
    return dumps(value)


def damaged(rng: random.Random, text: bytes) -> bytes:
    damaged = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(damaged) + 1)
        if rng.random() < 0.4:
            del damaged[place : place + 1]
        elif rng.random() < 0.7:
            damaged[place:place] = rng.choice(INSERTED)
        else:
            damaged[place : place + 1] = rng.choice(b',"[]{}:\\ 1x').to_bytes()
    return bytes(damaged)


def found_parts(text: bytes) -> list[Part]:
    return [part for part in parts(text) if part is not None]


def outcome(parse: Any, text: bytes) -> str:
    try:
        return repr(parse(text))
    except msgspec.DecodeError as error:
        return re.sub(" - at `.*`", "", str(error))  # parts do not know the steps to the value at fault
    except UnicodeDecodeError as error:  # bytes are counted from the begin of their string
        return str(error)


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 8, 20])
def test_parts_make_the_same_value_or_the_same_error(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(json_pieces, "PART_BYTES", part_bytes)
    monkeypatch.setattr(json_pieces, "_BRACKET_BYTES", 0)
    rng, num_cut = random.Random(part_bytes), [0, 0]
    for number in range(4000):
        text = text_of(rng, drawn(rng, rng.randrange(1, 7))).encode()
        if is_damaged := number % 2 == 1:
            text = damaged(rng, text)
        assert outcome(lambda text: at_once(parsing(text)), text) == outcome(msgspec.json.decode, text), text
        num_cut[is_damaged] += len(found_parts(text)) > 1
    assert min(num_cut) > 400


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[1,2,],"b":1}',
        b'{"a":1,}',
        b'{"a":1,"b":{"c":[1,2,3]},"a":[1,2,3],"b":[4,5,6]}',
        b'{"a":{"b":1},"a":{"b":[1,2,3],"b":{"c":[1,2,3]}}}',
        b"[1,2],[3,4]",
        b"[1,2}",
        b"[1,2]]",
        b"[[1,2],[3,[4,5,[6,7]]],{}]",
        b'["a,\\",b",",\\\\",",",[","]"]',
        b'["\\\\\\\\",1,2,"\\\\\\"",3]',
        b'[1,2,"abc',
        b'{"a":[1,2,3,1e999]}',
    ],
)
def test_hard_texts(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    for part_bytes in range(1, 6):
        monkeypatch.setattr(json_pieces, "PART_BYTES", part_bytes)
        monkeypatch.setattr(json_pieces, "_BRACKET_BYTES", 0)
        assert outcome(lambda text: at_once(parsing(text)), text) == outcome(msgspec.json.decode, text)


LARGE: dict[str, bytes] = {
    "token ids": b'{"prompt":[' + b"50000," * (1 << 20) + b"1]}",
    "names": b"{" + b",".join(b'"%030d":1' % number for number in range(160_000)) + b"}",
    "names with values": b'{"a":{' + b",".join(b'"%07d":-1.5' % number for number in range(80_000)) + b"}}",
    "texts": b'{"x":[' + b'"a \\"b\\", c\\\\",' * 80_000 + b"1]}",
    "lists": b'{"x":[' + b"[]," * 80_000 + b'1],"y":[' + b"[{}]," * 40_000 + b"1]}",
    "messages": json.dumps({"messages": [{"role": "user", "content": '[1, "2"] '}] * 40_000}).encode(),
    # Each place that is tried first is in a string.
    "texts as long as parts": b"[" + (b'"' + b"a" * ((1 << 16) - 4) + b'",') * 40 + b"1]",
}


@pytest.mark.parametrize("name", LARGE)
def test_parts_are_small(name: str) -> None:
    text = LARGE[name]
    found = found_parts(text)
    assert b"".join(part.text for part in found) == text
    assert max(len(part.text) for part in found) <= 3 << 16
    assert at_once(parsing(text)) == json.loads(text)


def test_what_is_one_string_is_one_part() -> None:
    text = json.dumps(["a", "b\\" * 500_000, 1]).encode()
    assert len(found_parts(text)) <= 2
    assert len([*parsing(text)]) >= len(text) >> 17, "others have their turn while the end of the string is looked for"
    assert at_once(parsing(text)) == json.loads(text)


def test_what_is_open_may_be_deep() -> None:
    text = b'{"a":[' * 300 + b"1," * 500_000 + b"1" + b"]}" * 300
    assert 1 < len(found_parts(text)) <= 4, "each opens six hundred brackets again"
    assert at_once(parsing(text)) == json.loads(text)


def test_names_of_the_frame_are_of_no_text() -> None:
    """Else a text could hold them, and its value would be another."""
    first, second = json_pieces._Whole(), json_pieces._Whole()
    names = {first._before, first._behind, second._before, second._behind}
    assert len(names) == 4
    assert {len(name) for name in names} == {16}
