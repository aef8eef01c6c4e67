"""The process that renders chat templates, as transformers does.

Run as ``python -m fastgen.serving.templates.process`` it reads conversations from standard input and writes their texts
to standard output, until the first is closed. An empty one comes first, once it is ready.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from fastgen.serving.templates.renderer import (
    MAX_CHARACTERS,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    Conversation,
    Rendered,
    read_message,
    write_message,
)


def render(conversation: Conversation) -> Rendered:
    """What the template makes of ``conversation``, or why it makes nothing."""
    messages = [
        {name: value for name, value in message.items() if value is not None} for message in conversation.messages
    ]
    try:
        tools: list[Any] | None = conversation.tools
        found: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=conversation.template,
            add_generation_prompt=True,
            **conversation.special_tokens,
        )
        ((text,), _) = found
    except MemoryError:
        return Rendered(None, f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory")
    except Exception as error:  # the template's: division by zero, endless recursion, anything
        return Rendered(None, f"{error}"[:2000] or type(error).__name__)
    if len(text) > MAX_CHARACTERS:
        return Rendered(None, f"it makes a text of more than {MAX_CHARACTERS} characters")
    return Rendered(text, None)


def main() -> None:
    """Render what comes. A rendering that takes too long ends this process: by a signal, which no template can keep
    from coming."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which is for the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    conversations, texts = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints is not to be taken for a text
    _limit_memory()
    write_message(texts, b"")  # it is ready
    while (message := read_message(conversations)) is not None:
        conversation = msgspec.msgpack.decode(message, type=Conversation)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        rendered = render(conversation)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_message(texts, msgspec.msgpack.encode(rendered))


def _limit_memory() -> None:
    """Let this process have so much more than it has now, where the system can tell how much that is."""
    if sys.platform == "linux":
        size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MAX_MEMORY_BYTES,) * 2)


if __name__ == "__main__":
    main()
