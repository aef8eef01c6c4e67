"""Sampling parameters of a request, checked when they are made.

A :class:`SamplingParams` that exists is valid: every field has its type and lies in its range.
:meth:`SamplingParams.check_against` checks what depends on the model (is this token id in the vocabulary?).
"""

import difflib
import inspect
import math
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self, cast

from fastgen.arguments import Option, arguments_of
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.biases import NO_BIASES, Biases
from fastgen.runtime.requests.response_format import ResponseFormat, parse_response_format

_REPEATABLE, _WITH_JSON = "Repeatable.", "Shown with --json."
# Most completions of one request.
MAX_N = 16384


@dataclass(frozen=True, kw_only=True, init=False)
class SamplingParams:
    """The rules by which the tokens of one request are chosen, and by which it ends.

    Raises ``InvalidArgumentError`` for a bad field.

    A tie between equal logits goes to the lowest id when greedy. Filters apply in the order of the fields:
    penalties, bias, what is forbidden, temperature, top-k, top-p, min-p (:mod:`fastgen.compile.ops.sampling.reference`
    has the arithmetic).
    """

    # The request finishes with ``"length"`` after this many tokens; at least 1.
    max_new_tokens: Annotated[int, Option("Longest answer, in tokens.")] = 128
    # Before this many tokens neither an end-of-text token, a stop token nor a stop string ends the request.
    min_new_tokens: Annotated[int, Option("Shortest answer, in tokens.")] = 0
    # Divides the positive, multiplies the negative logits of tokens seen in prompt or answer; > 0, 1 is off.
    repetition_penalty: Annotated[
        float, Option("Above 1: make tokens seen before less likely.", default="the model's, or 1")
    ] = 1.0
    # Subtracted from the logit of each token generated before; [−2, 2].
    presence_penalty: Annotated[float, Option("Subtracted from the logit of each token generated before.")] = 0.0
    # Subtracted from a token's logit as often as it was generated before; [−2, 2].
    frequency_penalty: Annotated[
        float, Option("Subtracted from a token's logit as often as it was generated before.")
    ] = 0.0
    # Token id to the bias added to its logit; [−100, 100].
    logit_bias: Annotated[
        Mapping[int, float],
        Option("Added to the logits of tokens.", flag_help=_REPEATABLE, metavar="ID=BIAS", flag_type=list[str]),
    ] = field(default_factory=dict, hash=False)
    # Divides the logits; 0 is greedy, and then top-k, top-p, min-p and the seed have no effect.
    temperature: Annotated[
        float, Option("Divides the logits; 0 takes the likeliest token.", default="the model's, or 0")
    ] = 0.0
    # Keep the k most likely tokens; 0 keeps all.
    top_k: Annotated[
        int, Option("Draw from so many of the likeliest tokens; 0 is all.", default="the model's, or 0")
    ] = 0
    # Keep the most likely tokens that together have at least this probability; (0, 1].
    top_p: Annotated[
        float,
        Option("Draw from the likeliest tokens that together have this probability.", default="the model's, or 1"),
    ] = 1.0
    # Keep tokens at least this probable relative to the most probable one; [0, 1].
    min_p: Annotated[
        float,
        Option(
            "Draw from tokens with at least this share of the likeliest's probability.", default="the model's, or 0"
        ),
    ] = 0.0
    # Any integer, taken modulo 2**64. ``None`` draws one for the request when it is submitted.
    seed: Annotated[int | None, Option("The same seed draws the same answer.", default="a random one")] = None
    # How many completions of the prompt; 1 to :data:`MAX_N`.
    n: Annotated[int, Option("Answers to each prompt.", short_flag="-n")] = 1
    # Strings that end the request and are not part of its text. A single string or any iterable of strings.
    stop: Annotated[
        tuple[str, ...], Option("End the answer before this text.", flag_help=_REPEATABLE, metavar="TEXT")
    ] = ()
    # Token ids that end the request, beside the model's own end-of-text ids; they contribute no text.
    stop_token_ids: Annotated[
        tuple[int, ...],
        Option("End the answer at this token.", flag_help=_REPEATABLE, flag="--stop-token-id", metavar="ID"),
    ] = ()
    # The model's end-of-text tokens are ordinary ones: they end nothing, and ``min_new_tokens`` allows them.
    ignore_eos: Annotated[bool, Option("Do not end at the end-of-text token.")] = False
    # ``None``, or how many alternatives are reported beside each generated token's own log-probability.
    logprobs: Annotated[
        int | None,
        Option("Log-probabilities of each token and of so many alternatives.", flag_help=_WITH_JSON),
    ] = None
    # The same for each prompt token.
    prompt_logprobs: Annotated[int | None, Option("The same for the tokens of the prompt.", flag_help=_WITH_JSON)] = (
        None
    )
    # Seconds from submission after which the request finishes with ``"timeout"``; ``None`` is no limit.
    timeout_s: Annotated[float | None, Option("Seconds after which an answer is cut off.")] = None
    # How many beams a beam search keeps, of which the best ``n`` are returned, best first; 1 is no beam search.
    # Nothing is drawn, so ``temperature`` must be 0; penalties and biases apply to log-probabilities in place of
    # logits, and stop strings are not supported. :mod:`fastgen.runtime.sampling.beam_search` has the algorithm.
    beam_width: Annotated[int, Option("Beams of a beam search; 1 is none.")] = 1
    # With beams: the sum of a hypothesis' log-probabilities is divided by its length to this power; [−10, 10]. Above 0
    # it favours long answers.
    length_penalty: Annotated[float, Option("With beams: above 0 favours long answers.")] = 1.0
    # With beams: whether the search ends as soon as ``beam_width`` hypotheses have ended (``True``), when no live beam
    # is likely to beat them (``False``), or when none could at any length (``"never"``).
    early_stopping: Annotated[
        bool | Literal["never"],
        Option("With beams: end when as many answers have ended.", metavar="true|false|never", flag_type=str),
    ] = False
    # The request's class: any integer; lower is more urgent. It decides which request gets the next free slot,
    # whose prompt is computed first and whose blocks are freed last; a request that has waited long moves up.
    priority: Annotated[int, Option("The lower the more urgent, among requests that run together.")] = 0
    # The answer's shape, as :func:`~fastgen.runtime.requests.response_format.parse_response_format` takes it.
    response_format: Annotated[
        ResponseFormat | None,
        Option('Shape that the answer must have, such as {"type": "json_object"}.', metavar="JSON"),
    ] = None

    def __init__(  # what is taken; the fields hold what the checks make of it
        self,
        *,
        max_new_tokens: int = 128,
        min_new_tokens: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        n: int = 1,
        stop: str | Iterable[str] | None = (),
        stop_token_ids: Iterable[int] | None = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        timeout_s: float | None = None,
        beam_width: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        priority: int = 0,
        response_format: ResponseFormat | Mapping[str, Any] | None = None,
    ) -> None: ...

    def _fill(self, given: dict[str, object]) -> None:
        """Sets the fields to what is ``given``, each checked, and the rest to the defaults, which are valid."""
        kept = vars(self)  # field by field, ``object.__setattr__`` would take most of the time
        kept.update(_DEFAULTS, logit_bias=NO_BIASES)
        for name, value in given.items():
            if name not in _DEFAULTS:
                near = difflib.get_close_matches(name, _CHECKS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(_CHECKS)}."
                raise InvalidArgumentError(f"sampling parameter {name!r} is not known; {hint}")
            if value is not _DEFAULTS[name]:
                kept[name] = _CHECKS[name](name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidArgumentError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), not {self.min_new_tokens}"
            )
        if self.ignore_eos and self.response_format is not None:
            raise InvalidArgumentError("ignore_eos cannot go with response_format, whose end is the answer's end")
        if self.beam_width > 1:
            self._check_beams()

    @classmethod
    def from_fields(cls, defaults: Self, **given: Any) -> Self:
        """Returns ``defaults`` with the given fields replaced. Raises ``InvalidArgumentError`` for an unknown or
        invalid field.
        """
        return replace(defaults, **given)

    def _check_beams(self) -> None:
        if not self.greedy:
            raise InvalidArgumentError(
                f"beam_width={self.beam_width} needs temperature=0, since a beam search draws nothing; it is "
                f"{self.temperature}, as the request says or the model's own defaults"
            )
        if self.stop:
            raise InvalidArgumentError(
                f"beam_width={self.beam_width} does not go with stop strings; end beams with stop_token_ids"
            )
        if self.response_format is not None:
            raise InvalidArgumentError(
                f"beam_width={self.beam_width} does not go with response_format; ask for one of them"
            )
        if self.n > self.beam_width:
            raise InvalidArgumentError(
                f"n={self.n} completions of beam_width={self.beam_width} beams: ask for at most as many as there are "
                "beams"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end an answer of a model with ``eos_token_ids``. They contribute no text."""
        if self.ignore_eos:
            return frozenset(self.stop_token_ids)
        return eos_token_ids.union(self.stop_token_ids) if self.stop_token_ids else eos_token_ids

    def check_against(self, vocab_size: int) -> None:
        """Raises ``InvalidArgumentError`` unless every token id and count fits a vocabulary of ``vocab_size``."""
        for name, token_ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidArgumentError(
                        f"{name} holds token id {token_id}; the model's ids are 0 to {vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise InvalidArgumentError(f"{name} must be at most the vocabulary's size, {vocab_size}, not {count}")


def default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Returns the defaults of a model whose ``generation_config.json`` holds ``generation_config``.

    Its repetition penalty applies. They are greedy unless it says ``"do_sample": true``. Then its temperature (1 if
    missing), top-k, top-p and min-p apply too, and what is missing or ``null`` is off. Lengths are not taken from it.
    """
    samples = generation_config.get("do_sample") is True
    names = ("repetition_penalty", *(("temperature", "top_k", "top_p", "min_p") if samples else ()))
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    try:
        return SamplingParams(**{"temperature": 1.0 if samples else 0.0, **given})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"generation_config.json: {error}") from None


def not_followed(generation_config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a ``generation_config.json`` by which transformers would choose other tokens, and which
    are not followed here.
    """
    off = _NOT_FOLLOWED | (_NOT_FOLLOWED_IN_SAMPLING if generation_config.get("do_sample") is True else {})
    return [name for name, value in off.items() if generation_config.get(name, value) not in (value, None, [])]


def resolve_seed(sampling: SamplingParams) -> SamplingParams:
    """Returns ``sampling`` with a seed if it draws: its own, or a fresh 64-bit one from the operating system.

    The engine calls this once, when a request is submitted, so that all later draws come from one seed, also those
    repeated after a preemption.
    """
    if sampling.seed is not None or sampling.greedy:
        return sampling
    return changed(sampling, seed=secrets.randbits(64))


def changed(sampling: SamplingParams, **fields: object) -> SamplingParams:
    """Returns a copy of ``sampling`` with other values of some ``fields``, which are not checked."""
    copy = object.__new__(SamplingParams)  # the others are checked already, and checks take ten times as long
    copy.__dict__.update(vars(sampling), **fields)
    return copy


# Keys of a ``generation_config.json`` by which other tokens are chosen, and the values with which they do nothing.
_NOT_FOLLOWED: dict[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "watermarking_config": None,
}
_NOT_FOLLOWED_IN_SAMPLING: dict[str, Any] = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


# One check per field: takes the field's name and the value given, returns the value to keep or raises.
_Check = Callable[[str, object], object]


def _refuse(name: str, wanted: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} must be {wanted}, not {reprlib.repr(value)}")


def _integer(minimum: int | None = None, maximum: int | None = None) -> _Check:
    wanted = "an integer" if minimum is None else f"an integer ≥ {minimum}"
    if maximum is not None:
        wanted = f"an integer from {minimum} to {maximum}"

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, wanted, value)
        number = int(value)
        if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
            raise _refuse(name, wanted, value)
        return number

    return check


def _number(wanted: str, accepts: Callable[[float], bool]) -> _Check:
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, wanted, value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not accepts(number):
            raise _refuse(name, wanted, value)
        return number

    return check


def _optional(inner: _Check) -> _Check:
    def check(name: str, value: object) -> object:
        return None if value is None else inner(name, value)

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _early_stopping(name: str, value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):
        return value
    raise _refuse(name, "true, false or 'never'", value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _items(name, "a string or a list of strings", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _refuse(name, "a string or a list of strings, none of them empty", value)
    return cast("tuple[str, ...]", strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    check = _integer(0)
    return tuple(cast(int, check(f"each of {name}", item)) for item in _items(name, "a list of token ids", value))


def _logit_bias(name: str, value: object) -> Biases:
    if isinstance(value, Biases):  # of other parameters, and checked there
        return value
    if value is None:
        return NO_BIASES
    if not isinstance(value, Mapping):
        raise _refuse(name, "a mapping from token id to a number in [-100, 100]", value)
    token_id, bias = _integer(0), _number("in [-100, 100]", lambda number: -100 <= number <= 100)
    return Biases(
        (cast(int, token_id(f"each token id of {name}", key)), cast(float, bias(f"{name}[{key!r}]", number)))
        for key, number in value.items()
    )


def _items(name: str, wanted: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _refuse(name, wanted, value)
    return tuple(value)


_CHECKS: dict[str, _Check] = {
    "max_new_tokens": _integer(1),
    "min_new_tokens": _integer(0),
    "repetition_penalty": _number("a finite number > 0", lambda number: number > 0),
    "presence_penalty": _number("a number in [-2, 2]", lambda number: -2 <= number <= 2),
    "frequency_penalty": _number("a number in [-2, 2]", lambda number: -2 <= number <= 2),
    "logit_bias": _logit_bias,
    "temperature": _number("a finite number ≥ 0", lambda number: number >= 0),
    "top_k": _integer(0),
    "top_p": _number("a number in (0, 1]", lambda number: 0 < number <= 1),
    "min_p": _number("a number in [0, 1]", lambda number: 0 <= number <= 1),
    "seed": _optional(_integer()),
    "n": _integer(1, MAX_N),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "logprobs": _optional(_integer(0)),
    "prompt_logprobs": _optional(_integer(0)),
    "timeout_s": _optional(_number("a finite number of seconds > 0", lambda number: number > 0)),
    "beam_width": _integer(1, MAX_N),
    "length_penalty": _number("a number in [-10, 10]", lambda number: -10 <= number <= 10),
    "early_stopping": _early_stopping,
    "priority": _integer(),
    "response_format": lambda _, value: parse_response_format(value),
}
assert list(_CHECKS) == [item.name for item in fields(SamplingParams)], "every field has its check"
_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}


# An ``__init__`` with so many parameters takes microseconds for fields that are mostly at their defaults, and a server
# makes one for each request. Its signature is kept for readers and type checkers.
@wraps(SamplingParams.__init__)
def _init(self: SamplingParams, **given: object) -> None:
    self._fill(given)


SamplingParams.__init__ = _init  # type: ignore[method-assign]
SamplingParams.__doc__ = "\n".join(
    [inspect.cleandoc(SamplingParams.__doc__ or ""), ""]
    + [f"``{each.name}``: {each.option.help} Default: {each.default!r}." for each in arguments_of(SamplingParams)]
)
