"""Random histories of an engine without a model: requests come, end, are cancelled and time out; steps fail."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from fastgen.errors import RequestTooLargeError
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.engine import Engine
from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import Candidate, SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.beam_search import num_candidates
from fastgen.runtime.scheduling.policies import POLICIES, DynamicBatching, Policy, StaticBatching, choose_policy
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.step import Step

EOS = 0


class StepFailedError(Exception):
    """The error of a step that fails on the device."""


@dataclass
class Device:
    """Samples at random, takes random times on a clock of its own, and fails now and then."""

    rng: random.Random
    now_s: float = 1000.0
    failures: float = 0.0
    # How often the logits of a sequence are not finite.
    damages: float = 0.0
    seen: list[Schedule] = field(default_factory=list)

    def clock(self) -> float:
        self.now_s += self.rng.random() * 1e-5
        return self.now_s

    def launch(self, step: Step) -> None:
        schedule = step.schedule
        self.seen.append(schedule)
        build_s, forward_s = self.rng.random() * 1e-3, (0.1 + self.rng.random()) * schedule.num_tokens * 1e-3
        self.now_s += build_s + forward_s
        if self.rng.random() < self.failures:
            raise StepFailedError
        step.build_s, step.num_padding = build_s, schedule.size - schedule.num_tokens

    def sample(self, step: Step) -> None:
        entries = step.schedule.entries
        step.sampled = [(entry.seq, token) for entry in entries if entry.samples for token in self._tokens(entry)]
        num_given = Counter(seq for seq, _ in step.sampled)
        step.num_accepted = {chunk.seq: num_given[chunk.seq] - 1 for chunk in step.schedule.chunks if chunk.drafts}

    def collect(self, step: Step) -> None:
        pass

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """Returns random drafts, often none."""
        num_left = seq.request.sampling.max_new_tokens - (seq.num_tokens - seq.num_prompt_tokens)
        return [self.rng.randrange(12) for _ in range(self.rng.randint(-2, min(max_tokens, num_left - 1, 4)))]

    def _tokens(self, entry: ScheduledTokens) -> list[SampledToken]:
        """Returns the drafts that are right, up to the first wrong one, and then another token."""
        num_right = next((place for place in range(len(entry.drafts)) if self.rng.random() < 0.4), len(entry.drafts))
        return [*map(SampledToken, entry.drafts[:num_right]), self._sample(entry.seq)]

    def _sample(self, seq: Sequence) -> SampledToken:
        if self.rng.random() < self.damages:
            return SampledToken(0, error="no numbers", is_damaged=True)
        if not seq.request.has_beams:
            return SampledToken(self.rng.randrange(12))
        number = num_candidates(seq.request.sampling.beam_width, frozenset({EOS}))
        token_ids = self.rng.sample(range(12), number)
        scores = sorted((-self.rng.random() for _ in range(number)), reverse=True)
        return SampledToken(0, candidates=[Candidate(*pair) for pair in zip(token_ids, scores, strict=True)])


@dataclass
class History:
    """An engine and its requests. ``after_step``, if set, is called after each step, also after failed ones."""

    rng: random.Random
    num_blocks: int
    token_budget: int
    max_num_seqs: int
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    prefix_caching: bool = False
    beams: bool = False
    drafts: bool = False
    policy: Policy | None = None
    kv_reservation: str | None = None
    max_model_len: int = 1000
    aging_s: float = 30.0
    failures: float = 0.0
    damages: float = 0.0
    after_step: Callable[[History], None] | None = None
    generations: list[Generation] = field(default_factory=list)
    # How often the policy postponed a step.
    num_waits: int = 0

    def __post_init__(self) -> None:
        self.device = Device(self.rng, failures=self.failures, damages=self.damages)
        self.engine = Engine(
            cast(ModelRunner, self.device),
            Scheduler(
                KVCacheManager(
                    self.num_blocks,
                    self.block_size,
                    self.windows,
                    max_chunk=self.token_budget,
                    prefix_caching=self.prefix_caching,
                ),
                token_budget=self.token_budget,
                max_num_seqs=self.max_num_seqs,
                policy=self.policy,
                aging_s=self.aging_s,
                propose_drafts=self.device.propose if self.drafts else None,
                kv_reservation=self.kv_reservation,
                max_model_len=self.max_model_len,
            ),
            vocab_size=100,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset({EOS}),
            new_detokenizer=None,
            clock=self.device.clock,
        )

    def record_with(self, **bounds: Any) -> None:
        """Replaces the recorder, before the first step, by one with these bounds."""
        engine = self.engine
        recorder = Recorder(engine.recorder.engine, lambda: 0.0, **bounds)
        engine.observers.set(recorder, engine.metrics)
        engine.recorder = recorder

    @staticmethod
    def sampling(**fields: Any) -> SamplingParams:
        return SamplingParams(**fields)

    def submit(self, num_prompt_tokens: int | None = None, **fields: Any) -> Generation:
        """Submits a request that fits the cache. Prompts share beginnings."""
        room = (self.num_blocks - 1) // len(self.windows) * self.block_size
        length = num_prompt_tokens or min(room - 1, self.rng.choice([1, 3, 8, 20, room // 2]))
        beginning = self.rng.choice([[1] * length, [2, 3] * length, [self.rng.randrange(90) for _ in range(length)]])
        prompt = (beginning[: self.rng.randrange(length + 1)] + [self.rng.randrange(90) for _ in range(length)])[
            :length
        ]
        fields.setdefault("max_new_tokens", self.rng.randint(1, min(20, room - length)))
        generation = self.engine.submit(prompt, SamplingParams(**fields))
        self.generations.append(generation)
        return generation

    def step(self) -> None:
        with contextlib.suppress(StepFailedError):
            self.engine.step()
        if idle_s := self.engine.idle_s:
            self.num_waits += 1
            self.device.now_s += self.rng.choice([0.3, 1.0]) * idle_s
        if self.after_step is not None:
            self.after_step(self)

    def live(self, num_acts: int) -> None:
        """Does ``num_acts`` random acts, and then steps until nothing is left."""
        for _ in range(num_acts):
            act = self.rng.random()
            if self.beams and act < 0.05:
                with contextlib.suppress(RequestTooLargeError):  # on a small cache two beams may be too many
                    self.submit(beam_width=2, n=self.rng.choice([1, 2]), max_new_tokens=self.rng.randint(1, 9))
            elif act < 0.25:
                self.submit(
                    n=self.rng.choice([1, 1, 1, 2, 3]),
                    timeout_s=self.rng.choice([None, None, 0.05, 1.0]),
                    priority=self.rng.choice([0, 0, 0, 1, -1]),
                    prompt_logprobs=self.rng.choice([None, None, None, 0]),
                )
            elif act < 0.3 and self.generations:
                self.engine.cancel(self.rng.choice(self.generations))
            elif act < 0.35:
                self.device.now_s += self.rng.random() * 0.1  # no step is run
            else:
                self.step()
        self.finish()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def random_history(rng: random.Random, **options: Any) -> History:
    """Returns a history over small random sizes, so that slots and blocks run short. It has not begun."""
    max_num_seqs = rng.choice([2, 3, 6])
    return History(
        rng,
        num_blocks=rng.choice([9, 14, 30]),
        windows=rng.choice([(None,), (None,), (6,), (None, 6)]),
        token_budget=max_num_seqs + rng.choice([1, 6, 40]),
        max_num_seqs=max_num_seqs,
        **options,
    )


def random_policy(rng: random.Random) -> Policy:
    """Returns any of fastgen's own policies, for two slots or more."""
    name = rng.choice([*POLICIES, "bounded"])
    if name == "bounded":
        return choose_policy("splitfuse", itl_target_ms=rng.choice([2.0, 6.5, 20.0]))
    if name == "dynamic":
        return DynamicBatching(rng.choice([None, 1, 2]), max_delay_s=rng.choice([0.0, 0.01, 0.05]))
    return StaticBatching(rng.choice([None, 2])) if name == "static" else choose_policy(name)
