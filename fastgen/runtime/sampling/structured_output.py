"""Structured output: which tokens may come next so that an answer follows its request's ``response_format``.

The library is llguidance: an Earley parser over a lexer of regular-expression derivatives, walked along the trie of all
tokens. It keeps the state of the grammar. This module has the model's side (which ids are tokens, which end an answer),
the limits, and the threads that compute the next mask while the device computes the next logits.

``V`` is the vocabulary of the model's head. A *mask* is ``[⌈V/32⌉]`` int32: bit ``i % 32`` of word ``i // 32`` says
whether token ``i`` is allowed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.response_format import (
    COMPACT_JSON_OPTIONS,
    JSON_OPTIONS,
    Kind,
    ResponseFormat,
    is_compact,
)
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.finite.emptiness import Emptiness
from fastgen.runtime.sampling.finite.grammar import finite_grammar
from fastgen.runtime.sampling.finite.schema import finite_schema
from fastgen.runtime.sampling.kept_formats import (
    FORMAT_BYTES,
    LEAST_IN_USE,
    MAX_KEPT,
    MOST_BYTES,
    MOST_GROWTH,
    KeptFormats,
)
from fastgen.runtime.sampling.large_stack import on_large_stack
from fastgen.runtime.sampling.mask_threads import MaskThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint, message_of
from fastgen.version import install_command

_END = "<|fastgen: the answer may end|>"

# The most that a grammar may cost, in the library's own units. A grammar that takes more is refused, or its request
# ends with an error. The comments give the time or memory that the library says each limit takes.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # to compile: 20 ms
    "max_grammar_size": 500_000,  # symbols in productions
    "max_items_in_row": 2_000,  # branches of the parser at one place
    "step_lexer_fuel": 200_000,  # for one mask: 15 ms
    "step_max_items": 50_000,  # for one mask: 3 ms
    "max_lexer_states": 32_768,  # 64 MB at worst, for all answers in the format together
}
# Optional properties of an object; with fewer no limit is near.
_MANY_PROPERTIES = 300


class Grammars:
    """Compiles formats for one model, and keeps the most recent ones. Not thread-safe, except for :meth:`compiled`
    after :meth:`prepare`.

    ``tokenizer`` is transformers' own; ``vocab_size`` is ``V``; ``eos_token_ids`` end an answer where its grammar may
    end; kept formats take ``max_bytes``, as :class:`KeptFormats` says. A server lets open requests have ``max_in_use``
    formats at once. The library is imported and gets the tokenizer when the first format is compiled.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_bytes: int = MOST_BYTES,
        max_in_use: int = MAX_KEPT,
    ):
        self.max_in_use = max_in_use
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._vocabulary: _Vocabulary | None = None
        self._kept = KeptFormats(max_bytes)
        self._threads = MaskThreads()

    def prepare(self) -> None:
        """Imports the library and gives it the tokenizer. Raises ``InvalidArgumentError`` if that is not possible."""
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
            self._kept.measure_from_here()

    def compile(self, response_format: ResponseFormat) -> None:
        """Compiles a format, so that :meth:`constraint` has it ready. Raises ``InvalidArgumentError`` for a format that
        cannot be followed.
        """
        self._kept_or_compiled(response_format)

    def compiled(self, response_format: ResponseFormat) -> CompiledFormat:
        """Returns a compiled format, which is not kept. Raises as :meth:`compile` does."""
        self.prepare()
        assert self._vocabulary is not None
        start = on_large_stack(partial(self._vocabulary.compile, response_format))
        return CompiledFormat(response_format, start)

    def kept(self, response_format: ResponseFormat) -> CompiledFormat | None:
        """Returns the compiled format, if it is kept or in use."""
        return self._kept.get(response_format)

    def slots_are_wanted(self, are_wanted: bool) -> None:
        """Says whether requests wait for a slot. If so, answers whose masks are slow may fail."""
        self._threads.are_slots_wanted = are_wanted

    def in_use(self) -> set[ResponseFormat]:
        """Returns the formats of open requests that further ones may share."""
        return self._kept.in_use()

    def has_room(self, num_in_use: int) -> bool:
        """Returns whether a format may be in use beside ``num_in_use`` others and those that are no longer shared.

        Formats grow with their answers, so the heap is looked at too.
        """
        if num_in_use >= self.max_in_use or (num_in_use := num_in_use + self._kept.num_spoiled) >= self.max_in_use:
            return False
        if num_in_use < LEAST_IN_USE or self._kept.grown_bytes < (most := self.max_in_use * FORMAT_BYTES):
            return True
        self._kept.drop_unused()
        return self._kept.grown_bytes < most

    def shed(self) -> CompiledFormat | None:
        """Returns a format whose requests are to end, if formats have grown to more than open requests may have."""
        return self._kept.shed(MOST_GROWTH * self.max_in_use * FORMAT_BYTES)

    def keep(self, compiled: CompiledFormat) -> None:
        """Keeps a compiled format for later requests."""
        self._kept.keep(compiled)

    def constraint(self, sampling: SamplingParams) -> Constraint | None:
        """Returns the constraint of each answer to a request with ``sampling``; ``None`` if it has no format."""
        if sampling.response_format is None:
            return None
        compiled = self._kept_or_compiled(sampling.response_format)
        assert self._vocabulary is not None
        ending_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        ending = self._vocabulary.mask_of(ending_ids)
        return Constraint(compiled, self._vocabulary, self._threads, ending, sampling.min_new_tokens)

    def _kept_or_compiled(self, response_format: ResponseFormat) -> CompiledFormat:
        found = self._kept.get(response_format)
        if found is None:
            found = self.compiled(response_format)
            self.keep(found)
        return found


class _Vocabulary:
    """The model's tokens as the library knows them."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._library = _import_library()
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        try:
            # The library has one end-of-text token, which it allows where the grammar may end. It gets one that the
            # model lacks, so that a token of the model is never confused with the end.
            backend = deepcopy(tokenizer.backend_tokenizer)
            backend.add_special_tokens([_END])
            self._end_id: int = backend.token_to_id(_END)
            ids = tokenizer.get_vocab().values()
            if self._end_id in ids:
                raise ValueError("its token ids have gaps")
            num_ids = max(vocab_size, self._end_id + 1, *ids)
            described = json.loads(backend.to_str())
            for step in _steps(described["pre_tokenizer"]):
                if step["type"] == "ByteLevel":
                    # The library encodes what must come next in the middle of an answer, where no space may be added.
                    step["add_prefix_space"] = False
            self._tokenizer = self._library.LLTokenizer(json.dumps(described), n_vocab=num_ids, eos_token=self._end_id)
        except (AttributeError, ValueError) as error:
            raise InvalidArgumentError(
                f"response_format cannot be served: llguidance does not read this model's tokenizer: {error}"
            ) from error
        self._in_head = self.mask_of(token_id for token_id in range(vocab_size) if token_id != self._end_id)
        self._limits = self._library.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._bytes = self._library.LLTokenizer("byte")
        self.all_tokens = self.mask_of(range(vocab_size))

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Returns a mask with the bits of ``token_ids`` set, except ids that the model's head does not have."""
        bits = np.zeros(32 * self._num_words, np.uint8)
        bits[[each for each in token_ids if each < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def compile(self, response_format: ResponseFormat) -> Any:
        """Returns the library's matcher at its start. Raises ``InvalidArgumentError`` for a format it cannot follow."""
        refused = f"response_format ({response_format.kind}) is refused"
        kind, text = response_format.kind, response_format.text
        try:
            if kind == "grammar":
                text = _in_lark(text)
            start = self._start(kind, text)
            finite = _FINITE[kind](text, self.emptiness()) if kind in _FINITE else text
        except ValueError as error:
            raise InvalidArgumentError(f"{refused}: {error}") from None
        if finite != text:
            with contextlib.suppress(ValueError):  # what is left out must not make it refuse the rest
                start = self._start(kind, finite)
        first = start.deep_copy()
        allowed, may_end = self.next_tokens(first)
        if not (may_end or allowed.any()):
            reason = message_of(first.get_error()) or "none of the model's tokens can begin such an answer"
            raise InvalidArgumentError(f"{refused}: {reason}")
        if response_format.kind == "json_schema":
            for names in optional_runs(json.loads(response_format.text)):
                if reason := self._too_wide(names):
                    raise InvalidArgumentError(
                        f"{refused}: an object has {len(names)} properties in a row that may be left out, "
                        f"{names[0]!r:.40} the first; make more of them required ({reason})"
                    )
        return start

    def emptiness(self) -> Emptiness:
        """Returns what says whether pieces of one format have a text. It keeps what it compiles for that."""
        return Emptiness(self._library, self._bytes, self._limits)

    def _start(self, kind: Kind, text: str) -> Any:
        """Returns the library's matcher for ``text``. Raises ``ValueError`` where there is none."""
        grammar = _GRAMMARS[kind](self._library.LLMatcher, text)
        start = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if start.is_error():
            raise ValueError(message_of(start.get_error()))
        return start

    def _too_wide(self, names: SequenceOf[str]) -> str:
        """Returns the library's message if any of the properties ``names`` may be next; empty if it can continue."""
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
        grammar = _json_grammar(self._library.LLMatcher, json.dumps(schema))
        state = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        for _ in range(2):  # after the brace any of them may come
            allowed, _ = self.next_tokens(state)
            if not allowed.any():
                break
            state.consume_token(_first_of(allowed))
        return message_of(state.get_error())

    def next_tokens(self, state: Any) -> tuple[Mask, bool]:
        """Returns the mask of the library's tokens after ``state``, and whether the grammar may end there."""
        words = np.empty(-(-self._tokenizer.vocab_size // 32), np.int32)
        state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if state.is_error():
            return np.zeros(self._num_words, np.int32), False
        # A complement in a grammar matches the spelling of the end-of-text token too, as it does all bytes.
        may_end = bool(words[self._end_id // 32] >> self._end_id % 32 & 1) and state.is_accepting()
        return words[: self._num_words] & self._in_head, may_end


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a pre-tokenizer as ``tokenizer.json`` describes it. They may be sequences of others."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _steps(part)]
    return [pre_tokenizer]


def _first_of(mask: Mask) -> int:
    return int(np.argmax(np.unpackbits(mask.view(np.uint8), bitorder="little")))


def optional_runs(schema: object) -> Iterator[list[str]]:
    """Yields for each object in a JSON ``schema`` its longest run of optional properties, if that is long.

    Properties come in the schema's order. So after a required one, or at the beginning, any property of the next run
    can be next, or the one after the run.
    """
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, dict):
            continue
        stack += part.values()
        properties = part.get("properties")
        if not isinstance(properties, dict) or len(properties) < _MANY_PROPERTIES:
            continue
        required = part.get("required")
        if not isinstance(required, list):  # none, or what looks like a schema is in an example
            required = []
        required = frozenset(each for each in required if isinstance(each, str))
        runs = [list(run) for is_required, run in groupby(properties, required.__contains__) if not is_required]
        longest = max(runs, key=len, default=[])
        if len(longest) >= _MANY_PROPERTIES:
            yield longest


def _import_library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise InvalidArgumentError(
            f"response_format needs llguidance, which is not installed; {install_command('grammar')}"
        ) from None
    return llguidance


def _json_grammar(matcher: Any, schema: str) -> str:
    options = COMPACT_JSON_OPTIONS if is_compact(schema) else JSON_OPTIONS
    found: str = matcher.grammar_from_json_schema(schema, overrides=options)
    return found


def _in_lark(text: str) -> str:
    """Returns a grammar in Lark's notation, which may be given in GBNF, that of llama.cpp and xgrammar."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        found: str = any_to_lark(text)
    except Exception as error:  # the converter raises classes of its own
        raise ValueError(f"this GBNF cannot be read: {error}") from None
    return found


_GRAMMARS: dict[str, Callable[[Any, str], str]] = {
    "json_object": lambda matcher, _: _json_grammar(matcher, json.dumps({"type": "object"})),
    "json_schema": _json_grammar,
    "regex": lambda matcher, pattern: matcher.grammar_from_regex(pattern),
    "grammar": lambda matcher, text: matcher.grammar_from_lark(text),
}
# For kinds whose parts may have no finite text: without these.
_FINITE: dict[str, Callable[[str, Emptiness], str]] = {
    "json_schema": finite_schema,
    "grammar": finite_grammar,
}
