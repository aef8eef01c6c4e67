"""fastgen: text generation from declarative model recipes.

Public names are imported when they are first used, so ``import fastgen`` costs nothing: it reads no file beyond its own
source, and loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen import errors
    from fastgen.runtime.llm import LLM
    from fastgen.runtime.loading import load
    from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
    from fastgen.runtime.requests.sampling_params import SamplingParams
    from fastgen.serving.clients.connect import async_client, client
    from fastgen.serving.detached import serve
    from fastgen.version import __version__

__all__ = [
    "LLM",
    "GenerationChunk",
    "GenerationOutput",
    "SamplingParams",
    "__version__",
    "async_client",
    "client",
    "errors",
    "load",
    "serve",
]

_HOMES = {
    "LLM": "fastgen.runtime.llm",
    "load": "fastgen.runtime.loading",
    "GenerationChunk": "fastgen.runtime.requests.outputs",
    "GenerationOutput": "fastgen.runtime.requests.outputs",
    "SamplingParams": "fastgen.runtime.requests.sampling_params",
    "client": "fastgen.serving.clients.connect",
    "async_client": "fastgen.serving.clients.connect",
    "serve": "fastgen.serving.detached",
    "__version__": "fastgen.version",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "errors":
        value = import_module("fastgen.errors")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
