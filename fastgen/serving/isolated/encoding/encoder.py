"""The server's side of the processes that encode texts."""

from __future__ import annotations

from typing import Any

import msgspec

from fastgen.errors import InvalidArgumentError
from fastgen.serving.isolated.processes import HelperEndedError, HelperProcesses
from fastgen.serving.isolated.queue import ByHelpers, WorkQueue

# Processor time to encode a text. That is enough for about a million tokens.
MAX_CPU_S = 2.0
# Memory of the process beyond what it has at its start.
MAX_MEMORY_BYTES = 1 << 30
MAX_PROCESSES = 4
# Texts that may wait for a process.
MAX_WAITING = 1024


class Text(msgspec.Struct, array_like=True):
    """A text to encode."""

    text: str
    add_special_tokens: bool


class Encoded(msgspec.Struct, array_like=True):
    """Its token ids, or why there are none."""

    ids: list[int]
    error: str | None = None


class TextEncoder:
    """Encodes texts as ``tokenizer`` does, a fast one of transformers.

    The time may grow with a high power of the text's length, and encoding cannot be stopped. So a tokenizer that may
    encode slowly runs in a process that is ended if it takes too long or too much memory. May be used from several
    threads.
    """

    def __init__(self, tokenizer: Any):
        beginning = tokenizer.backend_tokenizer.to_str().encode()
        self.processes = HelperProcesses(
            "fastgen.serving.isolated.encoding.process", beginning, max_processes=MAX_PROCESSES
        )
        queue = WorkQueue(
            "texts wait to be encoded", max_running=MAX_PROCESSES, max_waiting=MAX_WAITING, retry_after_s=MAX_CPU_S
        )
        self.encode = ByHelpers(self._encode, queue)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids. Raises ``InvalidArgumentError`` if it takes too long."""
        try:
            answer = self.processes.ask(msgspec.msgpack.encode(Text(text, add_special_tokens)))
        except HelperEndedError as ended:
            raise InvalidArgumentError(f"the model's tokenizer cannot encode this text: {_why(ended)}") from None
        encoded = msgspec.msgpack.decode(answer, type=Encoded)
        if encoded.error is not None:
            raise InvalidArgumentError(f"the model's tokenizer cannot encode this text: {encoded.error}")
        return encoded.ids


def _why(ended: HelperEndedError) -> str:
    if ended.took_too_long:
        return f"it took more than {MAX_CPU_S:g} s of processor time"
    return f"the process that encoded it ended with status {ended.status}"
