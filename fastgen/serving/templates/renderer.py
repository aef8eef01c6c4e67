"""The server's side of the processes that render chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastgen.errors import InvalidArgumentError
from fastgen.serving.helper_processes import HelperEndedError, HelperProcesses

# Of processor time, to render a conversation.
MAX_CPU_S = 2.0
# What the process may have beside what it starts with.
MAX_MEMORY_BYTES = 512 << 20
# Of a rendered conversation.
MAX_CHARACTERS = 1 << 24
MAX_PROCESSES = 4


class Conversation(msgspec.Struct, array_like=True):
    """What is to be rendered."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    special_tokens: dict[str, Any]


class Rendered(msgspec.Struct, array_like=True):
    """Its text, or why there is none."""

    text: str | None
    error: str | None


class TemplateRenderer:
    """Renders the chat template of ``tokenizer``, one of transformers'. A template is a program, and may come from
    anywhere: what it does happens in a process that is ended where it takes too long or too much memory. May be used
    from several threads.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.processes = HelperProcesses("fastgen.serving.templates.process", max_processes=MAX_PROCESSES)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The text of a conversation, up to where the answer begins. Raises whatever stands in its way."""
        told = [dict(tool) for tool in tools] if tools is not None else None
        conversation = Conversation(
            template=self._tokenizer.get_chat_template(tools=told),
            messages=[dict(message) for message in messages],
            tools=told,
            special_tokens={name: str(token) for name, token in self._tokenizer.special_tokens_map.items()},
        )
        try:
            answer = self.processes.ask(msgspec.msgpack.encode(conversation))
        except HelperEndedError as ended:
            raise InvalidArgumentError(_why(ended)) from None
        rendered = msgspec.msgpack.decode(answer, type=Rendered)
        if rendered.text is None:
            raise InvalidArgumentError(rendered.error or "it failed")
        return rendered.text


def _why(ended: HelperEndedError) -> str:
    if ended.took_too_long:
        return f"it took more than {MAX_CPU_S:g} s of processor time"
    return f"the process that rendered it ended with status {ended.status}"
