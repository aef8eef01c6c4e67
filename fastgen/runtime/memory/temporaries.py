"""Temporary memory: the peak of each phase of an engine's life.

The phases follow each other, so the largest counts. A forward pass is recorded on the ``meta`` device. What is computed
from logits is recorded on a few rows of a small vocabulary: every tensor there has a size that is linear in the rows
and in the vocabulary, so the sizes for any others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS, Backend
from fastgen.compile.backends.choose import backend_for
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.capture.allocations import Allocations, LinearAllocations, allocations_of
from fastgen.models.measure import MeasuredModel
from fastgen.runtime.memory.held import results
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler, launch_prompt_logprobs
from fastgen.runtime.sampling.slot_sampler import slot_sampler
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS

_CPU = torch.device("cpu")
_FEW_ROWS, _SMALL_VOCABS = (16, 17), (640, 1280)
# Random numbers are drawn for whole groups of so many tokens.
_DRAWN_TOGETHER = 4
# More alternatives than kernels report, so that torch computes them. Requests that ask for hundreds take more.
_MOST_LOGPROBS = MAX_LOGPROBS + 1
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "logit_bias": {0: 1.0}}
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 1}


def demanding(vocab_size: int) -> list[SamplingParams]:
    """Returns the requests that take most memory, each in its own way."""
    common: dict[str, Any] = {"max_new_tokens": 2, "logprobs": _MOST_LOGPROBS}
    return [
        SamplingParams(**common),
        SamplingParams(**common, **_PENALTIES, **_FILTERS, top_k=vocab_size - 1),
        SamplingParams(**common, **_PENALTIES, beam_width=2),
    ]


class Temporaries:
    """Measures the phases of an engine's life that take memory and give it back."""

    def __init__(self, model: MeasuredModel):
        self._model, self._build = model, model.build
        self._backend = model.backend(PROMPT_LOGITS_ROWS)
        self._sampling_bytes = lru_cache(maxsize=64)(lambda rows: self._peak(sampling_of(self._build.target), rows))
        self._scoring_bytes = lru_cache(maxsize=64)(lambda rows: self._peak([_prompt_logprobs()], rows))

    def phases(self, config: EngineConfig) -> dict[str, int]:
        """Returns the most bytes that each phase takes, by the phase's name."""
        budget, rows, pieces = config.token_budget, config.max_rows, min(PROMPT_LOGITS_ROWS, config.token_budget)
        forward = self._model.forward(budget, config.max_cached_len, config.block_size)
        hidden, logits = (each.nbytes for each in results(self._build, config))
        row = hidden // budget
        sampling = max(rows * row + self._logits_bytes(rows), logits + self._sampling_bytes(rows))
        if self._backend.steps == "captured":  # the results of all steps are in static buffers
            hidden, logits, sampling = 0, 0, self._sampling_bytes(rows)
        scores = pieces * 4 * self._build.spec.vocab_size
        scoring = max(self._logits_bytes(pieces), scores + self._scoring_bytes(pieces))
        return {
            "loading the largest tensor": self._model.largest_tensor_bytes,
            f"a forward pass of token_budget={budget}": forward.peak_bytes,
            f"sampling max_num_seqs={config.max_num_seqs}": hidden + sampling,
            "prompt_logprobs": hidden + logits + scoring,
        }

    def _logits_bytes(self, num_rows: int) -> int:
        return self._model.logits(num_rows).peak_bytes

    def _peak(self, recorded: Iterable[_ByVocab], num_rows: int) -> int:
        vocab_size = -(-self._build.spec.vocab_size // _DRAWN_TOGETHER) * _DRAWN_TOGETHER
        return max(each(num_rows, vocab_size).peak_bytes for each in recorded)


class _ByVocab:
    """Allocations for any number of rows and any vocabulary."""

    def __init__(self, record: Callable[[int, int], Allocations]):
        self._by_rows = {
            size: LinearAllocations.through(partial(_swapped, record, size), *_FEW_ROWS) for size in _SMALL_VOCABS
        }

    def __call__(self, num_rows: int, vocab_size: int) -> Allocations:
        by_vocab = LinearAllocations.through(lambda size: self._by_rows[size](num_rows), *_SMALL_VOCABS)
        return by_vocab(vocab_size)


@cache
def sampling_of(target: TargetFacts) -> tuple[_ByVocab, ...]:
    """Returns the peak bytes of choosing tokens from logits, by the kind of the request. Models differ in the size of
    their vocabulary only, so each process records this once."""
    backend = backend_for(target, max_rows=PROMPT_LOGITS_ROWS)

    def record(kind: int, num_rows: int, vocab_size: int) -> Allocations:
        sampler = _sampler(backend, vocab_size)
        sequences = [_sequence(demanding(vocab_size)[kind]) for _ in range(num_rows)]
        logits = _drawn_logits(num_rows, vocab_size)
        return _of_logits(logits, lambda: sampler.launch(logits, sequences)())

    return tuple(_ByVocab(partial(record, kind)) for kind in range(len(demanding(2))))


@cache
def _prompt_logprobs() -> _ByVocab:
    """Returns the peak bytes of the log-probabilities of a piece of a prompt."""

    def record(num_rows: int, vocab_size: int) -> Allocations:
        logits, token_ids = _drawn_logits(num_rows, vocab_size), [0] * num_rows
        return _of_logits(logits, lambda: launch_prompt_logprobs(logits, token_ids, _MOST_LOGPROBS)())

    return _ByVocab(record)


def _drawn_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Returns random logits, and leaves the user's generator of random numbers as it is."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


def _of_logits(logits: Tensor, function: Callable[[], Any]) -> Allocations:
    """Returns what ``function`` allocates in tensors of a byte or more for each token of the vocabulary."""
    return allocations_of(function, device=_CPU, at_least=logits.shape[1])


def _swapped(record: Callable[[int, int], Allocations], vocab_size: int, num_rows: int) -> Allocations:
    return record(num_rows, vocab_size)


def _sampler(backend: Backend, vocab_size: int) -> Sampler:
    """Returns a sampler for few rows, whose kernels are not built."""
    rows = _FEW_ROWS[-1]
    inputs = InputBatch(
        token_budget=rows,
        max_num_seqs=rows,
        max_rows=rows,
        num_groups=1,
        max_blocks=1,
        block_size=1,
        device=_CPU,
    )
    by_row = backend.row_sampling(vocab_size, max_rows=rows, device=_CPU)
    return Sampler(kernel=by_row, slots=slot_sampler(backend, vocab_size, inputs))


def _sequence(sampling: SamplingParams) -> Sequence:
    """Returns a sequence of a prompt and one generated token."""
    sequence = Request(0, [0], sampling, 0.0).sequences[0]
    sequence.token_ids.append(0)
    return sequence
