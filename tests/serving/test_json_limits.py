"""JSON is measured outside its strings, wherever a piece of the text ends, and parsed alike at any length."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.serving.admission import json_limits
from fastgen.serving.admission.json_limits import FREE_BYTES, InvalidJsonError, check_json_sizes, measured, parse_json
from fastgen.serving.refusals import TooLargeError

MANY = 1 << 21


def beyond(text: bytes) -> str | None:
    """Returns why ``text`` is refused."""
    try:
        check_json_sizes([text])
    except TooLargeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"[" + b"1," * MANY + b"1]", "values"),
        (b"[" + b'"a",' * MANY + b"1]", "texts"),
        (b'["a,\\"",' + b'",",' * MANY + b"1]", "texts"),
        (b"[" + b'"",' * (1 << 18) + b"1]", "texts"),
        (b"[" + b"[]," * MANY + b"1]", "lists"),
        (b'{"x": [' + b"[]," * (1 << 19) + b"1]}", "lists"),
        (b"[" * (1 << 19), "lists"),
        (b"[" + b"{}," * (1 << 19) + b"1]", "objects"),
        (b"{" + b'"a":1,' * (1 << 19) + b'"b":1}', "names"),
        (b"[" + b"1.5," * (1 << 19) + b"1]", "fractions"),
        (b"[" + b"1e5," * (1 << 19) + b"1]", "fractions"),
        (b"[" + b"1E5," * (1 << 19) + b"1]", "fractions"),
        (b"[" + b"9" * 4300 + b",1" * (1 << 17) + b"]", "64 digits"),
        (b"[" + b" " * FREE_BYTES + b"1" * 65 + b"]", "64 digits"),
        (b'["' + b"1" * (FREE_BYTES - 30) + b'",' + b"1" * 65 + b"]", "64 digits"),
    ],
)
def test_what_has_too_many_values_is_refused(text: bytes, word: str) -> None:
    assert word in (beyond(text) or "")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": list(range(1 << 20))}).encode(),
        json.dumps({"prompt": "x", "logit_bias": {str(n): n / 65536 for n in range(1 << 16)}}).encode(),
        json.dumps({"prompt": 'a, {"b": [1.5, 2e3]}, ' * (1 << 19)}).encode(),
        json.dumps({"prompt": ["[{:.,\\", '\\"'] * 1024 + ["\\" * 999_999] * 4}).encode(),
        json.dumps({"prompt": ",[{:" * (1 << 20) + "\\"}).encode(),
        json.dumps({"prompt": "好,," * (1 << 20)}, ensure_ascii=False).encode(),
        json.dumps({"prompt": "1234567890" * (1 << 20), "seed": 10**63}).encode(),
    ],
    ids=["token ids", "biases", "code", "backslashes", "marks", "other letters", "digits"],
)
def test_texts_and_token_ids_may_be_as_long_as_a_body(text: bytes) -> None:
    assert FREE_BYTES < len(text) <= 16 << 20
    assert beyond(text) is None


def test_a_body_may_hold_as_much_as_the_page_says() -> None:
    for value, most, too_much in (
        (b"1,", 1_179_648, "more than 1179648 values"),
        (b'"",', 163_839, "more than 163840 lists, objects, texts, names and fractions"),
    ):
        assert beyond(b"[" + value * most + b"1]") is None
        assert too_much in (beyond(b"[" + value * (most + 1) + b"1]") or "")


def test_a_short_body_is_not_measured() -> None:
    text = b"[" * (256 << 10)
    assert beyond(text) is None
    assert beyond(text + b"[") is not None


@pytest.mark.parametrize("padding", [0, FREE_BYTES])
@pytest.mark.parametrize(
    "text",
    [
        *(b"[1,]", b'{"a": 01}', b'{"a": 1} x', b'{"a', b'{"a": nul}', b"", b"[" * 100_000, b'{"a":' * 100_000),
        *(b'"\xff"', b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\ude00\\ud83d"', b'{"\\uDfFf": 1}'),
    ],
)
def test_what_is_not_json_is_refused_at_any_length(text: bytes, padding: int) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(b" " * padding + text)


@pytest.mark.parametrize(
    ("text", "reason", "place"),
    [
        (b"[" * 100_000, "nested too deeply", ()),
        (b'{"a": "\xff"}', "not UTF-8", ()),
        (b"[1" + b"0" * 5000 + b"]", "too many digits", ()),
        (b'"\\ud800"', "half of a pair", ()),
        (b'{"a": [1, {"b": "\\ud83d\\ude00"}, {"b": "x\\ud83d"}, "\\ud800"]}', "half of a pair", ("a", 2, "b")),
        (b'{"a": [{"b": 1, "\\ud800": 2}]}', "half of a pair", ("a", 0)),
    ],
)
def test_a_short_text_is_refused_with_its_reason_and_place(
    text: bytes, reason: str, place: tuple[str | int, ...]
) -> None:
    with pytest.raises(InvalidJsonError, match=reason) as refused:
        parse_json(text)
    assert refused.value.place == place


@pytest.mark.parametrize("padding", [0, FREE_BYTES])
def test_a_value_is_the_same_at_any_length(padding: int) -> None:
    value = {"a": [1, -0.0, 1e-7, 2**63, -(2**70), 10**63, True, None, "\u0000é好😀"], "": {}, "b": 0.1 + 0.2}
    assert repr(parse_json(b" " * padding + json.dumps(value).encode())) == repr(value)
    assert parse_json(b" " * padding + b'{"a": 1, "a": 2}') == {"a": 2}
    assert parse_json(b"\xef\xbb\xbf" + b" " * padding + b'"\xc3\xa9"') == "é", "a byte order mark"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='\\"[]{},:.eE\n é', max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\":,', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def size_of(texts: list[bytes], piece_bytes: int) -> json_limits._Size:
    size = json_limits._Size()
    for text in texts:
        size.begin_text()
        for begin in range(0, len(text), piece_bytes):
            size.add(text[begin : begin + piece_bytes])
    return size


@given(VALUES, st.integers(1, 7))
def test_marks_in_strings_do_not_count(value: object, piece_bytes: int) -> None:
    text = json.dumps(value).encode()
    size = size_of([text], piece_bytes)
    outside, num_strings = re.subn(rb'"(?:[^"\\]|\\.)*"', b"", text)
    assert size.num_values == outside.count(b",")
    assert size.num_slow == num_strings + len(re.findall(rb"[\[{.eE]", outside))


@given(st.integers(1, 9), st.integers(55, 75), st.integers(0, 40))
def test_long_numbers_are_found_across_pieces(piece_bytes: int, num_digits: int, num_before: int) -> None:
    text = b'["' + b"1" * num_before + b'",' + b"1" * num_digits + b"]"
    assert size_of([text], piece_bytes).has_long_number == (num_digits > 64)


@given(st.sampled_from([b"{}", b'"', b'"\\', b"[1", b"9" * 40]), st.integers(1, 7))
def test_a_text_does_not_depend_on_the_one_before(before: bytes, piece_bytes: int) -> None:
    """However that ends: in a string, after a backslash, or in a number."""
    size, alone = size_of([before, b'[",[", 1.5]' + b"1" * 40], piece_bytes), size_of([before], piece_bytes)
    assert (size.num_values - alone.num_values, size.num_slow - alone.num_slow, size.has_long_number) == (1, 3, False)


def test_what_is_beyond_the_limits_is_not_measured_to_its_end() -> None:
    pieces = measured([b"[" * FREE_BYTES * 100])
    assert [next(pieces), next(pieces)] == [None, None]
    with pytest.raises(TooLargeError):
        next(pieces)


def test_many_short_texts_are_measured_together() -> None:
    assert len([*measured([b"1," * 50] * 10_000)]) == 15, "pieces of at least 64 KiB"
