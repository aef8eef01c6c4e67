"""OpenVINO GenAI's pipeline with continuous batching and dynamic split-fuse.

Arithmetic is set to fp32. The KV cache is in fp32 with fp32 weights, and in 8 bits, its default, with smaller ones.
"""

from __future__ import annotations

import time

from benchmarks.cpu.engines.protocol import Answer, BaseEngine, Engine, Settings, versions
from benchmarks.cpu.workloads import Request


def load(settings: Settings) -> Engine:
    kv_cache = "f32" if settings.weight_format == "fp32" else "u8"
    return Pipeline(settings, {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": kv_cache})


class Pipeline(BaseEngine):
    def __init__(self, settings: Settings, precision: dict[str, str]):
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        options = {
            "max_num_batched_tokens": 512,
            "cache_size": 2,
            "dynamic_split_fuse": True,
            "max_num_seqs": 64,
            "enable_prefix_caching": False,
        }
        for name, value in options.items():
            setattr(scheduler, name, value)
        properties = {"INFERENCE_NUM_THREADS": settings.num_threads, "NUM_STREAMS": 1, **precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(settings.model), scheduler, "CPU", properties)
        self._num_submitted = 0
        packages = versions("openvino-genai", "openvino", "openvino-tokenizers")
        self.about = {"versions": packages, "options": options | properties}

    def run(self, requests: list[Request]) -> list[Answer]:
        import numpy as np
        import openvino
        import openvino_genai

        running = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.num_new
            config.ignore_eos, config.do_sample = True, False
            self._num_submitted += 1
            ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
            running.append((self._pipeline.add_request(self._num_submitted, ids, config), Answer()))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for handle, answer in running:
                while handle.can_read():
                    for output in handle.read().values():
                        answer.tokens += output.generated_ids
                        answer.times += [now] * len(output.generated_ids)
        return [answer for _, answer in running]
