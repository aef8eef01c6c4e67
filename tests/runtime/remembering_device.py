"""An engine without a model: what may follow a sequence is drawn from its tokens, so every answer is known beforehand.

The device remembers what was written where, through block tables and copies as the schedules told them, and every
sequence finds its own tokens there in each step.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import cast

from fastgen.runtime.beam_search import BeamSearch, Candidate, num_candidates
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache_manager import KVCacheManager
from fastgen.runtime.model_runner import ModelRunner, StepOutput
from fastgen.runtime.request import Sequence
from fastgen.runtime.sampler import SampledToken
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.runtime.schedule import Schedule
from fastgen.runtime.scheduler import Scheduler

EOS = 0
VOCAB_SIZE = 12
MAX_MODEL_LEN = 1000


def drawn_by(token_ids: SequenceOf[int], salt: int) -> random.Random:
    return random.Random(zlib.crc32(array("I", [salt, *token_ids]).tobytes()))


def candidates(token_ids: SequenceOf[int]) -> list[Candidate]:
    """What may follow, best first; now and then there is hardly a choice."""
    rng = drawn_by(token_ids, 0)
    scores = sorted((-rng.expovariate(0.5) for _ in range(VOCAB_SIZE)), reverse=True)
    found = list(map(Candidate, rng.sample(range(VOCAB_SIZE), VOCAB_SIZE), scores))
    return found[: rng.randint(1, 2)] if rng.random() < 0.05 else found


def next_token(token_ids: SequenceOf[int], index: int) -> int:
    return drawn_by(token_ids, 1 + index).randrange(VOCAB_SIZE)


class LostStepError(BaseException):
    """A step that came to nothing."""


def build_engine(
    kv: KVCacheManager, *, token_budget: int, max_num_seqs: int, loses_step: Callable[[], bool] = lambda: False
) -> Engine:
    """An engine on a :class:`Device`; ``loses_step`` is asked twice a step."""
    return Engine(
        cast(ModelRunner, Device(kv, loses_step)),
        Scheduler(kv, token_budget=token_budget, max_num_seqs=max_num_seqs),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({EOS}),
        new_detokenizer=None,
        clock=lambda: 0.0,
    )


class Device:
    """Blocks of token ids, and the block tables as they were told."""

    def __init__(self, kv: KVCacheManager, loses_step: Callable[[], bool]) -> None:
        self.windows, self.block_size, self.loses_step = kv.windows, kv.block_size, loses_step
        self.num_computed = 0
        self._tables: dict[tuple[int, int, int], int] = {}
        self._written: dict[tuple[int, int, int], int] = {}

    def run(self, schedule: Schedule) -> StepOutput:
        lost_early, lost_late = self.loses_step(), self.loses_step()
        if lost_early:
            raise LostStepError
        for seat, group, index, block_id in schedule.block_updates:
            self._tables[seat, group, index] = block_id
        before = dict(self._written)
        for group, _, source, destination in schedule.block_copies:
            for offset in range(self.block_size):
                if (group, source, offset) in before:
                    self._written[group, destination, offset] = before[group, source, offset]
        for entry in schedule.entries:
            for position in range(entry.start, entry.end):
                for group in range(len(self.windows)):
                    self._written[self._place(entry.seq, group, position)] = entry.seq.token_ids[position]
        for entry in schedule.entries:
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, entry.start - window + 1)
                seen = [self._written[self._place(entry.seq, group, position)] for position in range(first, entry.end)]
                assert seen == entry.seq.token_ids[first : entry.end], f"{entry} reads {seen}"
        if lost_late:
            raise LostStepError
        self.num_computed += schedule.num_tokens
        sampled = [(entry.seq, self._sample(entry.seq)) for entry in schedule.entries if entry.samples]
        return StepOutput(sampled=sampled, prompt_logprobs=[])

    def _place(self, seq: Sequence, group: int, position: int) -> tuple[int, int, int]:
        assert seq.seat is not None
        index, offset = divmod(position, self.block_size)
        return group, self._tables[seq.seat, group, index], offset

    def _sample(self, seq: Sequence) -> SampledToken:
        if seq.request.has_beams:
            return SampledToken(0, candidates=candidates(seq.token_ids))
        return SampledToken(next_token(seq.token_ids, seq.index))


def alone(prompt: list[int], sampling: SamplingParams) -> list[tuple[list[int], float | None]]:
    """The answers, best first, by the search and the draws alone."""
    stop_ids = frozenset(() if sampling.ignore_eos else {EOS})
    if sampling.beam_width == 1:
        return [(generated(prompt, index, sampling.max_new_tokens, stop_ids), None) for index in range(sampling.n)]
    search = BeamSearch(
        sampling.beam_width,
        max_new_tokens=sampling.max_new_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        stop_ids=stop_ids,
    )
    while not search.done:
        paths = [prompt + [token.token_id for token in beam.tokens()] for beam in search.live]
        search.advance([candidates(path)[: num_candidates(sampling.beam_width, stop_ids)] for path in paths])
    found = [([token.token_id for token in each.beam.tokens()], each.score) for each in search.ranking()]
    return [*found, *[([], None)] * sampling.n][: sampling.n]


def generated(prompt: list[int], index: int, max_new_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_new_tokens:
        token_ids.append(next_token(token_ids, index))
        if token_ids[-1] in stop_ids:
            break
    return token_ids[len(prompt) :]
