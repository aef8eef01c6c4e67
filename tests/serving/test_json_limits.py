"""JSON is measured outside its strings, wherever a piece of the text ends."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.serving import json_limits
from fastgen.serving.json_limits import FREE_BYTES, check_json_size, is_surely_small
from fastgen.serving.refusals import TooLargeError

MANY = 1 << 21


def beyond(text: bytes) -> str | None:
    """Returns why ``text`` is refused."""
    try:
        check_json_size(text)
    except TooLargeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"[" + b"1," * MANY + b"1]", "values"),
        (b"[" + b'"a",' * MANY + b"1]", "values"),
        (b'["a,\\"",' + b'",",' * MANY + b"1]", "values"),
        (b"[" + b"[]," * MANY + b"1]", "values"),
        (b'{"x": [' + b"[]," * (1 << 19) + b"1]}", "lists"),
        (b"[" * (1 << 19), "lists"),
        (b"[" + b"{}," * (1 << 19) + b"1]", "objects"),
        (b"{" + b'"a":1,' * (1 << 19) + b'"b":1}', "names"),
        (b"[" + b"1.5," * (1 << 19) + b"1]", "fractions"),
        (b"[" + b"1e5," * (1 << 19) + b"1]", "fractions"),
        (b"[" + b"1E5," * (1 << 19) + b"1]", "fractions"),
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
    ],
    ids=["token ids", "biases", "code", "backslashes", "marks", "other letters"],
)
def test_texts_and_token_ids_may_be_as_long_as_a_body(text: bytes) -> None:
    assert FREE_BYTES < len(text) <= 16 << 20
    assert beyond(text) is None


def test_a_short_body_is_not_measured() -> None:
    text = b"[" * FREE_BYTES
    assert is_surely_small(text)
    assert beyond(text) is None
    assert not is_surely_small(text + b"[")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='\\"[]{},:.eE\n é', max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\":,', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(1, 7))
def test_marks_in_strings_do_not_count(value: object, piece_bytes: int) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_PIECE_BYTES", piece_bytes)
        counts = json_limits._count_outside_strings(text)
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)
    for mark in b",[{:.eE":
        assert counts[mark] == outside.count(bytes([mark]))
