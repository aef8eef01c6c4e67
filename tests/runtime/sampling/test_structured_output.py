"""Tokens that a grammar allows next, compared with those that lead to one of its texts by other means. Formats that are
refused, with the reason, and the limits of what a request costs.
"""

from __future__ import annotations

import bisect
import builtins
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastgen.errors import InvalidArgumentError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format
from fastgen.runtime.sampling import kept_formats, mask_threads, structured_output
from fastgen.runtime.sampling import matcher as matching
from fastgen.runtime.sampling.matcher import Matcher
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.runtime.step import late_masks
from fastgen.runtime.text.detokenizer import TokenDecoder
from tests.pages import DOCS
from tests.runtime.constrained import (
    EOS,
    KNOWN_CASES,
    VOCAB_SIZE,
    Case,
    check_json,
    drawn_schema,
    pattern,
    unforced,
)
from tests.runtime.sampling.matching_tokens import allowed, matcher, texts_of


def can_become(case: Case, text: bytes) -> bool:
    """For bytes that may end within a character: é is the only one in the cases that takes two."""
    for rest in (b"", b"\xa9", b"\x80"):
        try:
            return case.can_become((text + rest).decode())
        except UnicodeDecodeError:
            continue
    return False


def test_an_answer_in_a_part_that_never_ends_fails_with_that_reason(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here such parts are not looked for, as in a grammar that the look does not know."""
    monkeypatch.delitem(structured_output._FINITE, "grammar")
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    letters = {text: token_id for token_id, text in texts_of(tokenizer).items()}
    found = matcher(grammars, {"type": "grammar", "grammar": 'start: "b" | "a" x\nx: "a" x'})
    assert allowed(found) == {letters[b"a"], letters[b"b"]}
    for _ in range(3):
        found.advance(letters[b"a"])
        if not allowed(found):
            break
    assert "has a part that never ends" in found.error


def test_a_complement_does_not_end_an_answer(grammars: Grammars, tokenizer: Any) -> None:
    """It matches any bytes, and so those with which the library spells the token of the end."""
    letters = {text: token_id for token_id, text in texts_of(tokenizer).items()}
    found = matcher(grammars, {"type": "grammar", "grammar": "start: ~/[^q]*/"})
    for letter, may_end in ((b"a", False), (b"b", False), (b"q", True)):
        assert EOS not in allowed(found)
        found.advance(letters[letter])
        assert (EOS in allowed(found)) == may_end


def test_a_grammar_may_be_gbnf(grammars: Grammars) -> None:
    found = matcher(grammars, {"type": "grammar", "grammar": 'root ::= "b" | "c"'})
    assert allowed(found) == allowed(matcher(grammars, {"type": "grammar", "grammar": 'start: "b" | "c"'}))
    with pytest.raises(InvalidArgumentError, match="this GBNF cannot be read"):
        matcher(grammars, {"type": "grammar", "grammar": "root ::= ("})


@pytest.mark.parametrize("given", [{"type": "json_object"}, {"type": "json_schema", "schema": {"type": "object"}}])
def test_compact_json_has_no_whitespace(grammars: Grammars, tokenizer: Any, given: dict[str, Any]) -> None:
    def is_taken(text: str, **options: Any) -> bool:
        found = matcher(grammars, given | options)
        is_complete = False
        for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]:
            if is_complete or token_id not in allowed(found):
                return False
            is_complete = found.advance(token_id)
        return is_complete

    for text in ('{"a": 1}', '{"a":1, "b":[]}', '{\n"a":1}'):
        assert is_taken(text)
        assert not is_taken(text, disable_any_whitespace=True)
    for text in ('{"a":1,"b":[2,{}]}', '{"a b":" c "}'):
        assert is_taken(text, disable_any_whitespace=True)


@pytest.mark.parametrize("forcing", [False, True])
@pytest.mark.parametrize("case", KNOWN_CASES, ids=lambda case: str(case.format)[:60])
def test_masks_are_what_can_still_become_a_text_of_the_format(
    grammars: Grammars, tokenizer: Any, case: Case, forcing: bool
) -> None:
    """Unless only one text can follow, which then comes in the tokenizer's own tokens."""
    texts = texts_of(tokenizer)
    rng = random.Random(str(case.format))
    num_steps = 0
    for _ in range(6):
        text, subject = b"", matcher(grammars, case.format if forcing else case.unforced)
        for _ in range(40):
            expected = {token_id for token_id, added in texts.items() if can_become(case, text + added)}
            if case.has_it(text.decode(errors="replace")):
                expected.add(EOS)
            found = allowed(subject)
            if not (forcing and is_forced(found, expected, texts)):
                assert found == expected, text
            token_id = rng.choice(sorted(found))
            if token_id == EOS:
                break
            text += texts[token_id]
            if subject.advance(token_id):
                assert case.has_it(text.decode())
                assert not any(can_become(case, text + added) for added in texts.values())
                break
            num_steps += 1
    assert num_steps


def is_forced(found: set[int], expected: set[int], texts: dict[int, bytes]) -> bool:
    """Returns whether one of the expected tokens was found, and all of them begin the same text."""
    if len(found) != 1 or not found <= expected or EOS in expected:
        return False
    (text,) = (texts[token_id] for token_id in found)
    return all(texts[each].startswith(text) or text.startswith(texts[each]) for each in expected)


def random_walk(subject: Matcher, texts: dict[int, bytes], rng: random.Random, longest: int) -> str | None:
    """A text of the grammar; ``None`` where it is longer."""
    text = b""
    for _ in range(longest):
        choices = sorted(allowed(subject))
        token_id = EOS if EOS in choices and rng.random() < 0.3 else rng.choice(choices)
        if token_id == EOS:
            return text.decode()
        text += texts[token_id]
        if subject.advance(token_id):
            return text.decode()
    return None


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_validates(grammars: Grammars, tokenizer: Any, seed: int) -> None:
    rng = random.Random(f"schema {seed}")
    schema, texts = drawn_schema(rng), texts_of(tokenizer)
    found = [
        random_walk(matcher(grammars, {"type": "json_schema", "schema": schema}), texts, rng, 400) for _ in range(4)
    ]
    assert any(text is not None for text in found), schema
    for text in found:
        if text is not None:
            check_json(text, schema)


def test_any_object_is_one(grammars: Grammars, tokenizer: Any) -> None:
    rng, texts = random.Random(1), texts_of(tokenizer)
    found = [random_walk(matcher(grammars, {"type": "json_object"}), texts, rng, 400) for _ in range(12)]
    ended = [text for text in found if text is not None]
    assert len(ended) > 3
    for text in ended:
        check_json(text, {"type": "object"})


@pytest.mark.parametrize("in_a_sequence", [True, False])
def test_a_tokenizer_may_put_a_space_before_texts(grammars: Grammars, tokenizer: Any, in_a_sequence: bool) -> None:
    """It allows the same tokens as a tokenizer that adds none, also where only one text may come next."""
    spaced = deepcopy(tokenizer)
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split]) if in_a_sequence else split
    assert spaced("{", add_special_tokens=False)["input_ids"] != tokenizer("{", add_special_tokens=False)["input_ids"]
    others, rng = Grammars(spaced, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS]), random.Random(4)
    for response_format in ({"type": "json_object"}, {"type": "regex", "pattern": "[ab]{2} once[0-9]+"}):
        mine, other = matcher(grammars, response_format), matcher(others, response_format)
        for _ in range(30):
            choices = allowed(mine)
            assert allowed(other) == choices
            token_id = rng.choice(sorted(choices))
            if token_id == EOS:
                break
            ended = mine.advance(token_id)
            assert other.advance(token_id) == ended
            if ended:
                break


def test_each_sequence_has_a_state_of_its_own(grammars: Grammars, tokenizer: Any) -> None:
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    (b,) = tokenizer("b", add_special_tokens=False)["input_ids"]
    first, second = (matcher(grammars, pattern("aab").unforced) for _ in range(2))
    assert not first.advance(a)
    assert not second.advance(a)
    assert not first.advance(a)
    assert a in allowed(second)
    assert b not in allowed(second)
    assert first.advance(b)
    assert not second.advance(a)
    assert second.advance(b)


# Ends


def test_tokens_that_end_a_request_are_allowed_where_the_format_may_end(grammars: Grammars, tokenizer: Any) -> None:
    a, b, c = (tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "abc")
    subject = matcher(grammars, pattern("a([bx]c)*").format, stop_token_ids=[c, b, VOCAB_SIZE - 1])
    assert not allowed(subject) & {EOS, b, c, VOCAB_SIZE - 1}
    subject.advance(a)
    # "b" would continue the format, but it ends the request, so it is allowed here.
    assert allowed(subject) >= {EOS, b, c, VOCAB_SIZE - 1}
    subject = matcher(grammars, pattern("a[bx]c").format, stop_token_ids=[b])
    subject.advance(a)
    assert allowed(subject)
    assert b not in allowed(subject)


def test_min_new_tokens_forbids_the_end_while_the_format_can_go_on(grammars: Grammars, tokenizer: Any) -> None:
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    subject = matcher(grammars, pattern("a{0,4}").format, min_new_tokens=3)
    ends = []
    for _ in range(4):
        ends.append(EOS in allowed(subject))
        complete = subject.advance(a)
    assert ends == [False, False, False, True]
    assert complete, "the format's end comes before min_new_tokens' wish"
    nothing = matcher(grammars, {"type": "grammar", "grammar": 'start: ""'}, min_new_tokens=3)
    assert allowed(nothing) == {EOS}


def test_without_end_of_text_tokens_an_answer_ends_where_nothing_can_follow(tokenizer: Any) -> None:
    endless = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    subject = matcher(endless, pattern("a{1,2}").format)
    assert not subject.advance(a)
    assert allowed(subject) == {a}
    assert subject.advance(a)


@pytest.mark.parametrize("vocab_size", [200, VOCAB_SIZE - 10, VOCAB_SIZE, 352, 353])
def test_ids_beyond_the_head_or_the_tokenizer_are_never_allowed(tokenizer: Any, vocab_size: int) -> None:
    grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=[EOS, vocab_size + 3])
    texts = {token_id: text for token_id, text in texts_of(tokenizer).items() if token_id < vocab_size}
    subject = matcher(grammars, pattern("(?s:.)*").format)
    expected = {token_id for token_id, text in texts.items() if is_valid_start(text)} | {EOS}
    assert allowed(subject, vocab_size) == expected


def is_valid_start(text: bytes) -> bool:
    """Returns whether UTF-8 text can begin with these bytes."""
    return any(_decodes(text + rest) for rest in (b"", b"\x80", b"\x80" * 2, b"\x80" * 3, b"\xa0\x80", b"\x90\x80\x80"))


def _decodes(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# Tokenizers


@pytest.mark.parametrize("name", BUILTINS)
def test_the_library_knows_the_built_in_models_tokens_as_their_text(name: str) -> None:
    check_token_texts(AutoTokenizer.from_pretrained(BUILTINS[name]))


def test_a_tokenizer_of_words_and_bytes(tmp_path: Path) -> None:
    """As Llama 2's: ``▁`` is a space, and bytes have tokens of their own."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "ab", "é", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    check_token_texts(fast)


def check_token_texts(tokenizer: Any) -> None:
    """For each token that is a text by itself: it is allowed where exactly this text must come, and ends it."""
    vocab_size = len(tokenizer)
    grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=[])
    decoder = TokenDecoder(tokenizer)
    ids = [token_id for token_id in range(vocab_size) if decoder.is_text(token_id)]
    before = ids[-1]
    prefix = decoder.decode([before])
    num_checked = 0
    for token_id in ids if len(ids) < 300 else ids[:: len(ids) // 300]:
        text = decoder.decode([before, token_id]).removeprefix(prefix)
        if not text or "\ufffd" in text:
            continue
        quoted = "".join(_escaped(letter) for letter in text)
        subject = matcher(grammars, unforced(f'start: "{quoted}"'))
        assert token_id in allowed(subject, vocab_size), text
        assert subject.advance(token_id), text
        num_checked += 1
    assert num_checked > 100


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else letter


def test_a_tokenizer_that_the_library_does_not_read_is_refused() -> None:
    class Slow:
        def __len__(self) -> int:
            return 9

    grammars = Grammars(Slow(), vocab_size=9, eos_token_ids=[])
    with pytest.raises(InvalidArgumentError, match="llguidance does not read this model's tokenizer"):
        matcher(grammars, {"type": "json_object"})


def test_a_tokenizer_whose_ids_have_gaps_is_refused() -> None:
    """The end of an answer gets an id of its own, which there could be a token's."""
    words = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 3}, []))
    words.decoder = decoders.ByteLevel()
    grammars = Grammars(
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"), vocab_size=4, eos_token_ids=[]
    )
    with pytest.raises(InvalidArgumentError, match="its token ids have gaps"):
        matcher(grammars, pattern("a").format)


# Refusals


MANY = [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(6)]


def wide(num_properties: int, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num_properties)}, **fields}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "regex", "pattern": "a("}, r"(?s)response_format \(regex\) is refused: .*unclosed group"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "grammar", "grammar": "start: nothing"}, "nothing"),
        ({"type": "grammar", "grammar": 'begin: "a"'}, "start"),
        ({"type": "grammar", "grammar": 'start: x::0\nx::_: "a" x::incr(_)'}, r"panic: assertion failed: [^\n]*$"),
        ({"type": "json_schema", "schema": {"unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"type": "json_schema", "schema": {"$ref": "https://example.com/schema.json"}}, "refused"),
        ({"type": "json_schema", "schema": {"type": "strin"}}, "strin"),
        (
            {"type": "json_schema", "schema": {"oneOf": [{"const": 1}, {"const": 2}]}},
            "oneOf .* not supported. Use anyOf$",
        ),
        ({"type": "json_schema", "schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "refused"),
        ({"type": "json_schema", "schema": {"type": "string", "format": "binary-ish"}}, "binary-ish"),
        ({"type": "json_schema", "schema": nested(150)}, "recursion limit exceeded"),
        ({"type": "json_schema", "schema": {"allOf": [{"anyOf": MANY}] * 8}}, "too large"),
        ({"type": "json_schema", "schema": wide(600)}, "600 properties in a row that may be left out, 'p0' the first"),
        (
            {"type": "json_schema", "schema": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [wide(900)]}}}},
            "make more of them required .*max is 2000",
        ),
        ({"type": "json_schema", "schema": wide(1200, required=["p3", "p500"])}, "699 properties in a row .*'p501'"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_the_reason(
    grammars: Grammars, response_format: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        matcher(grammars, response_format)


def test_an_object_as_wide_as_is_taken_can_be_written(grammars: Grammars, tokenizer: Any) -> None:
    """Nothing is refused later that was not when it was submitted."""

    def taken(num_properties: int) -> bool:
        try:
            grammars.compile(response_format(num_properties))
        except InvalidArgumentError:
            return False
        return True

    def response_format(num_properties: int, **fields: Any) -> ResponseFormat:
        found = parse_response_format({"type": "json_schema", "schema": wide(num_properties, **fields)})
        assert found is not None
        return found

    most = bisect.bisect_left(range(600), True, lo=300, key=lambda number: not taken(number)) - 1
    assert most > 400
    required = [f"p{i}" for i in range(0, 1500, 5)]
    for schema in (wide(most), wide(1500, required=required)):
        subject = matcher(grammars, {"type": "json_schema", "schema": schema})
        for token_id in tokenizer('{"p0": 1, "p1": 2, "p5": 4', add_special_tokens=False)["input_ids"]:
            assert token_id in allowed(subject), subject.error
            subject.advance(token_id)


def names(first: int, last: int) -> list[str]:
    return [f"p{index}" for index in range(first, last + 1)]


@pytest.mark.parametrize(
    ("schema", "runs"),
    [
        (wide(299), []),
        (wide(300), [names(0, 299)]),
        (wide(600, required=["p99", 7, "p400"]), [names(100, 399)]),
        (wide(700, required=["p99", "p399"]), [names(400, 699)]),
        (wide(599, required=["p299"]), []),
        ({"anyOf": [wide(300), {"items": wide(301)}, 3]}, [names(0, 300), names(0, 299)]),
        ({"properties": names(0, 300)}, []),
        ({"examples": [wide(300) | {"required": 5}, wide(300) | {"required": None}]}, [names(0, 299)] * 2),
        (wide(300, required=names(0, 299)), []),
    ],
)
def test_a_run_of_three_hundred_properties_that_may_be_left_out_is_long(
    schema: dict[str, Any], runs: list[list[str]]
) -> None:
    assert sorted(structured_output.optional_runs(schema)) == sorted(runs)


NUMBERS = ("no", "one", "two", "three", "four", "five")
LIMITS = structured_output._LIMITS


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (
            "sampling.md",
            f"Compiling has {LIMITS['initial_lexer_fuel']:,} units of the library's fuel (about 20 ms), a grammar size "
            f"of {LIMITS['max_grammar_size']:,} symbols, and {LIMITS['max_lexer_states']:,} lexer states. One mask has "
            f"{LIMITS['step_lexer_fuel']:,} units and {LIMITS['step_max_items']:,} parser items",
        ),
        (
            "sampling.md",
            f"whose mask takes {matching.MAX_AWAITED_CPU_S:g} s of processor time (nothing waits for that mask any "
            f"more), and at the {NUMBERS[matching.MAX_SLOW_MASKS + 1]}th that takes more than "
            f"{matching.MAX_MASK_CPU_S:g} s.",
        ),
        ("sampling.md", f"Up to {NUMBERS[mask_threads.MAX_THREADS]} threads compute the mask"),
        ("serving.md", f"A step waits at most {late_masks.MAX_WAIT_S * 1000:g} ms for all of them together"),
        (
            "serving.md",
            f"The engine has {mask_threads.MAX_TAKEN_CPU_S:g} s of processor time for feeding tokens to parsers, which "
            f"a {'tenth' if mask_threads.MAX_TAKEN_SHARE == 0.1 else mask_threads.MAX_TAKEN_SHARE} of the passing time "
            "refills.",
        ),
        ("serving.md", f"Tokens that take at most {mask_threads.SLOW_TAKE_CPU_S * 1000:g} ms do not count."),
        ("serving.md", f"The engine keeps {kept_formats.MAX_KEPT} compiled formats"),
    ],
)
def test_the_documentation_states_what_a_format_may_cost(page: str, sentence: str) -> None:
    assert sentence in " ".join((DOCS / page).read_text("utf-8").split())


def test_what_no_token_can_begin_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2}, []))
    words.decoder = decoders.ByteLevel()
    letters = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    grammars = Grammars(letters, vocab_size=3, eos_token_ids=[0])
    assert allowed(matcher(grammars, pattern("[ac]+").format), 3) == {1}
    with pytest.raises(InvalidArgumentError, match="none of the model's tokens can begin such an answer"):
        matcher(grammars, pattern("c+").format)


def test_without_the_library_the_extra_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'fastgen-llm\[grammar\]'"):
        matcher(Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[]), {"type": "json_object"})
