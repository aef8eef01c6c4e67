"""Beams and several completions over random histories: a cache too small for comfort, cancelled requests, lost steps.

No model: what may follow a sequence is drawn from its tokens, so an answer that a request would get alone is known. The
device remembers what was written where, through block tables and copies as the schedules told them, and every sequence
finds its own tokens there in each step. All owners' integrity is checked after each act.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Any, cast

import pytest

from fastgen.errors import RequestTooLargeError
from fastgen.runtime.beam_search import BeamSearch, Candidate, num_candidates
from fastgen.runtime.engine import Engine
from fastgen.runtime.generation import Generation
from fastgen.runtime.kv_cache_manager import KVCacheManager
from fastgen.runtime.model_runner import ModelRunner, StepOutput
from fastgen.runtime.request import Sequence
from fastgen.runtime.sampler import SampledToken
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.runtime.schedule import Schedule
from fastgen.runtime.scheduler import Scheduler

EOS = 0
VOCAB_SIZE = 12
MAX_MODEL_LEN = 40


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


class Lost(Exception):
    """A step that came to nothing."""


class Device:
    """Blocks of token ids, and the block tables as they were told."""

    def __init__(self, windows: SequenceOf[int | None], block_size: int) -> None:
        self.windows, self.block_size = windows, block_size
        self.loses_step = lambda: False
        self.num_computed = 0
        self._tables: dict[tuple[int, int, int], int] = {}
        self._written: dict[tuple[int, int, int], int] = {}

    def run(self, schedule: Schedule) -> StepOutput:
        lost_early, lost_late = self.loses_step(), self.loses_step()
        if lost_early:
            raise Lost
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
            raise Lost
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
    if sampling.beam_width == 1:
        return [(generated(prompt, index, sampling.max_new_tokens), None) for index in range(sampling.n)]
    stop_ids = frozenset({EOS})
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


def generated(prompt: list[int], index: int, max_new_tokens: int) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_new_tokens and EOS not in token_ids[len(prompt) :]:
        token_ids.append(next_token(token_ids, index))
    return token_ids[len(prompt) :]


def drawn_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    shared = drawn_by([rng.randrange(2)], 99)
    prompt = [shared.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
    fields: dict[str, Any] = {"max_new_tokens": rng.randint(1, 12)}
    kind = rng.random()
    if kind < 0.5:
        width = rng.randint(2, 5)
        fields |= {
            "beam_width": width,
            "n": rng.randint(1, width),
            "length_penalty": rng.choice([1.0, 0.0, -1.0, 2.0]),
            "early_stopping": rng.choice([False, True, "never"]),
        }
    elif kind < 0.8:
        fields["n"] = rng.randint(2, 9)
    return prompt, SamplingParams(**fields)


def history(seed: int) -> Counter[str]:
    """One history, checked all along; returns how often things happened."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, None), (7,), (None, 5)])
    block_size, max_num_seqs = rng.choice([1, 2, 4]), rng.randint(5, 8)
    token_budget = max_num_seqs + rng.randint(0, 12)
    kv = KVCacheManager(
        1 + len(windows) * rng.randint(10, 60) * 4 // block_size,
        block_size,
        windows,
        max_chunk=token_budget,
        prefix_caching=rng.random() < 0.7,
    )
    device = Device(windows, block_size)
    device.loses_step = lambda: rng.random() < 0.02
    engine = Engine(
        cast(ModelRunner, device),
        Scheduler(kv, token_budget=token_budget, max_num_seqs=max_num_seqs),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({EOS}),
        new_detokenizer=None,
        clock=lambda: 0.0,
    )
    happened: Counter[str] = Counter()
    asked: dict[Generation, tuple[list[int], SamplingParams]] = {}
    cancelled = set()
    while len(asked) < 12 or engine.has_work:
        if len(asked) < 12 and rng.random() < 0.5:
            request = drawn_request(rng)
            try:
                asked[engine.submit(*request)] = request
            except RequestTooLargeError:
                happened["refused"] += 1
        elif rng.random() < 0.02 and asked:
            generation = rng.choice(list(asked))
            if not generation.finished:
                cancelled.add(generation)
            engine.cancel(generation)
        else:
            with suppress(Lost):
                engine.step()
            happened["steps"] += 1
        engine.check_integrity()
        assert happened["steps"] < 3000, "somebody starves"
    assert kv.pool.num_free == kv.pool.capacity
    for generation, request in asked.items():
        given = generation.output().completions
        if generation not in cancelled:
            assert [(each.token_ids, each.score) for each in given] == alone(*request), request
        kind = "beams" if generation.request.has_beams else "others"
        happened[f"preempted {kind}"] += any(each.metrics.preemptions for each in given)
        happened["error"] += any(each.finish_reason == "error" for each in given)
        happened["cancelled"] += generation in cancelled
    return happened


@pytest.mark.parametrize("part", range(4))
def test_every_answer_is_the_one_a_request_gets_alone(part: int) -> None:
    happened = sum((history(seed) for seed in range(part * 20, part * 20 + 20)), Counter())
    print(happened)


@pytest.mark.slow
def test_every_answer_over_many_histories() -> None:
    happened = sum((history(seed) for seed in range(1000, 2500)), Counter())
    print(happened)
