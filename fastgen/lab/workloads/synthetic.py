"""Workloads made by arithmetic: lengths that are fixed or drawn, prefixes that are shared, long prompts among streams.

All of them may run in closed loops and, with :mod:`fastgen.lab.workloads.arrivals`, in open ones.
"""

# Annotations are not postponed: the registry reads the types of the fields.

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastgen.arguments import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Check, Option, check
from fastgen.lab.workloads.named import stated
from fastgen.lab.workloads.prompts import drawn_ids, drawn_length, generator, same_ids
from fastgen.lab.workloads.request import PlannedRequest

_RATIO = Check("a number of at least 0 and below 1", lambda value: 0 <= value < 1)
_PromptTokens = Annotated[int, Option("Tokens of a prompt.", check=AT_LEAST_1, name="prompt")]
_AnswerTokens = Annotated[int, Option("Tokens of an answer.", check=AT_LEAST_1, name="answer")]
_Requests = Annotated[int, Option("Number of requests.", check=AT_LEAST_1, name="n")]


@dataclass(frozen=True, kw_only=True)
class FixedLengths:
    """Prompts of one length, of drawn tokens, and answers of one length."""

    name: ClassVar[str] = "fixed"
    num_prompt_tokens: _PromptTokens = 512
    num_new_tokens: _AnswerTokens = 128
    num_requests: _Requests = 100

    def __post_init__(self) -> None:
        check(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        draw = generator(seed, "prompts")
        return [
            PlannedRequest(
                prompt_ids=drawn_ids(draw, self.num_prompt_tokens, vocab_size), num_new_tokens=self.num_new_tokens
            )
            for _ in range(self.num_requests)
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True, kw_only=True)
class AWSShortPrompts(FixedLengths):
    """The first scenario of AWS's post on continuous batching of Falcon-40B: prompts of 32 tokens, answers of 128."""

    name: ClassVar[str] = "aws-32-128"
    num_prompt_tokens: _PromptTokens = 32
    num_new_tokens: _AnswerTokens = 128


@dataclass(frozen=True, kw_only=True)
class AWSLongPrompts(FixedLengths):
    """The second scenario of AWS's post on continuous batching of Falcon-40B: prompts of 256 tokens, answers of 32."""

    name: ClassVar[str] = "aws-256-32"
    num_prompt_tokens: _PromptTokens = 256
    num_new_tokens: _AnswerTokens = 32


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths drawn evenly from ``[length * (1 - ratio), length * (1 + ratio)]``, as ``vllm bench`` does with
    ``--random-range-ratio``, and drawn tokens.
    """

    name: ClassVar[str] = "random"
    num_prompt_tokens: _PromptTokens = 512
    num_new_tokens: _AnswerTokens = 128
    range_ratio: Annotated[float, Option("How far lengths lie from their mean, as a share of it.", check=_RATIO)] = 0.5
    num_requests: _Requests = 100

    def __post_init__(self) -> None:
        check(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        lengths, draw = generator(seed, "lengths"), generator(seed, "prompts")

        return [
            PlannedRequest(
                prompt_ids=drawn_ids(draw, drawn_length(lengths, self.num_prompt_tokens, self.range_ratio), vocab_size),
                num_new_tokens=drawn_length(lengths, self.num_new_tokens, self.range_ratio),
            )
            for _ in range(self.num_requests)
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Groups of requests. The prompts of a group begin with the same tokens; groups follow each other in drawn order.

    Every group has the same number of requests, or one more.
    """

    name: ClassVar[str] = "prefixes"
    num_groups: Annotated[int, Option("Number of groups.", check=AT_LEAST_1, name="groups")] = 8
    num_prefix_tokens: Annotated[int, Option("Tokens that a group shares.", check=AT_LEAST_1, name="prefix")] = 512
    num_prompt_tokens: Annotated[
        int, Option("Tokens of a prompt after its prefix.", check=AT_LEAST_1, name="prompt")
    ] = 128
    num_new_tokens: _AnswerTokens = 64
    num_requests: _Requests = 128

    def __post_init__(self) -> None:
        check(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        groups = [number % self.num_groups for number in range(self.num_requests)]
        generator(seed, "order").shuffle(groups)
        prefixes = [
            same_ids(seed, f"group {group}", self.num_prefix_tokens, vocab_size) for group in range(self.num_groups)
        ]
        draw = generator(seed, "prompts")
        return [
            PlannedRequest(
                prompt_ids=prefixes[group] + drawn_ids(draw, self.num_prompt_tokens, vocab_size),
                num_new_tokens=self.num_new_tokens,
            )
            for group in groups
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True, kw_only=True)
class Intruders:
    """Streams that run from the beginning, and long prompts that come among them at even intervals.

    All requests have a time, so it is for open loops: what a long prompt does to the gaps of those streams is the
    question that it asks. The first long prompt comes after one interval.
    """

    name: ClassVar[str] = "intruders"
    num_streams: Annotated[int, Option("Number of streams.", check=AT_LEAST_1, name="streams")] = 8
    num_prompt_tokens: Annotated[int, Option("Tokens of a stream's prompt.", check=AT_LEAST_1, name="prompt")] = 64
    num_new_tokens: Annotated[int, Option("Tokens of a stream's answer.", check=AT_LEAST_1, name="answer")] = 256
    num_long: Annotated[int, Option("Number of long prompts.", check=AT_LEAST_0, name="long")] = 4
    num_long_tokens: Annotated[int, Option("Tokens of a long prompt.", check=AT_LEAST_1, name="long_prompt")] = 2048
    num_long_new_tokens: Annotated[
        int, Option("Tokens of the answer to a long prompt.", check=AT_LEAST_1, name="long_answer")
    ] = 16
    every_s: Annotated[float, Option("Seconds between long prompts.", check=ABOVE_0)] = 2.0

    def __post_init__(self) -> None:
        check(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        draw = generator(seed, "prompts")

        def request(num_tokens: int, num_new_tokens: int, due_s: float) -> PlannedRequest:
            ids = drawn_ids(draw, num_tokens, vocab_size)
            return PlannedRequest(prompt_ids=ids, num_new_tokens=num_new_tokens, due_s=due_s)

        streams = [request(self.num_prompt_tokens, self.num_new_tokens, 0.0) for _ in range(self.num_streams)]
        return streams + [
            request(self.num_long_tokens, self.num_long_new_tokens, number * self.every_s)
            for number in range(1, self.num_long + 1)
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)


@dataclass(frozen=True, kw_only=True)
class Chats:
    """Conversations. Every turn adds tokens to what was said before, and is answered with tokens of its own.

    Requests come conversation by conversation, so that a client of a closed loop holds one conversation after another.
    The first prompt has the tokens of one turn; the last one, with the defaults, 9 * (150 + 350) + 150 = 4650. With a
    ``range_ratio`` lengths are drawn as those of :class:`RandomLengths` are.
    """

    name: ClassVar[str] = "chats"
    num_sessions: Annotated[int, Option("Number of conversations.", check=AT_LEAST_1, name="n")] = 12
    num_turns: Annotated[int, Option("Turns of a conversation.", check=AT_LEAST_1, name="turns")] = 10
    num_prompt_tokens: Annotated[int, Option("Tokens that a turn adds.", check=AT_LEAST_1, name="prompt")] = 150
    num_new_tokens: _AnswerTokens = 350
    think_s: Annotated[float, Option("Seconds from an answer to the next turn.", check=AT_LEAST_0)] = 0.0
    range_ratio: Annotated[float, Option("How far lengths lie from their mean, as a share of it.", check=_RATIO)] = 0.0

    def __post_init__(self) -> None:
        check(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        lengths, draw = generator(seed, "lengths"), generator(seed, "prompts")
        return [
            PlannedRequest(
                prompt_ids=drawn_ids(draw, drawn_length(lengths, self.num_prompt_tokens, self.range_ratio), vocab_size),
                num_new_tokens=drawn_length(lengths, self.num_new_tokens, self.range_ratio),
                session=f"chat {session}",
                think_s=self.think_s if turn else 0.0,
                continues=turn > 0,
            )
            for session in range(self.num_sessions)
            for turn in range(self.num_turns)
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)
