"""transformers' ``generate``: batches padded on the left, which end with their longest request.

Requests are sorted by the length of their prompts and cut into batches of 16, so that little is padded.
"""

from __future__ import annotations

import time

from benchmarks.cpu.engines.protocol import Answer, BaseEngine, Engine, Settings, versions
from benchmarks.cpu.workloads import Request

_BATCH = 16
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def load(settings: Settings) -> Engine:
    return _Generate(settings)


class _Generate(BaseEngine):
    def __init__(self, settings: Settings):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        dtype = getattr(torch, DTYPES[settings.weight_format])
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa")
        self._model.eval().generation_config.eos_token_id = None
        self.about = {"versions": versions("transformers", "torch"), "options": {"batch": _BATCH, "attention": "sdpa"}}

    def run(self, requests: list[Request]) -> list[Answer]:
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt))
        answers = [Answer()] * len(requests)
        for first in range(0, len(order), _BATCH):
            members = order[first : first + _BATCH]
            found = self._run_batch([requests[index] for index in members])
            for index, answer in zip(members, found, strict=True):
                answers[index] = answer
        return answers

    def _run_batch(self, requests: list[Request]) -> list[Answer]:
        import torch

        width, num_new = max(len(each.prompt) for each in requests), max(each.num_new for each in requests)
        padding = [width - len(each.prompt) for each in requests]
        ids = torch.tensor([[2] * pad + each.prompt for pad, each in zip(padding, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        times: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_new,
                pad_token_id=2,
                stopping_criteria=[note_time],
            )
        return [
            Answer(row[width : width + each.num_new].tolist(), times[: each.num_new])
            for row, each in zip(out, requests, strict=True)
        ]
