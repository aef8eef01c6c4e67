"""Results of any tool that can be imported, recognized by their content."""

from __future__ import annotations

from pathlib import Path

from fastgen.errors import RecordingError
from fastgen.lab.imports.guidellm import is_guidellm, read_guidellm
from fastgen.lab.imports.reading import read_json
from fastgen.lab.imports.vllm_bench import is_vllm_bench, read_vllm_bench
from fastgen.lab.metrics.summary import Summary


def read_results(path: str | Path) -> list[Summary]:
    """Returns the summaries in a file of ``vllm bench serve`` or guidellm.

    :raises RecordingError: if the file cannot be read, or is of neither tool.
    """
    found = read_json(path)
    if found and is_guidellm(found[0]):
        return read_guidellm(path)
    if found and is_vllm_bench(found[0]):
        return read_vllm_bench(path)
    raise RecordingError("these are results neither of vllm bench serve nor of guidellm", file=str(path))
