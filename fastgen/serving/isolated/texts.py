"""Conversations and texts as token ids. Where helper processes render and encode them, each step has its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.prompts import Conversation, TemplateOptions
from fastgen.serving.isolated.queue import in_turn

_USUAL = TemplateOptions()


async def encode_chat(
    codec: TextCodec,
    messages: Conversation,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: TemplateOptions = _USUAL,
) -> list[int]:
    """Returns what ``codec.encode_chat`` does, and raises what it does. Raises ``OverloadedError`` if too many wait.

    A call that is cancelled while it waits gives up its place.
    """
    text = await in_turn(codec.render_chat, lambda: codec.rendered(messages, tools, options))
    return await encode_text(codec, text, add_special_tokens=options.add_special_tokens)


async def encode_text(codec: TextCodec, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns what ``codec.encode_text`` does, as :func:`encode_chat`."""
    return await in_turn(codec.encode_plain, lambda: codec.encode_text(text, add_special_tokens=add_special_tokens))
