"""For tests of structured output: a tokenizer that can write anything, formats to draw from, and what may come next by
other means than the library's.

Where a format says the same as a regular expression, the ``regex`` package tells whether a text can still become a
match; for brackets, counting does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.runtime.checkpoints import save_checkpoint

# More than the tokenizer has.
VOCAB_SIZE = 330
EOS = 2
WHITESPACE = r"[ \t\n\r]{0,20}"


def save_writer(family: str, directory: Path) -> Path:
    """A random checkpoint of ``family`` with a byte-level tokenizer that has all bytes, and pieces of JSON beside."""
    save_checkpoint(family, directory, vocab_size=VOCAB_SIZE)
    save_byte_tokenizer(directory)
    return directory


def save_byte_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 10,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = '{"name": "cat", "legs": 4, "tame": true, "price": 1.50, "of": null}, [{"a": "é"}, ((x)), abab 2024-01-31]'
    tokenizer.train_from_iterator([text] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(directory)


@dataclass(frozen=True)
class Case:
    """A format; ``can_become(text)``: whether some text that begins so has it; ``has_it(text)``.

    ``unforced`` is the same format without what the library adds where only one text can follow: it allows only the
    tokens that the tokenizer itself would make of that text.
    """

    format: dict[str, Any]
    unforced: dict[str, Any]
    can_become: Callable[[str], bool]
    has_it: Callable[[str], bool]


def pattern(text: str) -> Case:
    return _as_pattern({"type": "regex", "pattern": text}, f"start: /{text}/", text)


def _lark(grammar: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": grammar}


def unforced(grammar: str) -> dict[str, Any]:
    """The grammar as a format, its tokens left to the model everywhere."""
    return _lark(f'%llguidance {{"no_forcing": true}}\n{grammar}')


def _as_pattern(response_format: dict[str, Any], grammar: str, text: str) -> Case:
    compiled = regex.compile(text)
    return Case(
        response_format,
        unforced(grammar),
        lambda found: compiled.fullmatch(found, partial=True) is not None,
        lambda found: compiled.fullmatch(found) is not None,
    )


def _fixed_schema(schema: dict[str, Any], text: str) -> Case:
    """Returns the case of a schema that says what the regular expression ``text`` says, where ``~`` is whitespace."""
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE.replace("{0", "{1")}}
    grammar = f"start: %json {json.dumps(schema | options)}"
    return _as_pattern({"type": "json_schema", "schema": schema}, grammar, text.replace("~", WHITESPACE))


def _depth(text: str) -> int | None:
    """Returns how many brackets are open; ``None`` if no text of brackets around one ``x`` begins with ``text``."""
    depth, seen_x = 0, False
    for place, letter in enumerate(text):
        if place and depth == 0:
            return None
        if letter == "(" and not seen_x:
            depth += 1
        elif letter == "x" and not seen_x:
            seen_x = True
        elif letter == ")" and seen_x:
            depth -= 1
        else:
            return None
    return depth


BRACKETS = Case(
    _lark('start: "x" | "(" start ")"'),
    unforced('start: "x" | "(" start ")"'),
    lambda text: _depth(text) is not None,
    lambda text: bool(text) and _depth(text) == 0 and "x" in text,
)
OPTIONAL_FIELD = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
    "required": ["a"],
    "additionalProperties": False,
}
KNOWN_CASES = [
    pattern("(cat|dog|catalogue)( and (cat|dog)){0,3}"),
    pattern(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    pattern("[a-c]*é?"),
    pattern("a{3,5}b+"),
    pattern(r"[ -!#-\[\]-~]{5,9}!"),
    _fixed_schema({"enum": ["cat", "do\"g", 12, True, None]}, r'"cat"|"do\\"g"|12|true|null'),
    _fixed_schema(OPTIONAL_FIELD, r'\{~"a"~:~(true|false)(~,~"b"~:~null)?~\}'),
    _fixed_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                  r"\[~((true|false)(~,~(true|false))?~)?\]"),
    BRACKETS,
]  # fmt: skip


def drawn_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema over most of what the library knows, small enough that a random model comes to an end."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "integer", "minimum": rng.randint(-9, 3), "maximum": rng.randint(4, 99)},
        lambda: {"type": "number", "minimum": 0, "exclusiveMaximum": rng.choice([1, 12.5])},
        lambda: {"type": "string", "maxLength": rng.randint(0, 4)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(x|yy)?$"])},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4"])},
        lambda: {"enum": rng.sample(["red", "blue", 7, None, False, "ä\n"], 3)},
        lambda: {"const": {"k": [1, "two"]}},
        lambda: {"type": ["string", "null"], "maxLength": 2},
    ]
    if depth:
        kinds += [lambda: _drawn_object(rng, depth), lambda: _drawn_array(rng, depth)] * 3
        kinds.append(lambda: {"anyOf": [drawn_schema(rng, depth - 1) for _ in range(2)]})
    return rng.choice(kinds)()


def _drawn_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "ta gs", "é", "n"], rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: drawn_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _drawn_array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": drawn_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def check_json(text: str, schema: dict[str, Any]) -> None:
    """Raises unless ``text`` is JSON of the schema."""
    value = json.loads(text)
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
