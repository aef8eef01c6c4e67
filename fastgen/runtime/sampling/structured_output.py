"""Structured output: which tokens may come next so that an answer follows its request's ``response_format``.

The library is llguidance: an Earley parser over a lexer of regular-expression derivatives, walked along the trie of all
tokens. It keeps the state of the grammar. This module has the model's side (which ids are tokens, which end an answer),
the limits, and the threads that compute the next mask while the device computes the next logits.

``V`` is the vocabulary of the model's head. A *mask* is ``[⌈V/32⌉]`` int32: bit ``i % 32`` of word ``i // 32`` says
whether token ``i`` is allowed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.response_format import COMPACT_JSON_OPTIONS, JSON_OPTIONS, ResponseFormat, is_compact
from fastgen.runtime.requests.sampling_params import SamplingParams

_END = "<|fastgen: the answer may end|>"

# Compiled formats that are kept for later requests; the least recently used one is dropped first.
MAX_KEPT = 64
MAX_THREADS = 4

# The most that a grammar may cost, in the library's own units. A grammar that takes more is refused, or its request
# ends with an error. The comments give the time or memory that the library says each limit takes.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # to compile: 20 ms
    "max_grammar_size": 500_000,  # symbols in productions
    "max_items_in_row": 2_000,  # branches of the parser at one place
    "step_lexer_fuel": 200_000,  # for one mask: 15 ms
    "step_max_items": 50_000,  # for one mask: 3 ms
    "max_lexer_states": 100_000,  # 200 MB at worst
}
MAX_MASK_CPU_S = 0.1
# Masks of one answer that may take longer than that. One more, and the answer fails, since the whole step waits for its
# mask. The cost of a token grows with the square of the parser's branches, which no limit of the library covers.
MAX_SLOW_MASKS = 3
# Processor time after which nothing waits for a mask any more, and its answer fails.
MAX_AWAITED_CPU_S = 0.3
# Processor time that the engine itself may spend to feed the tokens of one answer to the parser; with more it fails.
# Only tokens count that take longer than any token of an ordinary grammar.
MAX_TAKEN_CPU_S = 0.5
SLOW_TAKE_CPU_S = 0.005
# Optional properties of an object; with fewer no limit is near.
_MANY_PROPERTIES = 300


class Grammars:
    """Compiles formats for one model, and keeps the most recent ones. Not thread-safe.

    ``tokenizer`` is transformers' own; ``vocab_size`` is ``V``; ``eos_token_ids`` end an answer where its grammar may
    end. The library is imported and gets the tokenizer when the first format is compiled.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[ResponseFormat, Any] = OrderedDict()

    def compile(self, response_format: ResponseFormat) -> None:
        """Compiles a format, so that :meth:`constraint` has it ready. Raises ``InvalidArgumentError`` for a format that
        cannot be followed.
        """
        self._compiled(response_format)

    def constraint(self, sampling: SamplingParams) -> Constraint | None:
        """Returns the constraint of each answer to a request with ``sampling``; ``None`` if it has no format."""
        if sampling.response_format is None:
            return None
        start = self._compiled(sampling.response_format)
        assert self._vocabulary is not None
        ending_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        return Constraint(start, self._vocabulary, self._vocabulary.mask_of(ending_ids), sampling.min_new_tokens)

    def _compiled(self, response_format: ResponseFormat) -> Any:
        if response_format in self._kept:
            self._kept.move_to_end(response_format)
            return self._kept[response_format]
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        self._kept[response_format] = start = self._vocabulary.compile(response_format)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return start


@dataclass(frozen=True)
class Constraint:
    """A request's compiled format. Each sequence of the request has a :class:`Matcher` of it."""

    # The library's matcher before the first token; it is copied, never advanced.
    start: Any
    vocabulary: _Vocabulary
    # The tokens that end an answer.
    ending: Mask
    min_new_tokens: int

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """The tokens that one sequence may have next. It stays with the sequence, running or not, and knows nothing of
    steps.

    A token that ends the request is allowed exactly where the grammar may end, and not before ``min_new_tokens``,
    unless no other token is. Tokens that the tokenizer does not know, and special ones, have no text and are allowed
    only where a grammar names them.
    """

    def __init__(self, constraint: Constraint):
        self._constraint = constraint
        self._state: Any = None
        self._num_tokens = 0
        self._mask: Future[Mask] | None = None
        self._threads = constraint.vocabulary.threads
        # The processor clock of the thread that computes the mask, and its value when that started.
        self._began: tuple[int, float] | None = None
        self._failure = ""
        self._num_slow = 0
        self._taken_s = 0.0

    def prepare(self) -> None:
        """Starts to compute the mask of the next token on another thread, unless that has started."""
        if self._mask is not None:
            return
        self._began = None
        self._threads = self._constraint.vocabulary.threads
        try:
            self._mask = self._threads.submit(self._compute)
        except RuntimeError as error:  # no thread can start: only this sequence fails
            self._mask = self._fail(error)

    def mask(self) -> Mask:
        """Returns the mask of the next token. No bit is set if the grammar can neither continue nor end, or on failure;
        see :attr:`error`.
        """
        while True:
            self.prepare()
            assert self._mask is not None
            try:
                return self._mask.result(MAX_MASK_CPU_S)
            except TimeoutError:
                if self._mask.cancel():  # not started: all threads are busy with slow masks
                    self._mask = None
                elif self._spent_s() > MAX_AWAITED_CPU_S and not self._mask.done():
                    why = f"a token took more than {MAX_AWAITED_CPU_S:g} s of processor time"
                    self._mask = self._fail(TimeoutError(why))
                else:
                    continue
                self._constraint.vocabulary.replace_threads(self._threads)

    def _spent_s(self) -> float:
        """Returns the processor time of the thread since it started with the mask; 0 if the system does not report
        it.
        """
        if self._began is None:
            return 0.0
        clock, began_s = self._began
        try:
            return time.clock_gettime(clock) - began_s
        except OSError:  # the mask is complete, and the thread has just ended
            return 0.0

    @property
    def error(self) -> str:
        """Returns the library's message if it reached a limit, or what else failed; empty otherwise."""
        self.mask()  # from here on no other thread uses the state, unless its mask was abandoned
        return self._failure or _message(self._state.get_error())

    def advance(self, token_id: int) -> bool:
        """Takes the next token, one that :meth:`mask` allows and that does not end the request. Returns whether the
        answer is complete, so that nothing can follow. Otherwise starts the next mask.
        """
        self.mask()
        self._mask = None
        began_s = time.thread_time()
        is_taken: bool = self._state.consume_token(token_id)
        took_s = time.thread_time() - began_s
        self._num_tokens += 1
        if is_taken and self._state.is_stopped():
            return True
        if took_s > SLOW_TAKE_CPU_S:
            self._taken_s += took_s
        if self._taken_s > MAX_TAKEN_CPU_S:
            why = f"its tokens took more than {MAX_TAKEN_CPU_S:g} s of processor time beside their masks"
            self._mask = self._fail(TimeoutError(why))
        self.prepare()
        return False

    def _compute(self) -> Mask:
        try:
            began_s = time.thread_time()
            if hasattr(time, "pthread_getcpuclockid"):
                self._began = time.pthread_getcpuclockid(threading.get_ident()), began_s
            mask = self._next_mask()
            self._num_slow += time.thread_time() - began_s > MAX_MASK_CPU_S
            if self._num_slow > MAX_SLOW_MASKS:
                raise TimeoutError(
                    f"of {MAX_SLOW_MASKS + 1} tokens each took more than {MAX_MASK_CPU_S:g} s of processor time"
                )
            return mask
        except BaseException as error:  # a panic of the library is no ``Exception``; interrupts do not reach here
            return self._fail(error).result()

    def _fail(self, error: BaseException) -> Future[Mask]:
        """Notes the failure, and returns a mask that allows no token."""
        self._failure = f"{type(error).__name__}: {error}"
        mask: Future[Mask] = Future()
        mask.set_result(self._constraint.vocabulary.mask_of(()))
        return mask

    def _next_mask(self) -> Mask:
        constraint, vocabulary = self._constraint, self._constraint.vocabulary
        if self._state is None:
            self._state = constraint.start.deep_copy()
        allowed, may_end = vocabulary.next_tokens(self._state)
        allowed &= ~constraint.ending
        if may_end and (self._num_tokens >= constraint.min_new_tokens or not allowed.any()):
            allowed |= constraint.ending
        return allowed


class _Vocabulary:
    """The model's tokens as the library knows them, and the threads that compute masks."""

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
            self._tokenizer = self._library.LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=self._end_id)
        except (AttributeError, ValueError) as error:
            raise InvalidArgumentError(
                f"response_format cannot be served: llguidance does not read this model's tokenizer: {error}"
            ) from error
        self._in_head = self.mask_of(token_id for token_id in range(vocab_size) if token_id != self._end_id)
        self._limits = self._library.LLParserLimits(**_LIMITS, verbose_errors=False)
        self.threads = _new_threads()

    def replace_threads(self, busy: ThreadPoolExecutor) -> None:
        """Replaces the threads if ``busy`` are the current ones: some of these compute what cannot be stopped."""
        if self.threads is busy:
            self.threads = _new_threads()
            busy.shutdown(wait=False)

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Returns a mask with the bits of ``token_ids`` set, except ids that the model's head does not have."""
        bits = np.zeros(32 * self._num_words, np.uint8)
        bits[[each for each in token_ids if each < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def compile(self, response_format: ResponseFormat) -> Any:
        """Returns the library's matcher at its start. Raises ``InvalidArgumentError`` for a format it cannot follow."""
        matcher = self._library.LLMatcher
        refused = f"response_format ({response_format.kind}) is refused"
        try:
            grammar = _GRAMMARS[response_format.kind](matcher, response_format.text)
        except ValueError as error:
            raise InvalidArgumentError(f"{refused}: {error}") from None
        start = matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if start.is_error():
            raise InvalidArgumentError(f"{refused}: {_message(start.get_error())}")
        first = start.deep_copy()
        allowed, may_end = self.next_tokens(first)
        if not (may_end or allowed.any()):
            reason = _message(first.get_error()) or "none of the model's tokens can begin such an answer"
            raise InvalidArgumentError(f"{refused}: {reason}")
        if response_format.kind == "json_schema":
            for names in optional_runs(json.loads(response_format.text)):
                if reason := self._too_wide(names):
                    raise InvalidArgumentError(
                        f"{refused}: an object has {len(names)} properties in a row that may be left out, "
                        f"{names[0]!r:.40} the first; make more of them required ({reason})"
                    )
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
        return _message(state.get_error())

    def next_tokens(self, state: Any) -> tuple[Mask, bool]:
        """Returns the mask of the library's tokens after ``state``, and whether the grammar may end there."""
        words = np.empty(-(-self._tokenizer.vocab_size // 32), np.int32)
        state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if state.is_error():
            return np.zeros(self._num_words, np.int32), False
        may_end = bool(words[self._end_id // 32] >> self._end_id % 32 & 1)
        return words[: self._num_words] & self._in_head, may_end


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="fastgen-mask")


def _first_of(mask: Mask) -> int:
    return int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax())


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
        required = part.get("required", ())
        required = frozenset(each for each in required if isinstance(each, str))
        runs = [list(run) for is_required, run in groupby(properties, required.__contains__) if not is_required]
        longest = max(runs, key=len, default=[])
        if len(longest) >= _MANY_PROPERTIES:
            yield longest


def _message(error: str) -> str:
    """Returns the library's message without its note that more could be said; empty if it only means that no token
    fits.
    """
    message = error.removesuffix("<non-verbose/>").strip()
    return "" if message == "NoExtensionBias" else message


def _import_library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise InvalidArgumentError(
            'response_format needs llguidance, which is not installed; pip install "fastgen[grammar]"'
        ) from None
    return llguidance


def _json_grammar(matcher: Any, schema: str) -> str:
    options = COMPACT_JSON_OPTIONS if is_compact(schema) else JSON_OPTIONS
    found: str = matcher.grammar_from_json_schema(schema, overrides=options)
    return found


def _any_grammar(matcher: Any, text: str) -> str:
    """Returns the library's grammar for ``text`` in Lark's notation or in GBNF, that of llama.cpp and xgrammar."""
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises classes of its own
            raise ValueError(f"this GBNF cannot be read: {error}") from None
    found: str = matcher.grammar_from_lark(text)
    return found


_GRAMMARS: dict[str, Callable[[Any, str], str]] = {
    "json_object": lambda matcher, _: _json_grammar(matcher, json.dumps({"type": "object"})),
    "json_schema": _json_grammar,
    "regex": lambda matcher, pattern: matcher.grammar_from_regex(pattern),
    "grammar": _any_grammar,
}
