"""The input batch: the design's worked example to the number, and random histories against what the host knows."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fastgen.compile.ops.embedding.reference import resolve_token_ids
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.kv_cache.block_tables import BlockUpdate
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.drafts import DraftedSequence, SampledSequence
from fastgen.runtime.scheduling.schedule import Schedule, ScheduledTokens
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.input_buffers import InputBuffers
from fastgen.runtime.step.model_runner import accept

CPU = torch.device("cpu")
POISON = 0x7F
MAX_DRAFTS = 5


def running(request_id: int, slot: int, token_ids: list[int], num_computed: int, tables: list[list[int]]) -> Sequence:
    sequence = Request(request_id, token_ids, SamplingParams(), arrival_s=0.0).sequences[0]
    sequence.slot, sequence.num_computed_tokens, sequence.block_tables = slot, num_computed, tables
    return sequence


def pending(sequence: Sequence, num_tokens: int | None = None) -> ScheduledTokens:
    count = sequence.num_pending_tokens if num_tokens is None else num_tokens
    samples = count == sequence.num_pending_tokens
    return ScheduledTokens(sequence, sequence.num_computed_tokens, count, samples=samples)


def drafted(sequence: Sequence, *drafts: int) -> ScheduledTokens:
    count = 1 + len(drafts)
    return ScheduledTokens(sequence, sequence.num_computed_tokens, count, samples=True, drafts=drafts)


def step(
    *chunks: ScheduledTokens,
    decodes: tuple[Sequence, ...] = (),
    updates: tuple[BlockUpdate, ...] = (),
    size: int = 8,
) -> Schedule:
    return Schedule(
        decodes=decodes,
        positions=tuple(sequence.num_computed_tokens for sequence in decodes),
        chunks=chunks,
        block_updates=updates,
        block_copies=(),
        preempted=(),
        num_tokens=len(decodes) + sum(chunk.num_tokens for chunk in chunks),
        size=size,
    )


def updates_of(sequence: Sequence) -> list[BlockUpdate]:
    assert sequence.slot is not None
    return [
        BlockUpdate(sequence.slot, group, index, block)
        for group, table in enumerate(sequence.block_tables)
        for index, block in enumerate(table)
    ]


def poison(inputs: InputBatch) -> None:
    for buffer in (inputs.buffers.packed, *inputs.buffers.staging):
        buffer.fill_(POISON)


def embedded_ids(batch: RaggedBatch) -> list[int]:
    ids: list[int] = resolve_token_ids(batch.input_ids, batch.token_source, batch.sampled_ids).tolist()
    return ids


def sample_on_device(
    inputs: InputBatch, tokens: dict[Sequence, int], also_sampled: Iterable[SampledSequence] = ()
) -> None:
    """As kernels do that sample there, and the model runner. ``also_sampled`` are rows whose token must not be used."""
    inputs.forget_sampled([*tokens, *also_sampled])
    for sequence, token_id in tokens.items():
        assert sequence.slot is not None
        inputs.sampled_ids[sequence.slot] = token_id
    inputs.note_sampled(list(tokens))


# The worked example of the ragged batch's documentation, with a second KV group and two tokens of padding


@pytest.fixture
def example() -> tuple[InputBatch, list[Sequence]]:
    inputs = InputBatch(
        token_budget=8, max_num_seqs=4, max_rows=8, num_groups=2, max_blocks=3, block_size=4, device=CPU
    )
    chunk = running(0, 0, [50, 51, 52, 53, 54, 55], 2, [[7, 2], [1, 3]])
    long = running(1, 1, [60, 61, 62, 63, 64, 65, 66, 67], 8, [[4, 5, 6], [11, 10, 9]])
    short = running(2, 2, [70, 71], 2, [[8], [12]])
    return inputs, [chunk, long, short]


def build_example(inputs: InputBatch, sequences: list[Sequence]) -> tuple[RaggedBatch, list[SampledSequence]]:
    chunk, long, short = sequences
    # the decodes' last tokens have been sampled a step ago, and are still on the device
    sample_on_device(inputs, {long: 68, short: 72})
    long.token_ids.append(68)
    short.token_ids.append(72)
    poison(inputs)
    updates = tuple(update for sequence in sequences for update in updates_of(sequence))
    return inputs.build(step(pending(chunk), decodes=(long, short), updates=updates))


def test_the_worked_example(example: tuple[InputBatch, list[Sequence]]) -> None:
    batch, rows = build_example(*example)
    chunk, long, short = example[1]
    expected = {
        "input_ids": [52, 53, 54, 55, 68, 72, 0, 0],
        "token_source": [-1, -1, -1, -1, 1, 2, -1, -1],
        "positions": [2, 3, 4, 5, 8, 2, 0, 0],
        "cu_seqlens_q": [0, 4, 5, 6, 6],
        "seq_lens": [6, 9, 3, 0],
        "slot_mapping": [[30, 31, 8, 9, 24, 34, 0, 0], [6, 7, 12, 13, 36, 50, 0, 0]],
        "logits_indices": [4, 5, 3],
    }
    for name, values in expected.items():
        found: Tensor = getattr(batch, name)
        assert found.tolist() == values, name
        assert found.dtype == (torch.int64 if name == "slot_mapping" else torch.int32), name
    assert batch.block_tables[0, :3, :3].tolist() == [[7, 2, 0], [4, 5, 6], [8, 0, 0]]
    assert batch.block_tables[1, :3, :3].tolist() == [[1, 3, 0], [11, 10, 9], [12, 0, 0]]
    assert batch.sampled_ids[1:3].tolist() == [68, 72]
    assert rows == [long, short, chunk]
    slots, positions = example[0].sampled_rows(4)
    assert slots.tolist() == [1, 2, 0, -1]
    assert positions[:3].tolist() == [9, 3, 6]


def test_a_decode_with_drafts(example: tuple[InputBatch, list[Sequence]]) -> None:
    """Each draft is a token of the step and a row of its own, and only the token before them may be on the device."""
    build_example(*example)
    inputs, (chunk, long, short) = example
    batch, rows = inputs.build(step(drafted(long, 68, 69), pending(chunk, 3), decodes=(short,), size=8))
    assert batch.input_ids.tolist() == [52, 53, 54, 68, 68, 69, 72, 0]
    assert batch.token_source.tolist() == [-1, -1, -1, 1, -1, -1, 2, -1]
    assert batch.positions.tolist() == [2, 3, 4, 8, 9, 10, 2, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 6, 7, 7]
    assert batch.seq_lens.tolist() == [5, 11, 3, 0]
    assert batch.slot_mapping.tolist() == [[30, 31, 8, 24, 25, 26, 34, 0], [6, 7, 12, 36, 37, 38, 50, 0]]
    assert batch.logits_indices.tolist() == [6, 3, 4, 5]
    assert [row.token_ids for row in rows] == [
        short.token_ids, long.token_ids, [*long.token_ids, 68], [*long.token_ids, 68, 69]
    ]  # fmt: skip
    slots, positions = inputs.sampled_rows(5)
    assert slots.tolist() == [2, 1, 1, 1, -1]
    assert positions[:4].tolist() == [3, 9, 10, 11]


def test_what_does_not_sample_needs_no_logits(example: tuple[InputBatch, list[Sequence]]) -> None:
    inputs, (chunk, *_) = example
    batch, rows = inputs.build(step(pending(chunk, 3), updates=tuple(updates_of(chunk)), size=4))
    assert rows == []
    assert batch.logits_indices.shape == (0,)
    assert batch.input_ids.tolist() == [52, 53, 54, 0]
    assert batch.slot_mapping.tolist() == [[30, 31, 8, 0], [6, 7, 12, 0]]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 3, 3, 3]
    assert inputs.sampled_rows(4)[0].tolist() == [-1] * 4
    inputs.note_sampled([])


def test_a_step_is_one_copy_to_addresses_that_never_change(
    example: tuple[InputBatch, list[Sequence]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses(batch: RaggedBatch) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in vars(batch).items()}

    copies: list[Tensor] = []
    copy = Tensor.copy_

    def counted(self: Tensor, *args: object, **options: object) -> Tensor:
        copies.append(self)
        return copy(self, *args, **options)

    first = addresses(build_example(*example)[0])
    inputs, (chunk, *_) = example
    monkeypatch.setattr(Tensor, "copy_", counted)
    for size in (4, 8, 4):
        copies.clear()
        assert addresses(inputs.build(step(pending(chunk), size=size))[0]) == first
        assert [tensor.data_ptr() for tensor in copies] == [inputs.buffers.packed.data_ptr()]


class LateCopy:
    """In the place of an event behind a copy out of ``staging``: the device reads it when it is waited for."""

    def __init__(self, staging: Tensor):
        self._staging, self.found = staging, torch.empty(0)

    def synchronize(self) -> None:
        self.found = self._staging.clone()


def test_inputs_are_not_overwritten_before_a_late_device_has_them(example: tuple[InputBatch, list[Sequence]]) -> None:
    inputs, (chunk, *_) = example
    schedules = [step(pending(chunk, 1)), step(pending(chunk, 2)), step(pending(chunk, 3)), step(pending(chunk, 4))]
    for schedule in schedules[:2]:
        inputs.build(schedule)
    given = [each.clone() for each in inputs.buffers.staging]
    copies = [LateCopy(each) for each in inputs.buffers.staging]
    inputs._copied = list(copies)  # type: ignore[arg-type]
    for schedule in schedules[2:]:
        inputs.build(schedule)
    for before, copy, after in zip(given, copies, inputs.buffers.staging, strict=True):
        assert torch.equal(copy.found, before)
        assert not torch.equal(after, before)


def test_a_token_on_the_device_is_taken_only_as_long_as_the_slot_is_the_sequences_own(
    example: tuple[InputBatch, list[Sequence]],
) -> None:
    build_example(*example)
    inputs, (chunk, long, _) = example

    def sources(sequence: Sequence, *chunks: ScheduledTokens) -> list[int]:
        batch, _ = inputs.build(step(*chunks, decodes=() if chunks else (sequence,)))
        found: list[int] = batch.token_source.tolist()[: sequence.num_pending_tokens]
        return found

    assert sources(long) == [1]
    assert sources(long, pending(long)) == [1], "as a chunk too"
    long.num_preemptions, long.num_computed_tokens = 1, 3
    assert sources(long, pending(long)) == [-1] * 6, "it lost its slot in between, though it has got the same again"
    long.num_computed_tokens = 8
    assert sources(long) == [-1]
    long.num_preemptions = 0
    long.slot, chunk.slot = None, 1
    chunk.token_ids, chunk.num_computed_tokens, chunk.block_tables = list(range(9)), 8, long.block_tables
    assert sources(chunk) == [-1], "that token was another's, at the same position"


@pytest.mark.parametrize(("budget", "max_num_seqs", "block_size"), [(2048, 256, 16), (64, 8, 1), (8, 8, 16)])
def test_updates_of_two_steps_have_room_and_not_much_more(budget: int, max_num_seqs: int, block_size: int) -> None:
    groups = 2
    buffers = InputBuffers(
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        max_rows=max_num_seqs,
        num_groups=groups,
        max_blocks=budget,
        block_size=block_size,
        device=CPU,
    )
    # All sequences but one begin a block with one token, and the last one has the rest.
    most = groups * (max_num_seqs - 1 + -(-(budget - max_num_seqs + 1) // block_size))
    assert 2 * most <= buffers.max_updates <= 3 * most


def test_more_updates_than_a_step_makes_arrive_too(example: tuple[InputBatch, list[Sequence]]) -> None:
    """As when a long prefix comes out of the cache, and its whole table with it."""
    inputs, (chunk, *_) = example
    inputs.max_updates = 5
    updates = tuple(BlockUpdate(slot, 1, index, 10 * slot + index) for slot in range(4) for index in range(3))
    batch, _ = inputs.build(step(pending(chunk, 3), updates=updates))
    assert inputs.block_tables[1, :, :3].tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert not inputs.block_tables[0].any()
    assert batch.slot_mapping[:, :3].tolist() == [[2, 3, 0], [2, 3, 4]]


# Random histories


class RandomDrafter:
    """Any tokens at all, as often as not none."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        room = sequence.request.sampling.max_new_tokens - (sequence.num_tokens - sequence.num_prompt_tokens) - 1
        most = min(max_tokens, room, MAX_DRAFTS)
        count = self.rng.randint(0, most) if most > 0 and self.rng.random() < 0.5 else 0
        return [self.rng.randrange(1, 10**6) for _ in range(count)]


class History:
    """The real scheduler with requests that come, finish and are cancelled, and steps that fail, over a small cache."""

    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        self.num_groups, self.block_size = rng.randint(1, 3), rng.choice([1, 2, 4, 16])
        self.max_seqs = rng.randint(1, 6)
        self.budget = self.max_seqs + rng.randint(0, 40)
        self.max_blocks = -(-60 // self.block_size)
        num_blocks = 1 + self.num_groups * (self.max_blocks + rng.randint(0, 12))
        kv = KVCacheManager(num_blocks, self.block_size, (None,) * self.num_groups)
        drafter = RandomDrafter(random.Random(-seed))
        self.scheduler = Scheduler(
            kv, token_budget=self.budget, max_num_seqs=self.max_seqs, propose_drafts=drafter.propose
        )
        self.inputs = InputBatch(
            token_budget=self.budget,
            max_num_seqs=self.max_seqs,
            max_rows=min(self.budget, self.max_seqs * (1 + MAX_DRAFTS)),
            num_groups=self.num_groups,
            max_blocks=self.max_blocks,
            block_size=self.block_size,
            device=CPU,
        )
        self.num_requests = self.num_preempted = self.num_from_device = self.num_accepted = 0
        self.failure_rate = rng.choice([0.0, 0.2, 0.6])
        # Whose newest token was sampled in the last step it took part in, so that no copy need carry it.
        self.on_device: set[Sequence] = set()

    def maybe_submit(self) -> None:
        while self.rng.random() < 0.5 and self.num_requests < 12:
            prompt = [self.rng.randrange(1, 10**6) for _ in range(self.rng.randint(1, 40))]
            sampling = SamplingParams(max_new_tokens=self.rng.randint(1, 20), n=self.rng.choice([1, 1, 2]))
            self.scheduler.add(Request(self.num_requests, prompt, sampling, arrival_s=0.0))
            self.num_requests += 1

    def maybe_cancel(self) -> None:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        if alive and self.rng.random() < 0.1:
            self.scheduler.finish(self.rng.choice(alive))

    def step(self) -> bool:
        self.maybe_submit()
        self.maybe_cancel()
        schedule = self.scheduler.schedule()
        if schedule is None:
            return self.num_requests < 12
        poison(self.inputs)
        batch, rows = self.inputs.build(schedule)
        self.check(schedule, batch, rows)
        fails = self.rng.random() < self.failure_rate
        if fails and self.rng.random() < 0.6:  # before sampling
            return True
        tokens = [SampledToken(self.token_before(row)) for row in [*rows[1:], None][: len(rows)]]
        sampled, num_accepted = accept(rows, tokens)
        undrafted = {seq: token.token_id for seq, token in sampled if seq not in num_accepted}
        sample_on_device(self.inputs, undrafted, rows)
        self.on_device -= {chunk.seq for chunk in schedule.chunks if chunk.drafts}  # all of it went to one place
        if fails:  # after it: these tokens are forgotten, and others will be sampled
            self.on_device -= set(undrafted)
            return True
        self.scheduler.commit(schedule)
        for sequence, token in sampled:
            sequence.token_ids.append(token.token_id)
            generated = sequence.num_tokens - sequence.num_prompt_tokens
            if generated == sequence.request.sampling.max_new_tokens:
                self.scheduler.finish(sequence)
        for sequence, num_drafts in num_accepted.items():
            if sequence in self.scheduler.running:
                self.scheduler.accept(sequence, num_drafts)
                self.num_accepted += num_drafts
        self.on_device = {seq for seq in self.on_device | undrafted.keys() if seq in self.scheduler.running}
        return True

    def token_before(self, following: SampledSequence | None) -> int:
        """Returns the token that a row samples: more often than not the draft that the following row is built on."""
        if isinstance(following, DraftedSequence) and self.rng.random() < 0.7:
            return following.drafts[-1]
        return self.rng.randrange(1, 10**6)

    def check(self, schedule: Schedule, batch: RaggedBatch, rows_found: list[SampledSequence]) -> None:
        """Compares each token of the batch, read as a kernel would read it, with the sequences."""
        self.on_device -= set(schedule.preempted)
        self.num_preempted += len(schedule.preempted)
        starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        ids, positions = embedded_ids(batch), batch.positions.tolist()
        assert len(ids) == len(positions) == schedule.size
        assert len(starts) == len(lengths) + 1 == self.max_seqs + 1
        entries = {entry.seq.slot: entry for entry in schedule.entries}
        rows_expected: dict[int, tuple[Sequence, list[int], int]] = {}
        for slot in range(self.max_seqs):
            entry, rows = entries.get(slot), slice(starts[slot], starts[slot + 1])
            if entry is None:
                assert rows.start == rows.stop
                assert lengths[slot] == 0
                continue
            sequence, where = entry.seq, range(entry.start, entry.end)
            tokens = [*sequence.token_ids, *entry.drafts]
            assert positions[rows] == list(where)
            assert ids[rows] == tokens[entry.start : entry.end]
            assert lengths[slot] == entry.end
            from_device = sequence in self.on_device
            self.num_from_device += from_device
            expected_source = [slot if from_device else -1] + [-1] * (entry.num_tokens - 1)
            assert batch.token_source[rows].tolist() == expected_source
            for group, table in enumerate(sequence.block_tables):
                kv_slots = [table[position // self.block_size] * self.block_size + position % self.block_size
                         for position in where]  # fmt: skip
                assert batch.slot_mapping[group, rows].tolist() == kv_slots
            for index in range(entry.num_rows):
                row = rows.stop - entry.num_rows + index
                rows_expected[row] = (sequence, tokens[: sequence.num_tokens + index], positions[row] + 1)
        slots, sampled_positions = (each.tolist() for each in self.inputs.sampled_rows(len(rows_found)))
        assert sorted(batch.logits_indices.tolist()) == sorted(rows_expected)
        for index, row in enumerate(batch.logits_indices.tolist()):
            sequence, tokens, position = rows_expected[row]
            assert rows_found[index].token_ids == tokens
            assert rows_found[index].num_tokens == sampled_positions[index] == position
            assert slots[index] == sequence.slot
        assert ids[starts[-1] :] == positions[starts[-1] :] == [0] * (schedule.size - schedule.num_tokens)
        assert (batch.token_source[starts[-1] :] == -1).all()
        assert batch.slot_mapping.shape == (self.num_groups, schedule.size)
        for per_group in (batch.slot_mapping, batch.block_tables):
            assert not any(each.data_ptr() % 16 for each in per_group), "a GPU would not take this address"
        assert (batch.slot_mapping[:, starts[-1] :] < self.block_size).all(), "padding goes into a block of a sequence"
        for sequence in self.scheduler.running:
            for group, table in enumerate(sequence.block_tables):
                assert batch.block_tables[group, sequence.slot, : len(table)].tolist() == table


@pytest.mark.parametrize("first_seed", range(0, 120, 30))
def test_random_histories(first_seed: int) -> None:
    histories = []
    for seed in range(first_seed, first_seed + 30):
        print(f"seed {seed}")
        histories.append(History(seed))
        while histories[-1].step():
            pass
        histories[-1].scheduler.check_integrity()
    assert sum(history.num_from_device for history in histories) > 500
    assert sum(history.num_preempted for history in histories) > 50
    assert sum(history.num_accepted for history in histories) > 500
