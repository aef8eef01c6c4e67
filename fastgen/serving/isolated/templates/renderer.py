"""The server's side of the processes that render chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.text.prompts import TemplateOptions
from fastgen.serving.isolated.processes import HelperEndedError, HelperProcesses
from fastgen.serving.isolated.queue import ByHelpers, WorkQueue

# Processor time to render a conversation.
MAX_CPU_S = 2.0
# Memory of the process beyond what it has at its start.
MAX_MEMORY_BYTES = 512 << 20
# Longest text of a rendered conversation.
MAX_CHARACTERS = 1 << 24
MAX_PROCESSES = 4
# Conversations that may wait for a process. Most take about a millisecond.
MAX_WAITING = 1024


class Conversation(msgspec.Struct, array_like=True):
    """A conversation to render."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    # Its special tokens by name, and what a request sets.
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class Rendered(msgspec.Struct, array_like=True):
    """Its text, or why there is none."""

    text: str | None
    error: str | None


class TemplateRenderer:
    """Renders the chat template of ``tokenizer``, one of transformers'.

    A template is a program, and may come from an untrusted source. It runs in a process that is ended if it takes too
    long or too much memory. May be used from several threads.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.processes = HelperProcesses("fastgen.serving.isolated.templates.process", max_processes=MAX_PROCESSES)
        queue = WorkQueue(
            "conversations wait to be rendered",
            max_running=MAX_PROCESSES,
            max_waiting=MAX_WAITING,
            retry_after_s=MAX_CPU_S,
        )
        self.render = ByHelpers(self._render, queue)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: TemplateOptions,
    ) -> str:
        """Returns the text of a conversation, up to where the answer begins. Raises if it cannot be rendered."""
        plain_tools = [dict(tool) for tool in tools] if tools is not None else None
        conversation = Conversation(
            template=self._tokenizer.get_chat_template(tools=plain_tools),
            messages=[dict(message) for message in messages],
            tools=plain_tools,
            variables={name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
            | dict(options.variables),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
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
