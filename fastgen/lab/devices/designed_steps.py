"""Designed steps: requests that bring an engine to steps of every kind, so that each part of their cost shows."""

from __future__ import annotations

import math
import random

from fastgen.runtime.engine import Engine
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step.forward import TapedForward

# Fewest and most steps of a batch of decodes, and for how many seconds it should run between these. The first steps
# after prompts take longer, since caches hold what the prompts needed: with a tiny model the first three take two to
# four times as long as later ones. So short steps need long batches to show how long they usually take.
_LEAST_DECODE_STEPS, _MOST_DECODE_STEPS = 12, 64
_DECODE_S = 0.02
# Most tokens of an answer beside prompts.
_MOST_MIXED = 48
# Steps of each number of decodes that warm it up.
_FIRST_STEPS = 4
# Most seconds for prompts that warm it up. A large model takes longer, but there recording is a small part of a step.
_FIRST_PROMPTS_S = 5.0
# Token ids of prompts are below this, or below the vocabulary's size where that is less.
_MOST_IDS = 256


class DesignedSteps:
    """Runs episodes on ``engine``, which has no other requests: decodes of many batch sizes and contexts, prompts of
    many lengths, and both together.

    Prompts are drawn with ``seed``, so that none begins like another and a prefix cache finds nothing.
    """

    def __init__(self, engine: Engine, *, seed: int = 0):
        # Token ids have draws of their own, so the steps are the same whatever a warm-up submits.
        self._engine, self._draw, self._draw_ids = engine, random.Random(seed), random.Random(f"ids {seed}")
        scheduler = engine.scheduler
        self._most_sequences = scheduler.max_num_seqs
        pool, groups = scheduler.kv.pool, scheduler.kv.num_groups
        self._most_cached = pool.capacity // groups * scheduler.kv.block_size
        # How long each request kept the engine when it was submitted, in seconds.
        self.arrivals_s: list[float] = []
        self._most_tokens = max(4, min(engine.max_model_len, self._most_cached) - 1)
        # Steps of the next batch of decodes.
        self._num_decode_steps = _LEAST_DECODE_STEPS

    def warm_up(self) -> None:
        """Runs a few steps of every number of decodes, largest first, and then a prompt of every length of which there
        are tapes: the first steps of a kind take longer, because they are recorded or compiled. Most of these lengths
        occur only once or twice in the steps that are measured, so their times would be mostly those of recording.
        """
        for place in range(self._most_sequences):
            num_new = _FIRST_STEPS * (place + 1)
            if num_new < self._most_tokens:
                self._submit(1, num_new)
        self._finish()
        clock = self._engine.clock
        end_s = clock() + _FIRST_PROMPTS_S
        for num_prompt in range(2, min(TapedForward.SMALL, self._most_tokens - 1) + 1):
            if clock() >= end_s:
                break
            self._submit(num_prompt, 1)
            self._finish()

    def _finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def run(self, seconds: float) -> None:
        """Runs episodes for this many seconds. Requests that are open at the end are cancelled."""
        clock = self._engine.clock
        end_s = clock() + seconds
        try:
            while clock() < end_s:
                episode = self._draw.choice((self._decodes, self._decodes, self._prompts, self._mixed, self._mixed))
                episode()
                begin_s, num_steps = clock(), 0
                while self._engine.has_work and clock() < end_s:
                    self._engine.step()
                    num_steps += 1
                if episode == self._decodes and num_steps:
                    wanted = round(_DECODE_S * num_steps / max(clock() - begin_s, 1e-9))
                    self._num_decode_steps = min(_MOST_DECODE_STEPS, max(_LEAST_DECODE_STEPS, wanted))
        finally:
            self._engine.cancel_all()

    def _decodes(self) -> None:
        """Submits sequences of about the same length, which then decode together."""
        num, num_steps = self._number(1, self._most_sequences), self._num_decode_steps
        most = min(self._most_tokens, self._most_cached // num - self._engine.scheduler.kv.block_size)
        if most <= num_steps:
            return
        length = self._number(1, most - num_steps)
        for _ in range(num):
            self._submit(length, num_steps)

    def _prompts(self) -> None:
        """Submits prompts that are answered with one token."""
        for _ in range(self._draw.choice((1, 1, 2, 4))):
            self._submit(self._number(1, self._most_tokens - 1), 1)

    def _mixed(self) -> None:
        """Submits answers that are so unlike in length that prompts come beside decodes for a while."""
        for _ in range(2 * self._number(1, self._most_sequences)):
            length = self._number(1, self._most_tokens - 1)
            self._submit(length, self._number(1, min(self._most_tokens - length, _MOST_MIXED)))

    def _number(self, least: int, most: int) -> int:
        """Draws a number, small ones as often as large ones: its logarithm is uniform."""
        return min(most, max(least, round(math.exp(self._draw.uniform(math.log(least), math.log(most + 1))))))

    def _submit(self, num_prompt: int, num_new: int) -> None:
        num_ids = min(_MOST_IDS, self._engine.vocab_size)
        prompt_ids = [self._draw_ids.randrange(num_ids) for _ in range(num_prompt)]
        sampling = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
        begin_s = self._engine.clock()
        self._engine.submit(prompt_ids, sampling)
        self.arrivals_s.append(self._engine.clock() - begin_s)
