"""The process that encodes texts: ``python -m fastgen.serving.isolated.encoding.process``.

It imports neither transformers nor torch, so that it starts fast.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer

from fastgen.serving.isolated.encoding.encoder import MAX_CPU_S, MAX_MEMORY_BYTES, Encoded, Text
from fastgen.serving.isolated.processes import answer_all


def begin(beginning: bytes) -> Callable[[bytes], bytes]:
    """Loads the tokenizer; returns the function that encodes a text."""
    tokenizer = Tokenizer.from_str(beginning.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: Text) -> Encoded:
        try:
            return Encoded(tokenizer.encode(text.text, add_special_tokens=text.add_special_tokens).ids)
        except BaseException as error:  # the library's own panics are no Exception
            return Encoded([], f"{error}"[:1000])

    return lambda request: msgspec.msgpack.encode(encode(msgspec.msgpack.decode(request, type=Text)))


if __name__ == "__main__":
    answer_all(begin, max_cpu_s=MAX_CPU_S, max_memory_bytes=MAX_MEMORY_BYTES)
