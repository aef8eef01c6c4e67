"""Asks llguidance whether a piece of a format has any text at all."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from typing import Any

from fastgen.runtime.requests.response_format import COMPACT_JSON_OPTIONS
from fastgen.runtime.sampling.matcher import message_of


class Emptiness:
    """Answers by the library's own lexer, for the pieces of one format.

    ``library`` is the module ``llguidance``; ``bytes_`` is its tokenizer of single bytes; ``limits`` are its limits for
    a grammar. What it cannot say within them counts as having a text.
    """

    def __init__(self, library: Any, bytes_: Any, limits: Any):
        self._library, self._bytes, self._limits = library, bytes_, limits
        # For each pattern of properties, an object that has only these.
        self._patterns: dict[str, Any] = {}

    def empty_terminals(self, definitions: str, terminals: SequenceOf[str]) -> set[int]:
        """Returns the numbers of those ``terminals`` that match no text.

        :param definitions: Lark's definitions of the terminals that they name.
        :param terminals: what may stand behind the colon of a terminal.
        """
        named = [f"FASTGEN-{number}" for number in range(len(terminals))]
        choices = "".join(f'\n | "{number}:" {name}' for number, name in enumerate(named))
        bodies = "".join(f"\n{name}: {body}" for name, body in zip(named, terminals, strict=True))
        start = self._start(self._library.LLMatcher.grammar_from_lark(f'start: "-"{choices}{bodies}\n{definitions}'))
        if start.is_error():
            return set()
        return {number for number in range(len(terminals)) if self._ends_after(start, f"{number}:")}

    def matches(self, pattern: str, name: str) -> bool:
        """Returns whether ``pattern`` of ``patternProperties`` matches the property ``name``."""
        if not (name.isascii() and name.isprintable()):  # the library may escape it in another way
            return not self._start(self._object({"patternProperties": {pattern: {}}, "required": [name]})).is_error()
        if pattern not in self._patterns:
            self._patterns[pattern] = self._start(self._object({"patternProperties": {pattern: {}}}))
        state = self._patterns[pattern].deep_copy()
        is_taken: bool = state.consume_tokens(list(f"{{{json.dumps(name)}:".encode()))
        return is_taken

    def is_covered(self, pattern: str, names: SequenceOf[str]) -> bool:
        """Returns whether each text that ``pattern`` of ``patternProperties`` matches is one of ``names``."""
        schema = {"properties": dict.fromkeys(names, False), "patternProperties": {pattern: {}}, "minProperties": 1}
        start = self._start(self._object(schema))
        return not start.is_error() and self._ends_after(start, "{")

    def _object(self, schema: dict[str, Any]) -> Any:
        closed = {"type": "object", "additionalProperties": False} | schema
        return self._library.LLMatcher.grammar_from_json_schema(json.dumps(closed), overrides=COMPACT_JSON_OPTIONS)

    def _start(self, grammar: str) -> Any:
        return self._library.LLMatcher(self._bytes, grammar, log_level=0, limits=self._limits)

    def _ends_after(self, start: Any, text: str) -> bool:
        """Returns whether nothing can follow ``text``, and it is no text of the grammar itself."""
        state = start.deep_copy()
        if not state.consume_tokens(list(text.encode())):
            return False
        state.compute_bitmask()
        return state.is_error() and not message_of(state.get_error())
