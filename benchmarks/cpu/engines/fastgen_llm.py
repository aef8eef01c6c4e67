"""fastgen through its public interface: all requests in one ``generate``."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.cpu.engines.protocol import Answer, BaseEngine, Engine, Settings, versions
from benchmarks.cpu.workloads import Request

# ``dtype`` and ``quantize`` of each weight format.
OPTIONS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "int4": ("float32", "int4"),
}


def load(settings: Settings) -> Engine:
    return _Fastgen(settings)


class _Fastgen(BaseEngine):
    def __init__(self, settings: Settings):
        import fastgen

        dtype, quantize = OPTIONS[settings.weight_format]
        options: dict[str, Any] = {
            "dtype": dtype,
            "quantize": quantize,
            "kv_cache_memory": "2GiB",
            "num_threads": settings.num_threads,
            "prefix_caching": False,  # workloads repeat their prompts; what is measured is computing them
        }
        self._llm = fastgen.load(settings.model, device="cpu", **options)
        self._sampling = fastgen.SamplingParams
        self.about = {"versions": versions("fastgen", "torch"), "options": options}

    def run(self, requests: list[Request]) -> list[Answer]:
        sampling = [
            self._sampling(max_new_tokens=each.num_new, min_new_tokens=each.num_new, temperature=0, ignore_eos=True)
            for each in requests
        ]
        start = time.perf_counter()
        answers = []
        for output in self._llm.generate([each.prompt for each in requests], sampling):
            times = [start + (output.metrics.ttft_s or 0)]
            for gap in output.metrics.gaps_s:
                times.append(times[-1] + gap)
            answers.append(Answer(list(output.token_ids), times))
        return answers

    def close(self) -> None:
        self._llm.close()
