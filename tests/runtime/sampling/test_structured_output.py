"""Tokens that a grammar allows next, compared with those that lead to one of its texts by other means. Formats that are
refused, with the reason, and the limits of what a request costs.
"""

from __future__ import annotations

import bisect
import builtins
import gc
import os
import random
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastgen.errors import InvalidArgumentError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling import kept_formats, mask_threads, structured_output
from fastgen.runtime.sampling import matcher as matching
from fastgen.runtime.sampling.kept_formats import KeptFormats, most_in_use, most_kept_bytes
from fastgen.runtime.sampling.mask_threads import MaskThreads, TurnThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint, Matcher
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


def matcher(grammars: Grammars, response_format: dict[str, Any], **fields: Any) -> Matcher:
    constraint = grammars.constraint(SamplingParams(response_format=response_format, **fields))  # type: ignore[arg-type]
    assert constraint is not None
    return constraint.matcher()


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    words = matcher.mask()
    assert words.shape == (-(-vocab_size // 32),)
    return {token_id for token_id in range(32 * len(words)) if words[token_id // 32] >> token_id % 32 & 1}


def texts_of(tokenizer: Any) -> dict[int, bytes]:
    """Returns what each token adds to a text, by its spelling. Special tokens and unknown ids are left out."""
    byte_of = {letter: byte for byte, letter in _byte_letters().items()}
    decoder = TokenDecoder(tokenizer)
    return {
        token_id: bytes(byte_of[letter] for letter in spelling)
        for spelling, token_id in tokenizer.get_vocab().items()
        if decoder.is_text(token_id)
    }


def _byte_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


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


def test_an_answer_whose_masks_take_too_long_fails(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MAX_MASK_CPU_S", -1.0)
    subject = matcher(grammars, {"type": "regex", "pattern": "aaaaaaaa"})
    token_id = next(token_id for token_id, text in texts_of(tokenizer).items() if text == b"a")
    for _ in range(matching.MAX_SLOW_MASKS):
        assert token_id in allowed(subject)
        subject.advance(token_id)
    assert allowed(subject) == set()
    assert "took more than" in subject.error


@pytest.mark.parametrize(("counted_from_s", "fails"), [(-1.0, True), (1e9, False)])
def test_an_answer_whose_tokens_take_too_long_to_be_read_fails(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, counted_from_s: float, fails: bool
) -> None:
    monkeypatch.setattr(mask_threads, "SLOW_TAKE_CPU_S", counted_from_s)
    monkeypatch.setattr(mask_threads, "MAX_TAKEN_CPU_S", 0.0)
    monkeypatch.setattr(grammars, "_threads", MaskThreads())
    subject = matcher(grammars, {"type": "regex", "pattern": "aaaaaaaa"})
    subject.advance(next(token_id for token_id, text in texts_of(tokenizer).items() if text == b"a"))
    assert (allowed(subject) == set()) is fails
    assert ("the tokens of answers took more than" in subject.error) is fails


def test_tokens_may_take_so_much_time_at_once_and_a_share_of_the_time_that_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, threads = 1000.0, MaskThreads()
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert all(threads.may_take(0.005) for _ in range(100)), "ordinary tokens do not count"
    assert threads.may_take(0.06)
    assert not threads.may_take(0.05)
    now_s += 0.5
    assert threads.may_take(0.06), "of 0.06 s, 0.05 have been refilled"
    assert not threads.may_take(0.04)
    now_s += 10.0
    assert threads.may_take(0.09), "idle time is not saved up"
    assert not threads.may_take(0.02)


def test_tokens_may_take_a_tenth_of_a_second_at_once() -> None:
    assert MaskThreads().may_take(0.1)
    assert not MaskThreads().may_take(0.1001)


@pytest.mark.parametrize(("num_processors", "num_threads"), [(2, 2), (4, 4), (64, 4), (None, 1)])
def test_there_are_as_many_threads_as_processors_up_to_four(
    monkeypatch: pytest.MonkeyPatch, num_processors: int | None, num_threads: int
) -> None:
    monkeypatch.setattr(mask_threads, "os", SimpleNamespace(cpu_count=lambda: num_processors))
    threads = MaskThreads()
    assert (threads.threads._max_workers, threads.slow_threads._threads._max_workers) == (num_threads, num_threads)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
@pytest.mark.parametrize("own", [0, 5])
def test_a_low_priority_is_three_lower_than_that_of_the_process(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "getpriority", lambda kind, process: {os.getpid(): own}[process])
    monkeypatch.setattr(os, "setpriority", lambda *given: lowered.append(given))
    mask_threads.lower_priority(77)
    mask_threads.lower_priority()
    assert lowered == [(os.PRIO_PROCESS, each, own + 3) for each in (77, threading.get_native_id())]


ANY = ResponseFormat("regex", ".*")


class _TimedMasks:
    """A vocabulary of 32 tokens and the state of a grammar that always goes on. A mask takes the next of ``lengths_s``
    of a processor clock that shows nothing else."""

    all_tokens = np.full(1, -1, np.int32)

    def __init__(self, lengths_s: list[float]) -> None:
        self.lengths_s, self.clock_s = lengths_s, 0.0

    def next_tokens(self, state: Any) -> tuple[Mask, bool]:
        self.clock_s = self.lengths_s.pop(0)
        return np.full(1, 6, np.int32), False

    def mask_of(self, token_ids: Any) -> Mask:
        return np.zeros(1, np.int32)

    def thread_time(self) -> float:
        now_s, self.clock_s = self.clock_s, 0.0
        return now_s

    def deep_copy(self) -> _TimedMasks:
        return self

    def consume_token(self, token_id: int) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False


def timed(monkeypatch: pytest.MonkeyPatch, lengths_s: list[float]) -> Matcher:
    masks = _TimedMasks(lengths_s)
    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=masks.thread_time, monotonic=time.monotonic))
    constraint = Constraint(CompiledFormat(ANY, masks), masks, MaskThreads(), np.zeros(1, np.int32), 0)
    return constraint.matcher()


@pytest.mark.parametrize(
    ("length_s", "are_wanted", "num_right"), [(0.02, True, 500), (0.02, False, 600), (0.01, True, 600)]
)
def test_slow_masks_end_answers_only_while_requests_wait_for_slots(
    monkeypatch: pytest.MonkeyPatch, length_s: float, are_wanted: bool, num_right: int
) -> None:
    """Two answers in one format: 10 s of slow masks are within the limits, those of both together."""
    masks = _TimedMasks([length_s] * 600)
    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=masks.thread_time, monotonic=lambda: 100.0))
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: 100.0))
    threads = MaskThreads()
    threads.are_slots_wanted = are_wanted
    compiled, right = CompiledFormat(ANY, masks), 0
    for _ in range(2):
        answer = Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher()
        for _ in range(300):
            right += not answer._failure and bool(answer.mask().any())
            if answer._failure:
                assert "10 s of processor time while requests waited for a slot" in answer._failure
                break
            answer._mask = None
    assert right == num_right


def test_the_time_for_slow_masks_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    threads = MaskThreads()
    threads.are_slots_wanted = True
    assert threads.may_be_slow(9.0, 0.0)
    assert not threads.may_be_slow(1.5, 0.0)
    assert threads.may_be_slow(0.9, 0.0), "what exceeded the limit is not counted"
    now_s = 2.0  # half a second more
    assert threads.may_be_slow(0.5, 0.0)
    assert not threads.may_be_slow(0.2, 0.0)


def test_masks_are_slow_together_if_those_due_take_half_a_second() -> None:
    """Each of 64 answers whose masks take 9 ms waits longer than that for its turn."""
    threads = MaskThreads()
    threads.are_slots_wanted = True
    assert all(threads.may_be_slow(0.009, 0.5) for _ in range(5000))
    assert 1050 < sum(threads.may_be_slow(0.009, 0.51) for _ in range(2000)) < 1300


def test_how_long_masks_take_that_are_due_follows_from_many() -> None:
    """One of 3 ms among many of 0.4 says little about the others."""
    masks = _TimedMasks([])
    compiled = CompiledFormat(ANY, masks)
    answers = [Constraint(compiled, masks, MaskThreads(), np.zeros(1, np.int32), 0).matcher() for _ in range(256)]
    compiled.due.update(answers)
    usual_s = [compiled.due_s(0.003 if number % 50 == 49 else 0.0004) for number in range(500)]
    assert max(usual_s) < 0.2
    assert usual_s[-2] == pytest.approx(256 * 0.00042, rel=0.3)
    assert [compiled.due_s(0.009) for _ in range(400)][-1] > 2.0


def test_the_masks_of_a_format_that_are_due_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = _TimedMasks([0.0] * 4)
    threads = MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    answers = [Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher() for _ in range(4)]
    with compiled.lock:
        for each in answers:
            each.prepare()
        answers[0].prepare()
        assert compiled.due == set(answers)
        answers[3].drop()
    for each in answers[:-1]:
        each.mask()
    threads.threads.shutdown()
    assert not compiled.due
    answers[0].drop()
    assert not compiled.due, "what is computed is due no longer, dropped or not"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_mask_that_no_thread_can_compute_is_due_no_longer(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the queue of the threads, and is passed over there."""
    masks, threads = _TimedMasks([]), MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    answer = Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher()
    answer._is_slow = is_slow
    pool = threads.slow_threads._threads if is_slow else threads.threads
    pool.shutdown()
    answer.prepare()
    assert "RuntimeError" in answer._failure
    assert not compiled.due
    answer._compute()
    assert not compiled.due


def test_the_mask_of_an_answer_that_has_ended_is_not_computed() -> None:
    masks = _TimedMasks([0.0] * 2)
    threads = MaskThreads()
    compiled = CompiledFormat(ANY, masks)
    first, second = (Constraint(compiled, masks, threads, np.zeros(1, np.int32), 0).matcher() for _ in range(2))
    second._is_slow = first._is_slow = True
    with compiled.lock:
        first.prepare()
        second.prepare()
        second.drop()
    first.mask()
    threads.slow_threads._threads.shutdown()
    assert len(masks.lengths_s) == 1
    assert not compiled.due


def test_formats_with_slow_masks_take_turns() -> None:
    """One mask of each format at a time, in turns; what is cancelled is left out."""
    threads, may_go, order = TurnThreads(), threading.Event(), list[str]()
    threads._threads = ThreadPoolExecutor(1)

    def compute(name: str) -> Mask:
        assert may_go.wait(60)
        order.append(name)
        return np.zeros(1, np.int32)

    asked = [threads.submit(name[0], partial(compute, name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    assert asked[2].cancel()
    may_go.set()
    for each in asked:
        if not each.cancelled():
            each.result(60)
    threads._threads.shutdown()
    assert order in (["a1", "a2", "b1", "c1", "b2", "a4"], ["a1", "b1", "c1", "a2", "b2", "a4"])
    assert not threads._queues
    assert not threads._under_way


def test_masks_of_one_format_hold_one_thread() -> None:
    threads, held, may_go, done = TurnThreads(), threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    threads._threads = ThreadPoolExecutor(2)

    def slow() -> Mask:
        held.release()
        assert may_go.wait(60)
        return np.zeros(1, np.int32)

    def fast() -> Mask:
        done.release()
        return np.zeros(1, np.int32)

    asked = [threads.submit("slow", slow) for _ in range(3)]
    assert held.acquire(timeout=60)
    asked.append(threads.submit("fast", fast))
    assert done.acquire(timeout=60), "the other thread waits for no slow mask"
    assert not held.acquire(timeout=0.05), "no second mask of the format has begun"
    may_go.set()
    for each in asked:
        each.result(60)


def test_a_mask_that_fails_keeps_no_others_of_its_format_back() -> None:
    threads = TurnThreads()

    def fail() -> Mask:
        raise MemoryError

    failed = threads.submit("a", fail)
    assert isinstance(failed.exception(60), MemoryError)
    assert threads.submit("a", lambda: np.ones(1, np.int32)).result(60).any()


def test_tokens_of_all_answers_together_wait_little_for_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, threads, lock = 1000.0, MaskThreads(), threading.Lock()
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert threads.acquire(lock), "it is free"
    waits_s: list[float] = []

    class Held:
        def acquire(self, *, timeout: float) -> bool:
            if timeout:
                waits_s.append(timeout)
            return False

    held: Any = Held()
    assert not any(threads.acquire(held) for _ in range(60))
    assert waits_s == [0.002] * 5
    for _ in range(500):
        now_s += 0.001
        assert not threads.acquire(held)
    assert 28 <= len(waits_s) <= 31, "a tenth of the time"


class _Awaited:
    """A mask that notes how long it is waited for."""

    def __init__(self, *, has_come: bool) -> None:
        self.has_come, self.waits_s = has_come, list[float | None]()

    def result(self, timeout_s: float | None = None) -> Mask:
        self.waits_s.append(timeout_s)
        if not self.has_come:
            raise TimeoutError
        return np.zeros(1, np.int32)


def test_a_mask_is_waited_for_until_the_deadline_and_not_at_all_after_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject, mask = timed(monkeypatch, []), _Awaited(has_come=True)
    monkeypatch.setattr(matching, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(subject, "_overdue", lambda mask: mask)
    subject._mask = mask  # type: ignore[assignment]
    assert subject.is_ready(100.25)
    assert subject.is_ready(99.0), "it is there although the time is up"
    subject._is_slow = True
    assert subject.is_ready(100.25)
    subject.wait(0.5)
    subject.mask()
    assert mask.waits_s == [0.25, 0.0, 0.0, 0.5, pytest.approx(0.1), None]
    assert not subject.is_late
    mask.has_come = False
    assert not subject.is_ready(100.25)
    assert subject.is_late
    mask.has_come = subject.is_complete = True
    assert not subject.is_ready(100.25), "the answer is complete"
    assert subject.is_late


def test_threads_are_replaced_once() -> None:
    threads = MaskThreads()
    busy = threads.threads
    threads.replace(busy)
    fresh = threads.threads
    assert fresh is not busy
    with pytest.raises(RuntimeError, match="after shutdown"):
        busy.submit(int)
    threads.replace(busy)
    assert threads.threads is fresh
    assert fresh.submit(int).result() == 0


@pytest.mark.parametrize(("length_s", "is_slow"), [(0.01, False), (0.0101, True)])
def test_no_step_waits_for_a_mask_after_one_that_took_more_than_ten_milliseconds(
    monkeypatch: pytest.MonkeyPatch, length_s: float, is_slow: bool
) -> None:
    subject = timed(monkeypatch, [length_s, 0.0, 0.0])
    threads = subject._constraint.threads
    assert allowed(subject, 32) == {1, 2}
    subject.advance(1)
    assert subject._pool is (threads.slow_threads if is_slow else threads.threads)
    subject.mask()
    subject.advance(1)
    assert subject._pool is threads.threads, "the mask after it took no time"


@pytest.mark.parametrize(
    ("lengths_s", "fails"),
    [
        ([0.1001, 0.0, 0.1001, 0.1001, 0.0], False),
        ([0.1001, 0.1001, 0.0, 0.1001, 0.1001], True),
        ([0.1] * 5, False),
    ],
)
def test_the_fourth_mask_that_takes_more_than_a_tenth_of_a_second_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, lengths_s: list[float], fails: bool
) -> None:
    subject = timed(monkeypatch, lengths_s)
    for _ in range(4):
        assert allowed(subject, 32) == {1, 2}
        subject.advance(1)
    assert allowed(subject, 32) == (set() if fails else {1, 2})
    assert ("of 4 tokens each took more than 0.1 s of processor time" in subject._failure) is fails


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


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_mask_that_takes_too_long_is_abandoned_and_delays_no_other(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, is_asked_first: bool
) -> None:
    monkeypatch.setattr(mask_threads, "MAX_THREADS", 1)
    monkeypatch.setattr(matching, "MAX_MASK_CPU_S", 0.01)
    monkeypatch.setattr(matching, "MAX_AWAITED_CPU_S", 0.05)
    endless, honest = (matcher(grammars, {"type": "regex", "pattern": each}) for each in ("aaaa", "bbbb"))
    vocabulary, threads = endless._constraint.source, endless._constraint.threads
    threads.replace(threads.threads)
    find, is_over = vocabulary.next_tokens, threading.Event()

    def find_or_never(state: Any) -> tuple[Mask, bool]:
        while state is endless._state and not is_over.is_set():
            pass
        return find(state)

    monkeypatch.setattr(vocabulary, "next_tokens", find_or_never)
    try:
        for each in (endless, honest):
            each.prepare()
        masks = {each: allowed(each) for each in ((endless, honest) if is_asked_first else (honest, endless))}
        assert masks[endless] == set()
        assert masks[honest]
        assert endless.error == "TimeoutError: a token took more than 0.05 s of processor time"
        assert not honest.error
        if sys.platform == "linux":
            assert endless._began is not None
            assert (
                os.getpriority(os.PRIO_PROCESS, endless._began[0]) >= os.getpriority(os.PRIO_PROCESS, os.getpid()) + 3
            ), "it takes little time from others"
    finally:
        is_over.set()


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


def test_formats_are_kept_up_to_a_number_of_bytes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_bytes=100)
    grown = [0, 50, 150, 80]
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: grown.pop(0))
    formats = [pattern(text).format for text in "abcd"]
    parsed = [parse_response_format(each) for each in formats]
    for each in parsed[:3]:
        assert each is not None
        grammars.compile(each)
    # The third format found the heap too large, and small enough without the first.
    assert [each is not None and grammars.kept(each) is not None for each in parsed] == [False, True, True, False]


def test_the_last_format_is_kept_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    formats, heap_bytes = [ResponseFormat("regex", text) for text in "abc"], 0
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    kept = KeptFormats(max_bytes=100)
    kept.measure_from_here()
    heap_bytes = 100
    for each in formats[:2]:
        kept.keep(CompiledFormat(each, None))
    assert all(kept.get(each) for each in formats[:2])
    heap_bytes = 10**6
    kept.keep(CompiledFormat(formats[2], None))
    assert [kept.get(each) is not None for each in formats] == [False, False, True]


def test_a_format_that_is_used_is_there_though_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither compiled twice, nor does dropping it free anything."""
    formats, looks = [ResponseFormat("regex", text) for text in "abcd"], list[int]()
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: looks.append(1) or 10**6 if kept._formats else 0)
    kept = KeptFormats(max_bytes=100)
    kept.measure_from_here()
    masks = _TimedMasks([])
    used = [Constraint(CompiledFormat(each, None), masks, MaskThreads(), masks.all_tokens, 0) for each in formats[:2]]
    for each in used:
        kept.keep(each.format)
    looks.clear()
    kept.keep(CompiledFormat(formats[2], None))
    assert len(looks) == 1, "what is in use is dropped without another look at the heap"
    assert [kept.get(each) is not None for each in formats] == [True, True, True, False]
    assert (kept.in_use(), kept.num_spoiled) == (set(formats[:2]), 0)
    used[0].format.is_spoiled = True
    assert kept.get(formats[0]) is None
    kept.keep(CompiledFormat(formats[0], None))
    assert (kept.in_use(), kept.num_spoiled) == ({formats[1]}, 1), "the spoiled one still takes memory"
    del each, used
    assert (kept.in_use(), kept.num_spoiled) == (set(), 0)
    assert [kept.get(each) is not None for each in formats] == [True, False, False, False]


def test_open_requests_may_have_formats_of_a_16th_part_of_the_memory() -> None:
    assert [most_in_use(gib << 30) for gib in (1, 24, 256)] == [4, 25, 273]


def test_there_is_room_for_a_format_by_number_and_by_the_size_of_the_heap(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap_bytes = 0
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    grammars.prepare()
    assert [grammars.has_room(number) for number in range(8)] == [True] * 6 + [False] * 2
    heap_bytes = 6 * kept_formats.FORMAT_BYTES
    assert [grammars.has_room(number) for number in range(8)] == [True] * 4 + [False] * 4, "a few are always served"
    masks = _TimedMasks([])
    spoiled = Constraint(CompiledFormat(ANY, None), masks, MaskThreads(), masks.all_tokens, 0)
    grammars.keep(spoiled.format)
    spoiled.format.is_spoiled = True
    assert [grammars.has_room(number) for number in range(4)] == [True] * 3 + [False], "it takes memory too"


def test_of_formats_that_take_too_much_memory_the_one_that_grew_for_the_longest_time_fails(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap_bytes = 0
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    formats = [pattern(text).format for text in ("a{9}", "b{9}", "c{9}")]
    small, large, unused = [grammars.constraint(SamplingParams(response_format=each)) for each in formats]
    assert small is not None
    assert large is not None
    assert unused is not None
    small.format.masks_cpu_s, large.format.masks_cpu_s, unused.format.masks_cpu_s = 1.0, 2.0, 3.0
    spared, failed = small.matcher(), large.matcher()
    del unused

    heap_bytes = 12 * kept_formats.FORMAT_BYTES
    grammars.limit_memory()
    assert not large.format.is_spoiled
    heap_bytes += 1
    for _ in range(2):  # the second time its answers have not ended yet
        grammars.limit_memory()
    assert [each.is_spoiled for each in (small.format, large.format)] == [False, True]
    assert not failed.mask().any()
    assert "take too much memory, and this one has grown for the longest time" in failed.error
    assert (spared.mask().any(), spared.error) == (True, "")
    again = grammars.constraint(SamplingParams(response_format=formats[1]))
    assert again is not None
    assert (again.matcher().mask().any(), again.matcher().error) == (True, "")
    heap_bytes = 0
    grammars.limit_memory()
    assert not again.format.is_spoiled


def test_a_format_counts_the_time_of_its_masks(tokenizer: Any) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    constraint = grammars.constraint(SamplingParams(response_format=pattern("a{9}").format))
    assert constraint is not None
    times_s = []
    for _ in range(2):
        constraint.matcher().mask()
        times_s.append(constraint.format.masks_cpu_s)
    assert 0.0 < times_s[0] < times_s[1]


def test_formats_that_nobody_uses_make_room(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: kept_formats.FORMAT_BYTES * len(grammars._kept._formats))
    grammars.prepare()
    monkeypatch.setattr(kept_formats, "MAX_KEPT", 20)
    grammars._kept._max_bytes = 1 << 60
    masks = _TimedMasks([])
    used = [
        Constraint(CompiledFormat(ResponseFormat("regex", text), None), masks, MaskThreads(), masks.all_tokens, 0)
        for text in "abcd"
    ]
    for each in used:
        grammars.keep(each.format)
    for text in "efgh":
        grammars.keep(CompiledFormat(ResponseFormat("regex", text), None))
    assert grammars.has_room(4)
    assert [grammars.kept(ResponseFormat("regex", text)) is not None for text in "adeh"] == [True, True, False, False]


def test_formats_may_take_a_64th_part_of_the_memory_up_to_128_mib() -> None:
    assert most_kept_bytes(1 << 30) == 16 << 20
    assert most_kept_bytes(1 << 34) == 128 << 20


def test_kept_formats_take_no_more_than_they_may(tokenizer: Any) -> None:
    """Many formats come, and the heap of this process is measured after each."""
    most = 3 << 20
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_bytes=most)
    parsed = [parse_response_format(pattern(f"(a{index}|b|c){{200,900}}d").format) for index in range(120)]
    gc.collect()
    before = kept_formats.heap_bytes()
    grown = []
    for each in parsed:
        assert each is not None
        grammars.compile(each)
        grown.append(kept_formats.heap_bytes() - before)
    kept = [each is not None and grammars.kept(each) is not None for each in parsed]
    print(f"grown by {max(grown) / 2**20:.1f} MiB; {sum(kept)} of {len(kept)} kept")
    assert max(grown) < 1.1 * most
    assert 1 < sum(kept) < 0.8 * len(kept)
    assert kept == sorted(kept), "the oldest go first"


def test_what_the_heap_holds_is_known() -> None:
    before = kept_formats.heap_bytes()
    held = bytearray(1 << 24)
    assert kept_formats.heap_bytes() - before > len(held) // 2


def test_a_format_whose_lexer_reached_a_limit_is_compiled_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structured_output._LIMITS, "max_lexer_states", 60)
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    limited = pattern("(a|b){0,500}c").format
    subject = matcher(grammars, limited)
    token_id = next(token_id for token_id, text in texts_of(tokenizer).items() if text == b"a")
    for _ in range(400):
        if token_id not in allowed(subject):
            break
        subject.advance(token_id)
    assert "too many states" in subject.error
    assert subject._constraint.format.is_spoiled
    assert allowed(matcher(grammars, limited))


def test_a_format_is_shared_on_though_one_answer_reached_a_limit_of_its_parser(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structured_output._LIMITS, "max_items_in_row", 40)
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    words = "\n".join(f'x{index}: "c" "{index}"' for index in range(60))
    grammar = 'start: "a" x\nx: "b" (' + " | ".join(f"x{index}" for index in range(60)) + f")\n{words}"
    limited = {"type": "grammar", "grammar": grammar}
    subject = matcher(grammars, limited)
    ids = {text: token_id for token_id, text in texts_of(tokenizer).items()}
    for text in (b"a", b"b"):
        if allowed(subject):
            subject.advance(ids[text])
    assert not allowed(subject)
    assert subject.error
    assert not subject._constraint.format.is_spoiled


def test_the_formats_used_last_are_kept(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    monkeypatch.setattr(kept_formats, "MAX_KEPT", 2)
    formats = [SamplingParams(response_format=pattern(text).format) for text in "abc"]  # type: ignore[arg-type]

    def start(index: int) -> Any:
        constraint = grammars.constraint(formats[index])
        assert constraint is not None
        return constraint.format

    first, second = start(0), weakref.ref(start(1))
    assert start(0) is first
    assert second() is not None
    start(2)
    assert start(0) is first
    assert second() is None
