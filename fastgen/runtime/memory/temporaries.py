"""The memory that comes and goes, phase by phase: each phase runs once on the ``meta`` device and is recorded.

The phases follow each other, so the largest of them counts. Rows of logits are alike, so what is computed of them is
recorded for two and for three rows, and what it takes is linear in their number.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS
from fastgen.compile.capture.allocations import Allocations, LinearAllocations, allocations_of
from fastgen.models.measure import META, MeasuredModel
from fastgen.runtime.memory.held import results
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.sampling.sampler import Sampler, prompt_logprobs
from fastgen.runtime.sampling.sampling_params import SamplingParams
from fastgen.runtime.sampling.slot_sampler import slot_sampler
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS

_FEW_ROWS = (2, 3)
# More alternatives than kernels report, so that torch computes them. Requests that ask for hundreds take more.
_MOST_LOGPROBS = MAX_LOGPROBS + 1
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {0: 1.0}}
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 1, "top_p": 0.9, "min_p": 0.01, "seed": 1}
# Requests that take most memory, each in its own way.
_DEMANDING = (
    SamplingParams(max_new_tokens=1, logprobs=_MOST_LOGPROBS),
    SamplingParams(max_new_tokens=1, logprobs=_MOST_LOGPROBS, **_PENALTIES, **_FILTERS),
    SamplingParams(max_new_tokens=1, beam_width=2, logprobs=_MOST_LOGPROBS, **_PENALTIES),
)


class Temporaries:
    """Measures the phases of an engine's life that take memory and give it back."""

    def __init__(self, model: MeasuredModel):
        self._model, self._build = model, model.build
        self._backend = model.backend(PROMPT_LOGITS_ROWS, 1)
        self._lm = model.model(PROMPT_LOGITS_ROWS)
        self._prompt_bytes = lru_cache(maxsize=64)(self._measure_prompt)

    def phases(self, config: EngineConfig) -> dict[str, int]:
        """Returns the most bytes that each phase takes, by the phase's name."""
        budget, rows = config.token_budget, min(PROMPT_LOGITS_ROWS, config.token_budget)
        forward = self._model.forward(budget, config.max_model_len, config.block_size)
        hidden, logits = results(self._build, config)
        # Only graphs leave their results in static buffers at every step.
        held = (0, 0) if self._backend.steps == "captured" else (hidden.nbytes, logits.nbytes)
        return {
            "loading the largest tensor": self._model.largest_tensor_bytes,
            # Taped steps as well: a step of a size that does not recur calls the modules.
            f"a forward pass of token_budget={budget}": forward.peak_bytes,
            f"sampling max_num_seqs={config.max_num_seqs}": held[0] + self._sampling_bytes(config.max_rows),
            "prompt_logprobs": sum(held) + self._prompt_bytes(rows),
        }

    def _sampling_bytes(self, num_rows: int) -> int:
        return max(each(num_rows).peak_bytes for each in self._sampling)

    @cached_property
    def _sampling(self) -> list[LinearAllocations]:
        """What sampling takes for any number of rows, by each of the demanding requests."""

        def record(sampling: SamplingParams, num_rows: int) -> Allocations:
            sequences = [_sequence(sampling) for _ in range(num_rows)]
            static = self._logits(self._new_hidden(num_rows)) if self._backend.steps == "captured" else None
            hidden, indices = self._new_hidden(num_rows), torch.empty(num_rows, dtype=torch.int32, device=META)

            def sample() -> None:
                logits = self._logits(hidden[indices.long()]) if static is None else static
                self._sampler.launch(logits, sequences)()

            return allocations_of(sample, number=self._build.spec.vocab_size - 1)

        return [LinearAllocations.through(partial(record, each), *_FEW_ROWS) for each in _DEMANDING]

    def _measure_prompt(self, num_rows: int) -> int:
        """Returns what the log-probabilities of a piece of a prompt take."""
        hidden, token_ids = self._new_hidden(num_rows), [0] * num_rows
        piece = allocations_of(lambda: prompt_logprobs(self._logits(hidden), token_ids, _MOST_LOGPROBS))
        return piece.peak_bytes

    @cached_property
    def _sampler(self) -> Sampler:
        vocab_size, rows = self._build.spec.vocab_size, _FEW_ROWS[-1]
        inputs = InputBatch(
            token_budget=rows,
            max_num_seqs=rows,
            max_rows=rows,
            num_groups=1,
            max_blocks=1,
            block_size=1,
            device=META,
        )
        return Sampler(
            kernel=self._backend.row_sampling(vocab_size, max_rows=rows, device=META),
            slots=slot_sampler(self._backend, vocab_size, inputs),
        )

    def _new_hidden(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._build.spec.hidden_size, dtype=self._build.activation_dtype, device=META)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._lm.logits(hidden)


def _sequence(sampling: SamplingParams) -> Sequence:
    """Returns a sequence of a prompt and one generated token."""
    sequence = Request(0, [0], sampling, 0.0).sequences[0]
    sequence.token_ids.append(0)
    return sequence
