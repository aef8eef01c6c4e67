"""The parameters of the sampling kernel for one sequence, kept while the sequence is sampled in every step.

They are derived from the sequence's parameters and tokens, so they are the same after a preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fastgen.compile.ops.sampling.cpp import NO_BIASES, NO_USES, Biases, RowSampling, SampledRow, Uses
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams

# Returns the tokens that may not end a sequence before ``min_new_tokens``.
EndingIds = Callable[[Sequence], frozenset[int]]
# The row of every sequence that :func:`is_plain`.
PLAIN_ROW = SampledRow(RowSampling(), 0)


class RowHistory:
    """The rows of one sequence, step by step.

    ``ending_ids`` gives the tokens that are forbidden until ``min_new_tokens`` tokens are generated. Token ids from the
    vocabulary's size on are left out, since the model's head does not have them.
    """

    def __init__(self, sequence: Sequence, ending_ids: EndingIds, lists: BiasLists):
        sampling, vocab_size = sequence.request.sampling, lists.vocab_size
        self._sequence = sequence
        self._sampling = _row_sampling(sampling, sequence.index, vocab_size)
        self._first_free = sequence.num_prompt_tokens + sampling.min_new_tokens
        self._biases = self._biases_at_first = lists.of(sampling.logit_bias)
        if sampling.min_new_tokens:
            self._biases_at_first = lists.of(sampling.logit_bias, ending_ids(sequence))
        self._uses = _UsedTokens(sequence, vocab_size) if penalises(sampling) else None

    def row(self, drafts: SequenceOf[int] = ()) -> SampledRow:
        """Returns the row of the sequence's next token, as if ``drafts`` had been generated before it."""
        position = self._sequence.num_tokens + len(drafts)
        uses = NO_USES if self._uses is None else self._uses.after(drafts)
        return SampledRow(
            self._sampling, position, uses, self._biases_at_first if position < self._first_free else self._biases
        )


def is_plain(sampling: SamplingParams) -> bool:
    """Returns whether each token is simply the likeliest one and nothing else is reported, so that a row needs no
    history. A beam is plain too, since its search chooses among candidates.
    """
    return sampling.beam_width > 1 or (
        sampling.greedy
        and sampling.logprobs is None
        and sampling.min_new_tokens == 0
        and not sampling.logit_bias
        and sampling.response_format is None
        and not penalises(sampling)
    )


def penalises(sampling: SamplingParams) -> bool:
    """Returns whether the generated tokens of a sequence, or its prompt, change its logits."""
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _row_sampling(sampling: SamplingParams, sequence_index: int, vocab_size: int) -> RowSampling:
    num_top = sampling.logprobs
    assert sampling.greedy or sampling.seed is not None, "a request that draws has its seed resolved when submitted"
    return RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed or 0,
        sequence_index=sequence_index,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        # One more than requested, since the token itself may be among the likeliest.
        num_top=min(num_top + 1, vocab_size) if num_top else num_top,
    )


class BiasLists:
    """Biases as kernels take them. The requests of a call have the same ones, so the last lists are kept."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        # Those without forbidden tokens, and those with some: what they were made of, and they.
        self._last: dict[bool, tuple[Mapping[int, float], frozenset[int], Biases]] = {}

    def of(self, biases: Mapping[int, float], forbidden: frozenset[int] = frozenset()) -> Biases:
        """Returns the list of ``biases`` and ``forbidden`` tokens. The caller must not change ``biases`` later."""
        last = self._last.get(bool(forbidden))
        if last is None or last[0] is not biases or last[1] != forbidden:
            last = self._last[bool(forbidden)] = biases, forbidden, self._made(biases, forbidden)
        return last[2]

    def _made(self, biases: Mapping[int, float], forbidden: frozenset[int]) -> Biases:
        values = {**biases, **dict.fromkeys(forbidden, -np.inf)}
        values = {token_id: bias for token_id, bias in values.items() if token_id < self.vocab_size}
        if not values:
            return NO_BIASES
        return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


class _UsedTokens:
    """The distinct tokens of a sequence and how often it generated each. Follows the sequence as it grows."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        self._sequence, self._vocab_size = sequence, vocab_size
        self._num_counted = sequence.num_prompt_tokens
        prompt = np.unique(np.array(sequence.token_ids[: self._num_counted], np.int32))
        ids = prompt[prompt < vocab_size]
        self._num_ids = len(ids)
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids, self._uses = _with_room(ids), _with_room(np.ones(len(ids), np.int32))

    def after(self, drafts: SequenceOf[int]) -> Uses:
        """Returns the uses of all the sequence's tokens and of ``drafts`` after them, which are not remembered."""
        for token_id in islice(self._sequence.token_ids, self._num_counted, None):
            self._count(token_id)
        self._num_counted = self._sequence.num_tokens
        ids, uses = self._ids[: self._num_ids], self._uses[: self._num_ids]
        if not drafts:
            return ids, uses
        uses, new = uses.copy(), Counter[int]()
        for token_id in drafts:
            place = self._place.get(token_id)
            if place is not None:
                uses[place] += 2
            elif token_id < self._vocab_size:
                new[token_id] += 2
        new_ids, new_uses = np.array(list(new), np.int32), np.array(list(new.values()), np.int32)
        return np.concatenate([ids, new_ids]), np.concatenate([uses, new_uses])

    def _count(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            if token_id >= self._vocab_size:
                return
            if self._num_ids == len(self._ids):
                self._ids, self._uses = _with_room(self._ids), _with_room(self._uses)
            place = self._place[token_id] = self._num_ids
            self._ids[place], self._uses[place] = token_id, 0
            self._num_ids += 1
        self._uses[place] += 2


def _with_room(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns a copy with twice the room, so that appending costs little."""
    return np.concatenate([numbers, np.empty(len(numbers) + 64, np.int32)])
