"""The process that renders chat templates: ``python -m fastgen.serving.isolated.templates.process``.

It renders them as transformers does.
"""

from __future__ import annotations

from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from fastgen.serving.isolated.processes import answer_all
from fastgen.serving.isolated.templates.renderer import (
    MAX_CHARACTERS,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    Conversation,
    Rendered,
)


def render(conversation: Conversation) -> Rendered:
    """Returns the template's text for ``conversation``, or why there is none."""
    messages = [
        {name: value for name, value in message.items() if value is not None} for message in conversation.messages
    ]
    try:
        tools: list[Any] | None = conversation.tools
        found: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=conversation.template,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
        ((text,), _) = found
    except MemoryError:
        return Rendered(None, f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory")
    except Exception as error:  # any error of the template: division by zero, endless recursion
        return Rendered(None, f"{error}"[:2000] or type(error).__name__)
    if len(text) > MAX_CHARACTERS:
        return Rendered(None, f"it makes a text of more than {MAX_CHARACTERS} characters")
    return Rendered(text, None)


def main() -> None:
    """Renders conversations from standard input."""

    def answer(request: bytes) -> bytes:
        return msgspec.msgpack.encode(render(msgspec.msgpack.decode(request, type=Conversation)))

    answer_all(lambda _: answer, max_cpu_s=MAX_CPU_S, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
