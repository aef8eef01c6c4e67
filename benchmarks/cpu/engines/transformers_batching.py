"""transformers' continuous batching: a paged KV cache, prompts in chunks."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.cpu.engines.protocol import Answer, BaseEngine, Engine, Settings, versions
from benchmarks.cpu.engines.transformers_generate import DTYPES
from benchmarks.cpu.workloads import Request

_OPTIONS: dict[str, Any] = {
    "page_size": 64,
    "num_blocks": 512,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 32,
    "allow_block_sharing": False,
    "use_async_batching": False,
}


def load(settings: Settings) -> Engine:
    return _Batching(settings)


class _Batching(BaseEngine):
    def __init__(self, settings: Settings):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.set_num_threads(settings.num_threads)
        dtype = getattr(torch, DTYPES[settings.weight_format])
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa")
        self._manager = model.eval().init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2),
            continuous_batching_config=ContinuousBatchingConfig(**_OPTIONS),
        )
        self._manager.start()
        self._num_submitted = 0
        self.about = {"versions": versions("transformers", "torch"), "options": _OPTIONS}

    def run(self, requests: list[Request]) -> list[Answer]:
        places = {}
        for place, request in enumerate(requests):
            self._num_submitted += 1
            given = self._manager.add_request(
                request.prompt,
                request_id=str(self._num_submitted),
                max_new_tokens=request.num_new,
                record_timestamps=True,
                eos_token_id=-1,
            )
            places[given] = place
        answers: dict[int, Answer] = {}
        while len(answers) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the thread of continuous batching died")
            elif result.error:
                raise RuntimeError(result.error)
            elif result.is_finished():
                times = [float(each) for each in result.timestamps or []]
                answers[places[result.request_id]] = Answer([int(each) for each in result.generated_tokens], times)
        return [answers[place] for place in range(len(requests))]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)
