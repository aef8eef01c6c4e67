"""The numeric gate: an engine's answers must be the model's, as nearly as its weight format allows.

Given an engine's own tokens, transformers in fp32 computes the logits before each. A token that is not the likeliest
must be close below it: equally likely in fp32, a little less in formats that round more. A wrong token lies many units
below, so a wrong cache, mask or position shows at once.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.cpu.engines.protocol import BITS
from benchmarks.cpu.workloads import Request

# How far below the greatest logit a token's may lie, by the bits of a weight. The random models' logits have a standard
# deviation of 3, and the greatest of 32,000 lies 12 above their mean.
MOST_BELOW = {32: 0.01, 16: 0.5, 8: 1.0, 4: 5.0}


class GateError(Exception):
    """An engine's answers are not the model's."""


class Gate:
    """Checks answers against the checkpoint in the directory ``model``.

    The reference is loaded when something is checked, and held until it is released.
    """

    def __init__(self, model: Path, num_threads: int):
        self._path, self._num_threads = model, num_threads
        self._reference: PreTrainedModel | None = None

    def check(self, requests: list[Request], answers: list[list[int]], weight_format: str) -> float:
        """Returns how far the worst token's logit lies below the greatest. Raises :class:`GateError`."""
        if [len(each) for each in answers] != [each.num_new for each in requests]:
            raise GateError(
                f"{[len(each) for each in answers]} tokens in place of {[each.num_new for each in requests]}"
            )
        worst, allowed = 0.0, MOST_BELOW[BITS[weight_format]]
        for number, (request, tokens) in enumerate(zip(requests, answers, strict=True)):
            for place, below in enumerate(self._below(request.prompt, tokens)):
                if below > allowed:
                    raise GateError(
                        f"token {place} of request {number} is {tokens[place]}, whose logit lies {below:.3g} below the "
                        f"greatest; {allowed} are allowed in {weight_format}"
                    )
                worst = max(worst, below)
        return worst

    def release(self) -> None:
        self._reference = None
        gc.collect()

    @torch.inference_mode()
    def _below(self, prompt: list[int], tokens: list[int]) -> list[float]:
        if self._reference is None:
            self._reference = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
        threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        logits = self._reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        torch.set_num_threads(threads)
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        return [float(each) for each in logits.amax(1) - chosen]
