"""The server's side of the processes that try to compile formats."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import msgspec

from fastgen.runtime.requests.response_format import Kind, ResponseFormat
from fastgen.serving.isolated.processes import HelperEndedError, HelperProcesses
from fastgen.serving.refusals import UnavailableError

# Processor time to compile a format.
MAX_CPU_S = 0.5
# Memory of the process beyond what it has at its start.
MAX_MEMORY_BYTES = 1 << 30
MAX_PROCESSES = 2
# Answers that are kept, and the most characters of one: the library's may repeat the whole format.
_MAX_KEPT = 256
_MAX_REASON = 2000


class Model(msgspec.Struct, array_like=True):
    """The model for which formats are compiled; ``tokenizer`` is the JSON form of the library ``tokenizers``."""

    tokenizer: str
    vocab_size: int


class Trial(msgspec.Struct, array_like=True):
    """A format to compile."""

    kind: Kind
    text: str


class FormatTrials:
    """Tries formats for a model with ``tokenizer``, a fast one of transformers, and a head of ``vocab_size`` tokens.

    The library that compiles formats has its own limits, but they are incomplete, and a compilation cannot be stopped.
    So each format is first compiled in a process that is ended if it takes too long, and only then by the engine. May
    be used from several threads.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        model = msgspec.msgpack.encode(Model(tokenizer.backend_tokenizer.to_str(), vocab_size))
        self.processes = HelperProcesses(
            "fastgen.serving.isolated.grammars.process", model, max_processes=MAX_PROCESSES
        )
        # By the digest of each format, whose text may be long.
        self._tried: OrderedDict[bytes, str | None] = OrderedDict()

    def knows(self, response_format: ResponseFormat) -> bool:
        """Returns whether the answer of :meth:`refusal` is already known."""
        return response_format.kind == "json_object" or _digest(response_format) in self._tried

    def refusal(self, response_format: ResponseFormat) -> str | None:
        """Returns why the format would be refused, or ``None``. Raises ``UnavailableError`` if that cannot be found out
        now; then nothing is remembered.
        """
        if response_format.kind == "json_object":
            return None
        digest = _digest(response_format)
        with contextlib.suppress(KeyError):  # looked up once, because another thread may remove it meanwhile
            return self._tried[digest]
        request = msgspec.msgpack.encode(Trial(response_format.kind, response_format.text))
        try:
            found = msgspec.msgpack.decode(self.processes.ask(request), type=str | None)
        except HelperEndedError as ended:
            if ended.status > 0:  # an error of its own: the system refused it a thread, for example
                raise UnavailableError(
                    f"the process that compiles formats failed with status {ended.status}; try again"
                ) from None
            found = refused(response_format.kind, _why(ended))
        if found is not None and len(found) > _MAX_REASON:
            found = f"{found[:_MAX_REASON]}…"
        self._tried[digest] = found
        if len(self._tried) > _MAX_KEPT:
            self._tried.popitem(last=False)
        return found


def refused(kind: Kind, reason: str) -> str:
    """Returns the refusal of a format of ``kind``."""
    return f"response_format ({kind}) is refused: {reason}"


@lru_cache(maxsize=8)  # the prompts of one call ask for the same
def _digest(response_format: ResponseFormat) -> bytes:
    return hashlib.sha256(f"{response_format.kind} {response_format.text}".encode()).digest()


def _why(ended: HelperEndedError) -> str:
    if ended.took_too_long:
        return f"it takes more than {MAX_CPU_S:g} s of processor time to compile"
    return f"the process that compiled it ended with status {ended.status}"
