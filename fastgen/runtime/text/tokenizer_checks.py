"""Checks of a checkpoint's tokenizer, before any text is given to it.

A tokenizer is data, but its rules may rewrite a text again and again: six rules that write sixteen letters for one make
16 million letters of one. That costs time and memory of the process that reads the text, so such a tokenizer is refused
when it is loaded. The time of a regular expression may grow with a high power of the text's length; which tokenizers
have expressions that are not known is said here, and a server encodes texts by them in another process.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastgen.errors import CheckpointError

# How many characters the rules of a tokenizer may make of one. SentencePiece's table of Unicode's compatibility
# characters, which many tokenizers have, makes 18.
MAX_GROWTH = 32
# Most characters in the text of one token.
MAX_TOKEN_CHARACTERS = 4096
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expressions of common tokenizers: of GPT-2, Llama 3, Qwen 2, and converted SentencePiece models. Their time is
# proportional to the text's length.
KNOWN_PATTERNS = frozenset(
    {
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
        rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
        rf"(?i:{_CONTRACTIONS})|{_LETTERS}|\p{{N}}|{_REST}",
        r" {2,}",
        r"\s+",
    }
)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ``CheckpointError`` if ``tokenizer``, a fast one of transformers, may make far longer texts of texts or
    tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    for name in ("normalizer", "decoder"):
        rules = getattr(backend, name)
        growth = 1 if rules is None else growth_of(json.loads(rules.__getstate__()))
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"the {name} of its tokenizer may make {growth} characters of one; at most {MAX_GROWTH} are taken"
            )
    if backend.decoder is not None and any(_patterns(json.loads(backend.decoder.__getstate__()))):
        raise CheckpointError("the decoder of its tokenizer has a regular expression, whose time has no limit")
    longest = max(tokenizer.get_vocab(), key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"the text of a token of its tokenizer has {len(longest)} characters; at most {MAX_TOKEN_CHARACTERS} are "
            "taken"
        )


def has_unknown_patterns(tokenizer: Any) -> bool:
    """Returns whether ``tokenizer`` has regular expressions that are not among ``KNOWN_PATTERNS``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and not KNOWN_PATTERNS.issuperset(_patterns(json.loads(backend.to_str())))


def _patterns(rules: Any) -> Iterator[str]:
    """Yields the regular expressions anywhere in ``rules``, a tokenizer or a part of one as JSON, except in its model's
    vocabulary.
    """
    stack = [rules]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            if isinstance(pattern := part.get("Regex"), str):
                yield pattern
            stack += [value for name, value in part.items() if name != "model"]


def growth_of(rules: Mapping[str, Any]) -> int:
    """Returns the most characters that ``rules``, a normalizer or decoder as JSON, make of one, rule after rule.

    Counted are rules whose texts come with the checkpoint. Unicode's normal forms are not: they make at most 18
    characters of one, and nothing more of these.
    """
    return math.prod(map(_growth_of_one, _each(rules)))


def _each(rules: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rules in order, those of nested sequences too."""
    for name in ("normalizers", "decoders"):
        for inner in rules.get(name, ()):
            yield from _each(inner)
    yield rules


def _growth_of_one(rule: Mapping[str, Any]) -> int:
    match rule.get("type"):
        case "Replace":
            return _growth_of_replace(rule["pattern"], rule["content"])
        case "Precompiled":
            return _longest_in_table(rule["precompiled_charsmap"])
    return 1


def _growth_of_replace(pattern: Mapping[str, str], content: str) -> int:
    """Returns the most characters that this rule makes of one. A regular expression that matches the empty text, or
    that Python does not read, may put ``content`` beside every character.
    """
    if (text := pattern.get("String")) is not None:
        return max(1, math.ceil(len(content) / len(text))) if text else 1 + len(content)
    try:
        matches_nothing = re.compile(pattern["Regex"]).match("") is not None
    except re.error:
        matches_nothing = True
    return max(1, len(content) + matches_nothing)


def _longest_in_table(charsmap: str) -> int:
    """Returns the length of the longest text in a table of SentencePiece: the size of a trie in bytes as a 32-bit
    number, the trie, and texts that end with a zero byte.
    """
    table = base64.b64decode(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
