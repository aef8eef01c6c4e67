"""Prompts and conversations, one or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar, cast

from fastgen.errors import InvalidArgumentError

# Text, or token ids.
Prompt = str | Sequence[int]
# Messages, each with a ``role`` and a ``content``.
Conversation = Sequence[Mapping[str, Any]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class TemplateOptions:
    """The way in which a chat template renders a conversation."""

    # Whether the text ends where the assistant's next message begins.
    add_generation_prompt: bool = True
    # Whether the text ends with the content of the last message, so that the answer continues it.
    continue_final_message: bool = False
    # Whether the tokenizer puts its special tokens around the text. Templates usually write them.
    add_special_tokens: bool = False
    # More variables of the template, such as ``enable_thinking``.
    variables: Mapping[str, Any] = field(default_factory=dict)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Returns the prompts as a list, and whether it was a single one (text or token ids). An empty list has no
    prompts.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = as_list(prompts)
    if items is None:
        raise InvalidArgumentError(
            f"a prompt is a string or a list of token ids, not {type(prompts).__name__}; several are a list of these"
        )
    single = bool(items) and isinstance(items[0], Integral)
    return ([cast(Prompt, items)], True) if single else (cast(list[Prompt], items), False)


def as_list(value: object) -> list[Any] | None:
    """Returns the items of a list, tuple, range, array or tensor; ``None`` for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Sequence):
        return None
    return list(value)


def as_token_ids(prompt: object) -> list[int]:
    """Returns the ids of a prompt that is not text. Raises ``InvalidArgumentError`` if it holds anything else."""
    items = as_list(prompt)
    if items is None:
        raise InvalidArgumentError(f"a prompt is a string or a list of token ids, not {prompt!r:.40}")
    if set(map(type, items)) <= {int}:
        return items
    for position, token_id in enumerate(items):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise InvalidArgumentError(f"prompt token {position} is {token_id!r:.40}, not a token id (an integer)")
    return [int(token_id) for token_id in items]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> tuple[list[Conversation], bool]:
    """Returns the conversations as a list, and whether it was a single one. An empty list has no conversations."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgumentError(
            f"a conversation is a list of {{'role': …, 'content': …}}, not {type(messages).__name__}"
        )
    items = list(messages)
    single = bool(items) and isinstance(items[0], Mapping)
    return ([cast(Conversation, items)], True) if single else (cast(list[Conversation], items), False)


def encode_each(encode: Callable[[_T], list[int]], items: list[_T]) -> list[list[int]]:
    """Returns the token ids of each of ``items``. An error names the item."""
    encoded = []
    for index, item in enumerate(items):
        try:
            encoded.append(encode(item))
        except InvalidArgumentError as error:
            name_prompt(error, index, len(items))
            raise
    return encoded


def name_prompt(error: InvalidArgumentError, index: int, num_prompts: int) -> None:
    """Lets ``error`` name its prompt if there are several."""
    if num_prompts > 1:
        error.args = (f"prompt {index}: {error}",)
