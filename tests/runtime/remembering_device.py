"""An engine without a model: what may follow a sequence is drawn from its tokens, so every answer is known beforehand.

The device remembers what was written where, through the block tables and copies of the schedules, and every
sequence finds its own tokens there in each step.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import cast
from weakref import WeakKeyDictionary

from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import TO_COME, Sequence
from fastgen.runtime.requests.sampled import Candidate, SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.beam_search import BeamSearch, num_candidates
from fastgen.runtime.scheduling.drafts import NgramDrafter
from fastgen.runtime.scheduling.policies import Policy
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.step import Step

EOS = 0
VOCAB_SIZE = 12
MAX_MODEL_LEN = 1000


def drawn_by(token_ids: SequenceOf[int], salt: int) -> random.Random:
    return random.Random(zlib.crc32(array("I", [salt, *token_ids]).tobytes()))


def candidates(token_ids: SequenceOf[int]) -> list[Candidate]:
    """Returns the tokens that may follow, best first; now and then there is hardly a choice."""
    rng = drawn_by(token_ids, 0)
    scores = sorted((-rng.expovariate(0.5) for _ in range(VOCAB_SIZE)), reverse=True)
    found = list(map(Candidate, rng.sample(range(VOCAB_SIZE), VOCAB_SIZE), scores))
    return found[: rng.randint(1, 2)] if rng.random() < 0.05 else found


def next_token(token_ids: SequenceOf[int], index: int) -> int:
    """Often what followed the same two tokens before, so that drafts are right now and then."""
    rng = drawn_by(token_ids, 1 + index)
    context = token_ids[-2:] if rng.random() < 0.8 else token_ids
    return drawn_by(context, 1 + index).randrange(VOCAB_SIZE)


class LostStepError(BaseException):
    """A step that is lost."""


def build_engine(
    kv: KVCacheManager,
    *,
    token_budget: int,
    max_num_seqs: int,
    loses_step: Callable[[], bool] = lambda: False,
    postpones: Callable[[], bool] = lambda: False,
    runs_ahead: bool = False,
    policy: Policy | None = None,
    drafter: NgramDrafter | None = None,
) -> Engine:
    """An engine on a :class:`Device`; ``loses_step`` is asked at least twice a step, ``postpones`` for each token."""
    device, ticks = Device(kv, loses_step, postpones), count()
    scheduler = Scheduler(
        kv,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        policy=policy,
        propose_drafts=None if drafter is None else drafter.propose,
    )
    return Engine(
        cast(ModelRunner, AheadDevice(device) if runs_ahead else device),
        scheduler,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({EOS}),
        new_detokenizer=None,
        drafter=drafter,
        clock=lambda: next(ticks) * 1e-3,
        runs_ahead=runs_ahead,
    )


class AheadDevice:
    """A :class:`Device` for an engine that runs ahead: a forward pass finds the tokens that the host does not know yet
    where they were sampled, and nothing is sampled before the host knows all of them.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.num_ahead = self.num_taken = self.num_unused = 0
        # For each slot the token sampled last: its sequence, that one's preemptions, the position, the token.
        self._sampled: dict[int | None, tuple[Sequence, int, int, int]] = {}
        # For each launched step, the tokens that the host did not know.
        self._taken: WeakKeyDictionary[Step, dict[Sequence, int]] = WeakKeyDictionary()

    def launch(self, step: Step) -> None:
        schedule = step.schedule
        self.num_ahead += step.is_ahead
        unknown = [entry.seq for entry in schedule.entries if TO_COME in entry.seq.token_ids]
        assert step.is_ahead or not unknown
        taken: dict[Sequence, int] = {}
        for seq in unknown:
            assert seq.token_ids.index(TO_COME) == seq.num_tokens - 1
            assert not seq.request.has_beams
            owner, num_preemptions, position, token_id = self._sampled[seq.slot]
            assert (owner, num_preemptions, position) == (seq, seq.num_preemptions, seq.num_tokens - 1)
            taken[seq] = token_id
            self.num_taken += 1
        self.device.write(schedule, taken)
        self._taken[step] = taken
        if self.device.loses_step():
            raise self.device.error

    def sample(self, step: Step) -> None:
        live = [entry for entry in step.schedule.entries if entry.seq.slot is not None]
        for entry in live:
            assert TO_COME not in entry.seq.token_ids
            if (token_id := self._taken[step].get(entry.seq)) is not None:
                assert entry.seq.token_ids[-1] == token_id, "the host has another token"
        step.postponed = self.device.postponed(live)
        self.num_unused += len(step.schedule.entries) - len(live)
        if self.device.loses_step():
            raise self.device.error
        sampled, num_accepted = [], {}
        for entry in live:
            if entry.samples and entry.seq not in step.postponed:
                tokens = self.device.tokens(entry)
                sampled += [(entry.seq, token) for token in tokens]
                if entry.drafts:
                    num_accepted[entry.seq] = len(tokens) - 1
                else:
                    seq, position = entry.seq, entry.seq.num_tokens
                    self._sampled[seq.slot] = (seq, seq.num_preemptions, position, tokens[0].token_id)
        step.sampled, step.num_accepted = sampled, num_accepted

    def collect(self, step: Step) -> None:
        if self.device.loses_step():
            raise self.device.error


class Device:
    """Blocks of token ids, and the block tables that schedules wrote."""

    error: type[BaseException] = LostStepError

    def __init__(self, kv: KVCacheManager, loses_step: Callable[[], bool], postpones: Callable[[], bool]) -> None:
        self.windows, self.block_size, self.loses_step = kv.windows, kv.block_size, loses_step
        self._postpones = postpones
        self.num_computed = 0
        self._tables: dict[tuple[int, int, int], int] = {}
        self._written: dict[tuple[int, int, int], int] = {}

    def launch(self, step: Step) -> None:
        lost_early, lost_late = self.loses_step(), self.loses_step()
        if lost_early:
            raise self.error
        self.write(step.schedule, {})
        if lost_late:
            raise self.error

    def sample(self, step: Step) -> None:
        step.postponed = self.postponed(step.schedule.entries)
        sampled = [entry for entry in step.schedule.entries if entry.samples and entry.seq not in step.postponed]
        found = [(entry, self.tokens(entry)) for entry in sampled]
        step.sampled = [(entry.seq, token) for entry, tokens in found for token in tokens]
        step.num_accepted = {entry.seq: len(tokens) - 1 for entry, tokens in found if entry.drafts}

    def collect(self, step: Step) -> None:
        pass

    def postponed(self, entries: Iterable[ScheduledTokens]) -> frozenset[Sequence]:
        """Sequences for which no token is sampled, as if their mask were late."""
        may = [entry.seq for entry in entries if entry.samples and not entry.drafts and not entry.seq.request.has_beams]
        return frozenset(seq for seq in may if self._postpones())

    def write(self, schedule: Schedule, unknown: Mapping[Sequence, int]) -> None:
        """The forward pass, with the newest tokens that the host does not know."""
        for slot, group, index, block_id in schedule.block_updates:
            self._tables[slot, group, index] = block_id
        before = dict(self._written)
        for group, _, source, destination in schedule.block_copies:
            for offset in range(self.block_size):
                if (group, source, offset) in before:
                    self._written[group, destination, offset] = before[group, source, offset]
        tokens = {
            entry.seq: [*entry.seq.token_ids[: entry.end - len(entry.drafts)], *entry.drafts]
            for entry in schedule.entries
        }
        for seq, token_id in unknown.items():
            tokens[seq][-1] = token_id
        for entry in schedule.entries:
            for position in range(entry.start, entry.end):
                for group in range(len(self.windows)):
                    self._written[self._place(entry.seq, group, position)] = tokens[entry.seq][position]
        for entry in schedule.entries:
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, entry.start - window + 1)
                seen = [self._written[self._place(entry.seq, group, position)] for position in range(first, entry.end)]
                assert seen == tokens[entry.seq][first : entry.end], f"{entry} reads {seen}"
        self.num_computed += schedule.num_tokens

    def _place(self, seq: Sequence, group: int, position: int) -> tuple[int, int, int]:
        assert seq.slot is not None
        index, offset = divmod(position, self.block_size)
        return group, self._tables[seq.slot, group, index], offset

    def tokens(self, entry: ScheduledTokens) -> list[SampledToken]:
        """Returns the tokens that follow those of an entry, and its drafts as long as they are right."""
        seq = entry.seq
        if seq.request.has_beams:
            return [SampledToken(0, candidates=candidates(seq.token_ids))]
        found = [next_token(seq.token_ids, seq.index)]
        for index, draft in enumerate(entry.drafts):
            if draft != found[-1]:
                break
            found.append(next_token([*seq.token_ids, *entry.drafts[: index + 1]], seq.index))
        return [*map(SampledToken, found)]


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
