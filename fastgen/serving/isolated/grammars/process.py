"""The process that tries formats: ``python -m fastgen.serving.isolated.grammars.process``.

It imports neither transformers nor torch, so that it starts fast.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
from tokenizers import Tokenizer

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.structured_output import Grammars
from fastgen.serving.isolated.grammars.trial import MAX_CPU_S, MAX_MEMORY_BYTES, Model, Trial, refused
from fastgen.serving.isolated.processes import answer_all


def begin(beginning: bytes) -> Callable[[bytes], bytes]:
    """Loads the tokenizer; returns the function that says why a format would be refused, or ``None``."""
    model = msgspec.msgpack.decode(beginning, type=Model)
    backend = Tokenizer.from_str(model.tokenizer)
    tokenizer = SimpleNamespace(backend_tokenizer=backend, get_vocab=backend.get_vocab)
    grammars = Grammars(tokenizer, vocab_size=model.vocab_size, eos_token_ids=())

    def refusal(response_format: ResponseFormat) -> str | None:
        try:
            grammars.compiled(response_format)  # it is not kept: the server remembers what was found
        except InvalidArgumentError as error:
            return str(error)
        except MemoryError:
            return refused(
                response_format.kind, f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile"
            )
        except RuntimeError:  # the system has no thread, for example
            raise  # it says nothing of the format, and ends this process
        except BaseException as error:  # a panic of the library is no ``Exception``
            return refused(response_format.kind, f"{type(error).__name__}: {error}")
        return None

    def answer(request: bytes) -> bytes:
        trial = msgspec.msgpack.decode(request, type=Trial)
        return msgspec.msgpack.encode(refusal(ResponseFormat(trial.kind, trial.text)))

    refusal(ResponseFormat("json_object"))  # makes the library load the tokenizer
    return answer


if __name__ == "__main__":
    answer_all(begin, max_cpu_s=MAX_CPU_S, max_memory_bytes=MAX_MEMORY_BYTES)
