"""A tokenizer that may cost far more memory or time than others is refused when it is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastgen.errors import CheckpointError
from fastgen.runtime.text.tokenizer_checks import (
    added_around,
    added_before,
    check_tokenizer,
    growth_of,
    growth_of_text,
)

VOCABULARY = {"<s>": 0, "</s>": 1, "a": 2, "##a": 3}
# Eighteen characters in NFKC and NFKD.
LIGATURE = "\ufdfa"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# Of Llama 2, Mistral and Phi-3.
FROM_PIECES: dict[str, Any] = {
    "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "post_processor": processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]),
    "decoder": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}
# Of GPT-2 and Phi.
FROM_BYTES: dict[str, Any] = {
    "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "post_processor": processors.ByteLevel(trim_offsets=False),
    "decoder": decoders.ByteLevel(),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 2": FROM_PIECES,
    "gpt-2": FROM_BYTES,
    "llama 3": FROM_BYTES
    | {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), BYTES]),
        "post_processor": processors.Sequence([processors.ByteLevel(), FROM_PIECES["post_processor"]]),
    },
    "qwen 2": FROM_BYTES | {"normalizer": normalizers.NFC()},
    "deepseek": FROM_BYTES
    | {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [*[pre_tokenizers.Split(Regex(r"\s+"), "isolated")] * 6, pre_tokenizers.Digits(True), BYTES]
        ),
        "post_processor": FROM_PIECES["post_processor"],
    },
    "falcon": FROM_BYTES
    | {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), BYTES])},
    "gemma": FROM_PIECES | {"normalizer": normalizers.Replace(" ", "▁")},
    "roberta": FROM_BYTES | {"post_processor": processors.RobertaProcessing(("</s>", 1), ("<s>", 0))},
    "bert": {
        "model": models.WordPiece(VOCABULARY, unk_token="a"),
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "post_processor": processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
        ),
        "decoder": decoders.WordPiece(),
    },
}


def tokenizer_of(parts: dict[str, Any]) -> Any:
    """Returns a tokenizer with ``parts``, which are parts of the library or JSON."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    for name, part in parts.items():
        if not isinstance(part, dict):
            setattr(tokenizer, name, part)
    as_json = json.loads(tokenizer.to_str()) | {name: part for name, part in parts.items() if isinstance(part, dict)}
    backend = Tokenizer.from_str(json.dumps(as_json))
    return SimpleNamespace(backend_tokenizer=backend, get_vocab=backend.get_vocab)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_are_taken(name: str) -> None:
    check_tokenizer(tokenizer_of(PUBLISHED[name]))


def template(single: list[dict[str, Any]], num_ids: int = 1) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": [0] * num_ids, "tokens": ["<s>"] * num_ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": [A, B], "special_tokens": special}


# Fourteen rules look at what the first has made.
SLOW_DECODER = decoders.Sequence([decoders.Replace("b", "c" * 32), *[decoders.Replace("c", "c")] * 14])
A = {"Sequence": {"id": "A", "type_id": 0}}
B = {"Sequence": {"id": "B", "type_id": 0}}
S = {"SpecialToken": {"id": "<s>", "type_id": 0}}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"post_processor": template([S] * 500 + [A], 1000)}, "post_processor of .* puts 500000 ids around a text"),
        ({"post_processor": template([A] * 50_000)}, "post_processor of .* repeats a text 50000 times; at most 1 "),
        (
            {"post_processor": processors.Sequence([processors.BertProcessing(("<s>", 0), ("</s>", 1))] * 257)},
            "post_processor of .* has 258 rules",
        ),
        (
            {"normalizer": normalizers.Sequence([normalizers.Prepend("x" * 64), normalizers.Replace("x", "x" * 32)])},
            "normalizer of .* may put 2048 characters before a text; at most 1024",
        ),
        ({"normalizer": normalizers.Sequence([normalizers.ByteLevel()] * 9)}, "normalizer of .* 262144 characters of"),
        ({"normalizer": normalizers.Sequence([normalizers.NFD()] * 256)}, "normalizer of .* has 257 rules"),
        (
            {"normalizer": normalizers.Sequence([normalizers.Replace("a", LIGATURE * 32), normalizers.NFKD()])},
            "normalizer of .* may make 576 characters of one; at most 32",
        ),
        (  # it matches nothing before each character
            {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("(?=.)"), "b")] * 20)},
            "normalizer of .* may make 1048576 characters of one; at most 32",
        ),
        (
            {"pre_tokenizer": pre_tokenizers.Sequence([BYTES] * 3)},
            "pre_tokenizer of .* may make 64 characters of one; at most 32",
        ),
        (
            {"decoder": decoders.Sequence([decoders.Replace("a", "a")] * 16)},
            "decoder of .* has 17 rules; at most 16 are taken",
        ),
        (
            {"decoder": decoders.Sequence([decoders.BPEDecoder("")] * 6)},
            "decoder of .* may make 64 characters of one; at most 32",
        ),
        (
            {"decoder": decoders.Replace("b" * 65, "c")},
            "decoder of .* looks for a text of 65 characters; at most 64",
        ),
        (
            {"decoder": SLOW_DECODER, "model": models.WordLevel({"a": 0, "b" * 19: 1}, unk_token="a")},
            "rules of its tokenizer's decoder may look at 9139 characters for a token of 19; at most 8192",
        ),
        (
            {"decoder": FROM_PIECES["decoder"], "model": models.WordLevel({"a": 0, "b" * 1639: 1}, unk_token="a")},
            "rules of its tokenizer's decoder may look at 8195 characters for a token of 1639; at most 8192",
        ),
        (
            {"model": models.WordPiece(VOCABULARY, unk_token="a", max_input_chars_per_word=257)},
            "WordPiece, splits words of 257 characters; at most 256",
        ),
        (
            {"model": models.WordPiece(VOCABULARY, unk_token="a", continuing_subword_prefix="#" * 65)},
            "continuing_subword_prefix of .* has 65 characters; at most 64",
        ),
    ],
)
def test_a_part_that_costs_too_much_is_refused_with_the_reason(parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_tokenizer(tokenizer_of(parts))


@pytest.mark.parametrize(
    ("part", "cost"),
    [
        (normalizers.Prepend("▁"), (1, 1)),
        (normalizers.Sequence([normalizers.Prepend("ab"), normalizers.Replace("a", "abc")]), (3, 6)),
        (normalizers.Sequence([normalizers.Replace("a", "abc"), normalizers.Prepend("ab")]), (3, 2)),
        (normalizers.BertNormalizer(), (3, 0)),
        (normalizers.BertNormalizer(handle_chinese_chars=False), (1, 0)),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), (5, 0)),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES]), (4, 0)),
        (decoders.CTC(word_delimiter_token=""), (2, 0)),
        (decoders.CTC(), (1, 0)),
        (decoders.BPEDecoder(), (1, 0)),
    ],
)
def test_how_much_a_part_makes_of_a_character_and_puts_before_a_text(part: Any, cost: tuple[int, int]) -> None:
    rules = json.loads(part.__getstate__())
    assert (growth_of(rules), added_before(rules)) == cost


@pytest.mark.parametrize(
    ("decoder", "longest"), [(SLOW_DECODER, 17), (FROM_PIECES["decoder"], 1638), (FROM_BYTES["decoder"], 4096)]
)
def test_a_decoder_of_few_rules_or_of_short_tokens_is_taken(decoder: Any, longest: int) -> None:
    model = models.WordLevel({"a": 0, "b" * longest: 1}, unk_token="a")
    check_tokenizer(tokenizer_of({"decoder": decoder, "model": model}))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "growth"),
    [
        (normalizers.NFKC(), None, (18, 36)),
        (normalizers.Sequence([normalizers.NFD(), normalizers.NFC()]), BYTES, (16, 16)),
        (normalizers.Lowercase(), pre_tokenizers.Digits(), (2, 4)),
        (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), (9, 12)),
        (FROM_PIECES["normalizer"], None, (2, 8)),
        (normalizers.Prepend("x" * 20), BYTES, (84, 42)),
        (normalizers.Sequence([normalizers.Prepend(LIGATURE), normalizers.NFKD()]), None, (36, 144)),
        (normalizers.Sequence([normalizers.Replace("a", LIGATURE), normalizers.NFKD()]), None, (324, 990)),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True), (5, 2)),
    ],
)
def test_how_much_the_parts_before_a_model_make_of_a_character(
    normalizer: Any, pre_tokenizer: Any, growth: tuple[int, int]
) -> None:
    states = [json.loads(part.__getstate__()) if part else {} for part in (normalizer, pre_tokenizer)]
    assert growth_of_text(*states) == growth


def test_what_a_post_processor_puts_around_a_text() -> None:
    assert added_around(template([S, A, S], 3)) == (1, 6)
    assert added_around({"type": "Sequence", "processors": [template([S, A, A], 5), template([S, A])]}) == (2, 6)
    assert added_around({"type": "Sequence", "processors": [template([S, A], 5), template([A, A])]}) == (2, 10)
    assert added_around({"type": "ByteLevel"}) == (1, 0)
    assert added_around({"type": "RobertaProcessing"}) == (1, 2)


@pytest.mark.parametrize("stop", [1, 5])
def test_a_decoder_that_fails_at_short_tokens_is_refused(stop: int) -> None:
    """The library panics there, which no handler of errors expects."""
    backend = Tokenizer(models.BPE({"<s>": 0, "a": 1, " ": 2, "": 3}, []))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, stop)])
    with pytest.raises(BaseException, match="out of bounds"):
        backend.decode([3])
    tokenizer: Any = SimpleNamespace(backend_tokenizer=backend, get_vocab=backend.get_vocab)
    with pytest.raises(CheckpointError, match="removes characters from the end of tokens"):
        check_tokenizer(tokenizer)
