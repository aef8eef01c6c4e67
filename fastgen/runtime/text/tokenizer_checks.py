"""Checks of a checkpoint's tokenizer, before any text is given to it.

A tokenizer is data, but its rules may rewrite a text again and again: six rules that write sixteen letters for one make
16 million letters of one. Other parts may put a million ids around a text, or look at every part of a long word. That
costs time and memory of the process that reads the text, so such a tokenizer is refused when it is loaded. Others may
take long for some texts: the time of a regular expression may grow with a high power of the text's length, and the time
of long tokens with the product of both lengths. :func:`may_encode_slowly` tells which, and a server encodes texts by
them in another process. The time of a tokenizer in Python is not known beforehand, so a server takes none.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unicodedata import normalize

from fastgen.errors import CheckpointError

# How many characters the rules of a tokenizer may make of one. SentencePiece's table of Unicode's compatibility
# characters, which many tokenizers have, makes 18.
MAX_GROWTH = 32
# Most characters that they may put before a text, or a part of one. Converted SentencePiece models put one there.
MAX_ADDED_CHARACTERS = 1024
# Most ids that they may put around a text. Most tokenizers put one or two there.
MAX_ADDED_IDS = 1024
# Most rules of one part, since each looks at the whole text.
MAX_RULES = 256
# Most rules of a decoder, since each looks at every token of an answer, in the server's own process.
MAX_DECODER_RULES = 16
# Most characters in the text of one token.
MAX_TOKEN_CHARACTERS = 4096
# Most characters that the rules of a decoder may look at for one token, counted again for each rule. They look at up to
# 17 tokens for each of an answer, and a character may take 0.2 microseconds.
MAX_DECODED_CHARACTERS = 8192
# Most characters of a word that WordPiece splits, in a time that grows with their third power. BERT's has 100.
MAX_WORD_CHARACTERS = 256
# Most characters in what a model writes before or behind each part of a word, such as "##" or "</w>".
MAX_AFFIX_CHARACTERS = 64
# A tokenizer beyond one of the next five may encode slowly. Those of Llama, GPT-2, Gemma, T5 and BERT are within them.
#
# Characters of a token of Unigram, of an added token, and of a text that a rule looks for: at each place of a text they
# may be compared up to their last character. A decoder may not look for a longer text at all.
LONG_CHARACTERS = 64
# Characters that the normalizer and the pre-tokenizer make of one together.
MUCH_GROWTH = 20
# Characters that their rules look at for one of a text, counted again for each rule.
MANY_LOOKED_AT = 128
# Rules of a normalizer or a pre-tokenizer.
MANY_RULES = 32
# Characters of a word that WordPiece splits.
LONG_WORD_CHARACTERS = 100
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expressions of common tokenizers: of GPT-2, Llama 3, Qwen 2, and converted SentencePiece models. Their time is
# proportional to the text's length, and they never match the empty text.
KNOWN_PATTERNS = frozenset(
    {
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
        rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
        rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}|{_REST}",
        r" {2,}",
        r"\s+",
    }
)
# The most characters that rules of Unicode make of one. All of them together make no more than the one that makes most,
# since they leave alone what another has made.
_UNICODE_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 3, "Lowercase": 2}


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ``CheckpointError`` if ``tokenizer``, a fast one of transformers, may make far longer texts of texts or
    tokens, or take far longer than others.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            _check_part(name, json.loads(part.__getstate__()))
    word = getattr(backend.model, "max_input_chars_per_word", 0)
    _check_at_most("its tokenizer's model, WordPiece, splits words of {} characters", word, MAX_WORD_CHARACTERS)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(backend.model, name, None) or ""
        _check_at_most(f"the {name} of its tokenizer has {{}} characters", len(affix), MAX_AFFIX_CHARACTERS)
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    _check_at_most("the text of a token of its tokenizer has {} characters", longest, MAX_TOKEN_CHARACTERS)
    if backend.decoder is not None:
        looked_at = longest * _num_looked_at(json.loads(backend.decoder.__getstate__()))
        what = f"the rules of its tokenizer's decoder may look at {{}} characters for a token of {longest}"
        _check_at_most(what, looked_at, MAX_DECODED_CHARACTERS)


def check_can_be_served(tokenizer: Any) -> None:
    """Raises ``CheckpointError`` if ``tokenizer`` is one in Python. Its time for a text has no limit that is known."""
    if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(
            f"the checkpoint's tokenizer, {type(tokenizer).__name__}, is one in Python, which may take too long for "
            "some texts; a server takes one that a tokenizer.json describes. fastgen.load takes this one, for texts of "
            "your own"
        )


def _check_part(name: str, rules: Mapping[str, Any]) -> None:
    its = f"the {name} of its tokenizer"
    _check_at_most(f"{its} has {{}} rules", _num_rules(rules), MAX_DECODER_RULES if name == "decoder" else MAX_RULES)
    if name == "post_processor":
        copies, ids = added_around(rules)
        _check_at_most(f"{its} repeats a text {{}} times", copies, 1)
        _check_at_most(f"{its} puts {{}} ids around a text", ids, MAX_ADDED_IDS)
        return
    _check_at_most(f"{its} may make {{}} characters of one", growth_of(rules), MAX_GROWTH)
    _check_at_most(f"{its} may put {{}} characters before a text", added_before(rules), MAX_ADDED_CHARACTERS)
    if name == "decoder":
        _check_decoder(its, rules)


def _check_decoder(its: str, rules: Mapping[str, Any]) -> None:
    if any(_patterns(rules)):
        raise CheckpointError(f"{its} has a regular expression, whose time has no limit")
    if any(rule["type"] == "Strip" and rule["stop"] for rule in _each(rules)):
        raise CheckpointError(f"{its} removes characters from the end of tokens, and fails where a token has fewer")
    longest = max(map(len, _patterns(rules, "String")), default=0)
    _check_at_most(f"{its} looks for a text of {{}} characters", longest, LONG_CHARACTERS)


def _check_at_most(what: str, found: int, most: int) -> None:
    """Raises ``CheckpointError`` if ``found`` is more than ``most``. ``what`` says where, with ``{}`` for ``found``."""
    if found > most:
        raise CheckpointError(f"{what.format(found)}; at most {most} are taken")


def may_encode_slowly(tokenizer: Any) -> bool:
    """Returns whether ``tokenizer``, one that :func:`check_tokenizer` and :func:`check_can_be_served` take, may encode
    some texts far more slowly than common tokenizers do.
    """
    if tokenizer is None:
        return False
    backend = tokenizer.backend_tokenizer
    rules = json.loads(backend.to_str())
    return (
        not KNOWN_PATTERNS.issuperset(_patterns(rules))
        or any(len(text) > LONG_CHARACTERS for text in _patterns(rules, "String"))
        or any(_num_rules(rules[name] or {}) > MANY_RULES for name in ("normalizer", "pre_tokenizer"))
        or _may_text_grow_much(rules["normalizer"] or {}, rules["pre_tokenizer"] or {})
        or _may_model_be_slow(rules["model"])
        or any(_may_added_token_be_slow(token, backend.normalizer) for token in rules["added_tokens"])
    )


def _may_text_grow_much(normalizer: Mapping[str, Any], pre_tokenizer: Mapping[str, Any]) -> bool:
    grown, looked_at = growth_of_text(normalizer, pre_tokenizer)
    return grown > MUCH_GROWTH or looked_at > MANY_LOOKED_AT


def _may_model_be_slow(model: Mapping[str, Any]) -> bool:
    """Returns whether ``model``, as JSON, may split some texts slowly."""
    match model["type"]:
        case "WordLevel":
            return False
        case "BPE":  # the merges that are dropped are tried again after each that is not
            return bool(model["dropout"])
        case "WordPiece":
            return bool(model["max_input_chars_per_word"] > LONG_WORD_CHARACTERS)
        case "Unigram":
            return any(len(token) > LONG_CHARACTERS for token, _ in model["vocab"])
    return True


def _may_added_token_be_slow(token: Mapping[str, Any], normalizer: Any) -> bool:
    """Returns whether some texts are searched slowly for ``token``. One that takes the spaces beside it looks at all of
    them each time it is found, so it must not be of spaces itself.
    """
    spellings = [token["content"]]
    if token["normalized"] and normalizer is not None:
        spellings.append(normalizer.normalize_str(token["content"]))
    takes_spaces = token["lstrip"] or token["rstrip"]
    return any(len(each) > LONG_CHARACTERS or (takes_spaces and each.isspace()) for each in spellings)


def _patterns(rules: Any, kind: str = "Regex") -> Iterator[str]:
    """Yields the patterns of a ``kind`` anywhere in ``rules``, a tokenizer or a part of one as JSON, except in its
    model's vocabulary. The other kind, ``String``, are texts.
    """
    stack = [rules]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            if isinstance(pattern := part.get(kind), str):
                yield pattern
            stack += [value for name, value in part.items() if name != "model"]


def growth_of(rules: Mapping[str, Any]) -> int:
    """Returns the most characters that ``rules``, a part of a tokenizer as JSON, make of one, rule after rule.

    Counted are rules whose texts come with the checkpoint, and those that write more each time they are repeated.
    Unicode's normal forms are not: they make at most 18 characters of one, and nothing more of these. But the texts of
    other rules are counted as long as the normal forms would make them.
    """
    return math.prod(map(_growth_of_one, _each(rules)))


def growth_of_text(normalizer: Mapping[str, Any], pre_tokenizer: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the most characters that both parts together make of one in a text, Unicode's normal forms included; and
    how many their rules look at for it.

    What is put before a text counts for each character, since an added token may end a part of it at each.
    """
    by_unicode = max(_UNICODE_GROWTH.get(rule.get("type", ""), 1) for rule in _each(normalizer))
    added = added_before(normalizer)
    normalized = growth_of(normalizer) * by_unicode + added
    looked_at = _num_looked_at(normalizer) * (by_unicode + added) + _num_looked_at(pre_tokenizer) * normalized
    return normalized * growth_of(pre_tokenizer), looked_at


def added_before(rules: Mapping[str, Any]) -> int:
    """Returns the most characters that ``rules``, as in :func:`growth_of`, put before a text, however short it is, and
    before each part of it between added tokens.
    """
    added = 0
    for rule in _each(rules):
        added = added * _growth_of_one(rule) + _length(rule["prepend"] if rule.get("type") == "Prepend" else "")
    return added


def _num_looked_at(rules: Mapping[str, Any]) -> int:
    """Returns how many characters ``rules``, as in :func:`growth_of`, look at for one: each at all that those before it
    have made of it.
    """
    looked_at, grown = 0, 1
    for rule in _each(rules):
        looked_at += grown
        grown *= _growth_of_one(rule)
    return looked_at


def added_around(rules: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how often ``rules``, a post-processor as JSON, put a text into its own ids, and how many ids they add."""
    copies, ids = 1, 0
    for rule in _each(rules):
        match rule.get("type"):
            case "TemplateProcessing":
                lengths = {name: len(token["ids"]) for name, token in rule["special_tokens"].items()}
                names = [piece["SpecialToken"]["id"] for piece in rule["single"] if "SpecialToken" in piece]
                repeats = len(rule["single"]) - len(names)
                copies, ids = copies * repeats, ids * repeats + sum(lengths.get(name, 0) for name in names)
            case "BertProcessing" | "RobertaProcessing":
                ids += 2
    return copies, ids


def _num_rules(rules: Mapping[str, Any]) -> int:
    return sum(1 for _ in _each(rules))


def _each(rules: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rules in order, those of nested sequences too."""
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        for inner in rules.get(name, ()):
            yield from _each(inner)
    yield rules


def _growth_of_one(rule: Mapping[str, Any]) -> int:
    match rule.get("type"):
        case "Replace":
            return _growth_of_replace(rule["pattern"], rule["content"])
        case "Precompiled":
            return _longest_in_table(rule["precompiled_charsmap"])
        case "ByteLevel":  # a character for each byte of UTF-8, and a space before them
            return 4 + bool(rule.get("add_prefix_space"))
        case "BertNormalizer" if rule.get("handle_chinese_chars"):  # a space on either side
            return 3
        case "WordPiece":  # the decoder: a space before each token
            return 2
        case "BPEDecoder" if not rule.get("suffix"):  # a space beside each character
            return 2
        case "CTC" if not rule.get("word_delimiter_token"):
            return 2
    return 1


def _growth_of_replace(pattern: Mapping[str, str], content: str) -> int:
    """Returns the most characters that this rule makes of one. A regular expression that is not known may match the
    empty text somewhere, and put ``content`` beside every character.
    """
    length = _length(content)
    if (text := pattern.get("String")) is not None:
        return max(1, math.ceil(length / len(text))) if text else 1 + length
    return max(1, length + (pattern["Regex"] not in KNOWN_PATTERNS))


def _longest_in_table(charsmap: str) -> int:
    """Returns the length of the longest text in a table of SentencePiece: the size of a trie in bytes as a 32-bit
    number, the trie, and texts that end with a zero byte.
    """
    table = base64.b64decode(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(_length(text.decode("utf-8", "replace")) for text in texts))


def _length(text: str) -> int:
    """Returns the number of characters of ``text`` in the longest of Unicode's normal forms."""
    return sum(len(normalize("NFKD", character)) for character in text)
