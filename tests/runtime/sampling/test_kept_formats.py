"""Which compiled formats are kept, and how many there may be at once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling import kept_formats, structured_output
from fastgen.runtime.sampling.kept_formats import KeptFormats, most_in_use, most_kept_bytes
from fastgen.runtime.sampling.mask_threads import MaskThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.constrained import (
    VOCAB_SIZE,
    pattern,
)
from tests.runtime.sampling.matching_tokens import allowed, matcher, texts_of
from tests.runtime.sampling.timed_masks import ANY, TimedMasks


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
    masks = TimedMasks([])
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
    masks = TimedMasks([])
    spoiled = Constraint(CompiledFormat(ANY, None), masks, MaskThreads(), masks.all_tokens, 0)
    grammars.keep(spoiled.format)
    spoiled.format.is_spoiled = True
    assert [grammars.has_room(number) for number in range(4)] == [True] * 3 + [False], "it takes memory too"


def test_of_formats_that_take_too_much_memory_the_one_that_grew_for_the_longest_time_is_shed(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap_bytes, now_s = 0, 100.0
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    monkeypatch.setattr(kept_formats, "time", SimpleNamespace(monotonic=lambda: now_s))
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    formats = [pattern(text).format for text in ("a{9}", "b{9}", "c{9}")]
    small, large, unused = [grammars.constraint(SamplingParams(response_format=each)) for each in formats]
    assert small is not None
    assert large is not None
    assert unused is not None
    small.format.growing_cpu_s, large.format.growing_cpu_s, unused.format.growing_cpu_s = 1.0, 2.0, 3.0
    del unused

    heap_bytes = 12 * kept_formats.FORMAT_BYTES
    assert grammars.shed() is None
    heap_bytes += 1
    assert grammars.shed() is large.format
    assert [each.is_spoiled for each in (small.format, large.format)] == [False, True]
    small.format.growing_cpu_s = 4.0
    assert grammars.shed() is None, "its requests have not ended yet"
    again = grammars.constraint(SamplingParams(response_format=formats[1]))
    assert again is not None
    assert again.format is not large.format
    assert (again.matcher().mask().any(), again.matcher().error) == (True, "")


@pytest.mark.parametrize("others_grow", [False, True])
def test_where_formats_are_not_what_takes_the_memory_one_is_shed(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, others_grow: bool
) -> None:
    heap_bytes, now_s = 0, 100.0
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    monkeypatch.setattr(kept_formats, "time", SimpleNamespace(monotonic=lambda: now_s))
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    used = [grammars.constraint(SamplingParams(response_format=pattern(text).format)) for text in "abc"]
    heap_bytes = 20 * kept_formats.FORMAT_BYTES
    shed = grammars.shed()
    assert shed is not None
    used = [each for each in used if each is not None and each.format is not shed]
    assert len(used) == 2
    left = weakref.ref(shed)
    shed = None
    assert left() is None, "its memory is freed when its requests have ended"
    if others_grow:
        assert used[0] is not None
        used[0].format.growing_cpu_s += 0.1
        assert grammars.shed() is used[0].format
        return
    for _ in range(5):
        now_s += 1.0
        assert grammars.shed() is None
    assert grammars._kept.grown_bytes == 2 * kept_formats.FORMAT_BYTES, "what formats may take"
    heap_bytes += 11 * kept_formats.FORMAT_BYTES
    assert grammars.shed() is not None


def test_none_is_shed_where_it_is_enough_to_drop_what_nobody_uses(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=1, max_bytes=1 << 40)
    grammars.prepare()
    monkeypatch.setattr(
        kept_formats, "heap_bytes", lambda: 2 * kept_formats.FORMAT_BYTES * len(grammars._kept._formats)
    )
    grammars._kept.measure_from_here()
    used, unused = [grammars.constraint(SamplingParams(response_format=pattern(text).format)) for text in ("a", "b")]
    assert used is not None
    del unused
    assert len(grammars._kept._formats) == 2
    assert grammars.shed() is None
    assert (len(grammars._kept._formats), used.format.is_spoiled) == (1, False)


def test_the_tokenizer_is_no_format(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heap_bytes = 100

    class Vocabulary(structured_output._Vocabulary):
        def __init__(self, *given: Any) -> None:
            nonlocal heap_bytes
            super().__init__(*given)
            heap_bytes += 1 << 30

    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: heap_bytes)
    monkeypatch.setattr(structured_output, "_Vocabulary", Vocabulary)
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    grammars.prepare()
    assert grammars._kept.grown_bytes == 0


@pytest.mark.parametrize(("took_s", "counts"), [(0.0009, False), (0.0011, True)])
def test_a_format_counts_the_time_of_masks_for_which_it_grew(took_s: float, counts: bool) -> None:
    compiled = CompiledFormat(ANY, None)
    for _ in range(3):
        compiled.due_s(took_s)
    assert compiled.growing_cpu_s == pytest.approx(3 * took_s if counts else 0.0)


def test_formats_that_nobody_uses_make_room(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[], max_in_use=6)
    monkeypatch.setattr(kept_formats, "heap_bytes", lambda: kept_formats.FORMAT_BYTES * len(grammars._kept._formats))
    grammars.prepare()
    monkeypatch.setattr(kept_formats, "MAX_KEPT", 20)
    grammars._kept._max_bytes = 1 << 60
    masks = TimedMasks([])
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
    grammars.prepare()
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
