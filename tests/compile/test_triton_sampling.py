"""The Triton sampling kernels: interpreted, against the torch reference, and built for GPUs that are not here."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.ops.sampling.reference import (
    Adjustments,
    Draws,
    RowStatus,
    adjust,
    log_probabilities,
    sample,
)
from fastgen.compile.ops.sampling.reference import row_status as reference_status
from fastgen.compile.ops.sampling.triton import SamplingKernel, SlotSampling, sampling_specs
from tests.kernel_device import DEVICE

CPU = torch.device("cpu")
INF = float("inf")

FEATURES: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "repetition": {"repetition": 1.7},
    "presence": {"presence": 0.9},
    "frequency": {"frequency": -0.6},
    "mask": {"masked": True},
    "bias": {"biased": True},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 3.0},
}


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


class Subject:
    """Kernels beside the reference, on the same rows; every row is a slot's, slots in falling order."""

    def __init__(self, loader: KernelLoader, vocab_size: int, max_rows: int, **options: Any):
        options = {"block": 64, "chunk": 128} | options
        self.vocab_size, self.max_rows = vocab_size, max_rows
        specs = sampling_specs(vocab_size, **options)
        self.kernels = SamplingKernel(specs, loader.load, max_rows=max_rows, max_slots=max_rows, device=CPU)
        self.kept = {argument.name for spec in specs for argument in spec.arguments}
        self.rng = torch.Generator().manual_seed(vocab_size)
        for name in ("uses", "mask", "bias"):
            if options.get({"uses": "penalties"}.get(name, name), True):
                self._fill(name)

    def _fill(self, name: str) -> None:
        buffer = self.kernels.buffer(name)
        if name == "uses":
            buffer.copy_(torch.randint(0, 8, buffer.shape, generator=self.rng).sub(4).clamp(min=0))
        elif name == "mask":
            buffer.copy_(torch.randint(-(2**31), 2**31, buffer.shape, generator=self.rng))
        else:
            buffer.copy_(torch.randint(-3, 4, buffer.shape, generator=self.rng) / 2)
            buffer[torch.rand(buffer.shape, generator=self.rng) < 0.2] = -INF

    def allowed(self, slot: int) -> Tensor:
        words = self.kernels.buffer("mask")[slot]
        return (words[:, None] >> torch.arange(32) & 1).bool().flatten()[: self.vocab_size]

    def expected(self, logits: Tensor, samplings: list[SlotSampling], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Token and status of each row, by the reference, with what lies in the buffers now."""
        slots = range(self.max_rows - 1, self.max_rows - 1 - len(samplings), -1)
        scores = logits.clone()
        for row, (slot, sampling) in enumerate(zip(slots, samplings, strict=True)):
            uses = torch.zeros(self.vocab_size, dtype=torch.int32)
            if sampling.penalised:
                uses = self.kernels.buffer("uses")[slot].clone()
            bias = torch.zeros(self.vocab_size)
            if sampling.masked:
                bias[~self.allowed(slot)] = -INF
            if sampling.biased:
                bias += self.kernels.buffer("bias")[slot]
            if sampling.penalised or sampling.masked or sampling.biased:
                adjustments = Adjustments(
                    seen=(uses > 0)[None],
                    counts=(uses >> 1).float()[None],
                    repetition=torch.tensor([max(sampling.repetition, torch.finfo().tiny)]),
                    presence=torch.tensor([sampling.presence]),
                    frequency=torch.tensor([sampling.frequency]),
                    bias=bias[None],
                )
                scores[row] = adjust(logits[row : row + 1], adjustments)[0]

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(each, name) for each in samplings], dtype=dtype)

        draws = Draws(
            temperature=column("temperature", torch.float64),
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float64),
            min_p=column("min_p", torch.float64),
            seeds=torch.tensor([(each.seed + 2**63) % 2**64 - 2**63 for each in samplings]),
            positions=positions.long() & 0xFFFFFFFF,
            sequence_indices=column("sequence_index", torch.int64),
        )
        raw_status = reference_status(logits)
        token_ids, status = sample(scores, draws)
        return token_ids, torch.where(raw_status == RowStatus.OK, status, raw_status)

    def spoil(self) -> None:
        """Puts numbers into all that the kernels only keep for each other, as another step may have left them."""
        spoiled = {
            INF: ("peaks", "sums", "drawn", "raw_peaks", "raw_sums"),
            2**31 - 1: ("peak_ids", "states", "masses", "drawn_ids", "bin_counts", "bin_masses", "list_counts"),
            -(2**31): ("list_keys", "list_ids", "slice_top", "slice_top_ids"),
        }
        for number, names in spoiled.items():
            for name in names:
                if name in self.kept:
                    self.kernels.buffer(name).fill_(number)

    def run(self, logits: Tensor, samplings: list[SlotSampling], positions: Tensor) -> Tensor:
        self.spoil()
        num_rows = len(samplings)
        slots = torch.arange(self.max_rows - 1, self.max_rows - 1 - num_rows, -1, dtype=torch.int32)
        for slot, sampling in zip(slots.tolist(), samplings, strict=True):
            self.kernels.write(slot, sampling)
        self.kernels(logits, slots, positions)
        return self.kernels.buffer("token_ids")[:num_rows]

    def check(self, logits: Tensor, samplings: list[SlotSampling], positions: Tensor | None = None) -> None:
        """Equal tokens, statuses, and what is left behind."""
        if positions is None:
            positions = torch.arange(5, 5 + len(samplings), dtype=torch.int32)
        token_ids, status = self.expected(logits, samplings, positions)
        uses = self.kernels.buffer("uses").clone()
        found = self.run(logits, samplings, positions)
        wrong = [
            f"row {row}: {found[row]} instead of {token_ids[row]}, status {status[row]}: {samplings[row]}"
            for row in range(len(samplings))
            if found[row] != (token_ids[row] if status[row] == RowStatus.OK else -status[row])
        ]
        assert not wrong, "\n".join(wrong)
        sampled = self.kernels.buffer("sampled_ids").flip(0)[: len(samplings)]
        assert sampled.tolist() == found.clamp(min=0).tolist()
        for row, sampling in enumerate(samplings):
            if sampling.penalised and found[row] >= 0:
                uses[self.max_rows - 1 - row, found[row]] += 2
        assert torch.equal(self.kernels.buffer("uses"), uses)


def draw_logits(rng: Random, num_rows: int, vocab_size: int) -> Tensor:
    """Rows of many kinds: smooth, full of ties, flat, peaked, huge, with tokens that cannot be."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    for row in range(num_rows):
        match rng.randrange(7):
            case 0:
                logits[row] = (logits[row] * 2).round() / 2
            case 1:
                logits[row] = logits[row].sign()
            case 2:
                logits[row, rng.randrange(vocab_size)] += 20
            case 3:
                logits[row] *= 1e37
            case 4:
                logits[row, torch.rand(vocab_size, generator=generator) < 0.9] = -INF
                logits[row, rng.randrange(vocab_size)] = 0.25
    return logits


def draw_sampling(rng: Random) -> SlotSampling:
    sampling = SlotSampling(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.5, 1e-30]),
        top_k=rng.choice([0, 0, 1, 2, 7, 30, 10**12]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.1, 0.55, 0.93, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.03, 0.4, 1.0]),
        seed=rng.choice([0, -1, 2**63, rng.getrandbits(64)]),
        sequence_index=rng.choice([0, 1, 2**32 - 1]),
        repetition=rng.choice([1.0, 1.0, 1.3, 0.6, 1e-300]),
        presence=rng.choice([0.0, 0.0, 1.5]),
        frequency=rng.choice([0.0, 0.0, -0.5]),
        masked=rng.random() < 0.25,
        biased=rng.random() < 0.25,
    )
    # Forbidding what a tiny repetition penalty made infinite is NaN in the reference.
    return replace(sampling, masked=False, biased=False) if sampling.repetition == 1e-300 else sampling


# Answers


def test_every_feature_and_pair(loader: KernelLoader) -> None:
    chosen = [(), *((name,) for name in FEATURES), *itertools.combinations(FEATURES, 2)]
    settings = [{key: value for name in names for key, value in FEATURES[name].items()} for names in chosen]
    samplings = [SlotSampling(**{"temperature": 1.0, "seed": 77} | setting) for setting in settings]
    samplings += [SlotSampling(**setting, temperature=0.0) for setting in settings[1:9]]
    subject = Subject(loader, 100, len(samplings), block=128)
    subject.check(draw_logits(Random(1), len(samplings), 100), samplings)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 67, 200])
def test_drawn_rows_at_odd_sizes(loader: KernelLoader, vocab_size: int) -> None:
    rng, subject = Random(vocab_size), Subject(loader, vocab_size, 10)
    samplings = [draw_sampling(rng) for _ in range(10)]
    positions = torch.tensor([rng.randrange(-(2**31), 2**31) for _ in range(10)], dtype=torch.int32)
    subject.check(draw_logits(rng, 10, vocab_size), samplings, positions)


def test_rows_of_several_slices_that_are_no_power_of_two(loader: KernelLoader) -> None:
    rng, subject = Random(67), Subject(loader, 67, 6, block=16)
    assert subject.kernels.num_slices == 5
    subject.check(draw_logits(rng, 6, 67), [draw_sampling(rng) for _ in range(6)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_drawn_rows(loader: KernelLoader, seed: int) -> None:
    rng = Random(f"many {seed}")
    vocab_size = rng.choice([3, 31, 128, 300, 1000])
    subject = Subject(loader, vocab_size, 40, block=rng.choice([16, 64, 256]), chunk=rng.choice([16, 64, 1024]))
    for _ in range(2):
        subject.check(draw_logits(rng, 40, vocab_size), [draw_sampling(rng) for _ in range(40)])


def test_among_equals_the_lowest_ids_are_kept_and_drawn(loader: KernelLoader) -> None:
    """A tie that top-p cuts through keeps the lowest ids; top-k keeps all that are tied."""
    logits = torch.full((6, 100), -2.0)
    logits[:, 10::12] = 1.0  # eight equal ones, in two slices
    samplings = [SlotSampling(temperature=1.0, top_k=8, top_p=eighths / 8, seed=eighths) for eighths in (1, 2, 5)]
    samplings += [SlotSampling(temperature=1.0, top_p=0.2, seed=1), SlotSampling(temperature=1.0, top_k=3, seed=6)]
    samplings += [SlotSampling()]
    subject = Subject(loader, 100, 6)
    kept: list[set[int]] = [set() for _ in samplings]
    for position in range(2):
        subject.check(logits, samplings, torch.full((6,), position, dtype=torch.int32))
        for row, token in enumerate(subject.kernels.buffer("token_ids").tolist()):
            kept[row].add(token)
    assert kept[0] == kept[5] == {10}
    assert kept[1] <= {10, 22}
    assert kept[2] <= {10, 22, 34, 46, 58}
    assert kept[3] <= {10, 22, 34}  # of weight 8 + 92 / e³
    assert kept[4] <= set(range(10, 100, 12))


def test_of_the_best_one_no_other_is_drawn(loader: KernelLoader) -> None:
    subject = Subject(loader, 200, 16)
    logits = torch.randn(16, 200, generator=subject.rng) / 100  # a draw among the best of each slice takes any
    subject.check(logits, [SlotSampling(temperature=1.0, top_k=1, seed=seed) for seed in range(16)])
    assert torch.equal(subject.kernels.buffer("token_ids").long(), logits.argmax(1))


def test_weights_add_up_to_the_same_number_in_any_order(loader: KernelLoader) -> None:
    subject = Subject(loader, 200, 8)
    logits = torch.randn(200, generator=subject.rng) * 2
    orders = [torch.randperm(200, generator=subject.rng) for _ in range(8)]
    subject.check(torch.stack([logits[order] for order in orders]), [SlotSampling(temperature=1.0, top_p=0.9)] * 8)
    (total,) = set(subject.kernels.buffer("masses").sum(1).tolist())
    expected = (logits.double() - logits.max()).exp().sum().item() * 2.0**54
    assert total == pytest.approx(expected, rel=1e-6)


def test_rows_that_cannot_be_sampled_say_so_and_disturb_no_other(loader: KernelLoader) -> None:
    subject = Subject(loader, 100, 26)
    logits = torch.randn(26, 100, generator=torch.Generator().manual_seed(3))
    logits[0::13, 70] = math.nan
    logits[1::13, 3] = INF
    logits[2::13] = -INF
    logits[3::13, :99] = -INF
    logits[4::13] = math.nan
    logits[5::13, 64:] = -INF
    logits[5::13, :63] = -INF
    kernels = subject.kernels
    kernels.buffer("mask")[25 - 6] = 0  # nothing is allowed
    kernels.buffer("mask")[25 - 7] = 0
    kernels.buffer("mask")[25 - 7, 2] = 1 << 5  # one token is
    kernels.buffer("bias")[25 - 8] = -INF
    kernels.buffer("bias")[25 - 9] = -INF
    kernels.buffer("bias")[25 - 9, 40] = -3.0
    masked, biased = SlotSampling(masked=True), SlotSampling(biased=True)
    plain = [SlotSampling()] * 6 + [masked, masked, biased, biased] + [SlotSampling(repetition=1e-300)] * 3
    for name in ("mask", "bias"):
        buffer = kernels.buffer(name)
        buffer[:13] = buffer[13:].clone()
    drawn = [replace(each, temperature=0.9, top_k=5, top_p=0.9) for each in plain]
    subject.check(logits, plain + drawn)
    found = kernels.buffer("token_ids").tolist()
    not_finite, nothing_left = -RowStatus.NOT_FINITE, -RowStatus.NOTHING_LEFT
    for row in (0, 13):
        first = [not_finite, not_finite, nothing_left, 99, not_finite, 63, nothing_left, 69, nothing_left, 40]
        assert found[row : row + 10] == first


def test_rows_without_a_slot_are_left_alone(loader: KernelLoader) -> None:
    subject = Subject(loader, 70, 6, num_top=2)
    logits = torch.full((6, 70), math.nan)
    logits[4] = torch.arange(70.0)
    kernels = subject.kernels
    for name in ("token_ids", "sampled_ids", "logprobs", "top_logprobs", "top_ids"):
        kernels.buffer(name).fill_(-77)
    kernels.write(2, SlotSampling(logprobs=True))
    kernels(logits[:5], torch.tensor([-1, -1, -1, -1, 2], dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    assert kernels.buffer("token_ids").tolist() == [-77, -77, -77, -77, 69, -77]
    assert kernels.buffer("sampled_ids").tolist() == [-77, -77, 69, -77, -77, -77]
    for name in ("logprobs", "top_logprobs", "top_ids"):
        assert (kernels.buffer(name)[[0, 1, 2, 3, 5]] == -77).all()
    assert kernels.buffer("top_ids")[4].tolist() == [69, 68]
    kernels(logits[:0], torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))


def test_the_next_step_sees_the_token_counted(loader: KernelLoader) -> None:
    """Without the host: a token that was drawn is penalised in the very next step."""
    subject = Subject(loader, 8, 1)
    subject.kernels.buffer("uses").zero_()
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.0, 0.8, 0.0, 0.0, 0.0]])
    sampling = [SlotSampling(presence=0.15, frequency=0.1)]
    seen = []
    for _ in range(4):
        subject.check(logits, sampling)
        seen.append(int(subject.kernels.buffer("token_ids")[0]))
    assert seen == [1, 2, 4, 1]


def test_answers_do_not_depend_on_how_rows_are_cut(loader: KernelLoader) -> None:
    rng = Random("cuts")
    logits, samplings = draw_logits(rng, 5, 90), [draw_sampling(rng) for _ in range(5)]
    for block, chunk in [(32, 16), (128, 64)]:
        subject = Subject(loader, 90, 5, block=block, chunk=chunk)
        subject.check(logits, samplings)


@pytest.mark.parametrize("without", ["penalties", "mask", "bias"])
def test_what_kernels_leave_out_cannot_be_set(loader: KernelLoader, without: str) -> None:
    specs = sampling_specs(10, **{without: False})
    kernels = SamplingKernel(specs, loader.load, max_rows=2, max_slots=2, device=CPU)
    asked = {"penalties": {"presence": 1.0}, "mask": {"masked": True}, "bias": {"biased": True}}[without]
    with pytest.raises(ValueError, match="were made without"):
        kernels.write(0, SlotSampling(**asked))
    with pytest.raises(ValueError, match="were made without logprobs"):
        kernels.write(0, SlotSampling(logprobs=True))
    logits = torch.arange(20.0).view(2, 10)
    kernels(logits, torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert kernels.buffer("token_ids").tolist() == [9, 9]
    with pytest.raises(ValueError, match="made for at most 2 x 10"):
        kernels(logits[:, :9], torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="there are 10 tokens"):
        sampling_specs(10, num_top=11)


def test_slots_beyond_32_bits(loader: KernelLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of more than 2³¹ numbers, of which only the last slot's are ever touched, so that no more is allocated."""
    vocab_size = 2**18
    slot = 2**31 // vocab_size
    # One slice takes the interpreter the least time.
    block, chunk = (vocab_size, 4) if DEVICE == "cpu" else (2048, 1024)
    specs = sampling_specs(vocab_size, mask=False, bias=False, block=block, chunk=chunk)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", torch.empty)
        kernels = SamplingKernel(specs, loader.load, max_rows=1, max_slots=slot + 1, device=CPU)
    kernels.write(slot, SlotSampling(presence=3.0))
    kernels.buffer("uses")[slot] = 0
    kernels.buffer("uses")[slot, 200_000] = 4
    logits = torch.zeros(1, vocab_size)
    logits[0, 200_000], logits[0, 70_000] = 5.0, 4.0
    kernels(logits, torch.tensor([slot], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert kernels.buffer("token_ids").tolist() == [70_000]
    assert kernels.buffer("uses")[slot, [70_000, 200_000]].tolist() == [2, 4]


# Log-probabilities


@pytest.mark.parametrize("num_top", [0, 4])
def test_log_probabilities(loader: KernelLoader, num_top: int) -> None:
    rng = Random(num_top)
    subject = Subject(loader, 100, 7, num_top=num_top)
    logits = draw_logits(rng, 7, 100)
    logits[0] = torch.where(torch.arange(100) % 9 == 0, 2.0, -INF)  # equals, and few of them
    logits[1, 2:] = -INF
    samplings = [replace(draw_sampling(rng), temperature=1.0, logprobs=True) for _ in range(7)]
    subject.check(logits, samplings)
    token_ids = subject.kernels.buffer("token_ids").long()
    is_ok = token_ids >= 0
    actual, top, top_ids = log_probabilities(logits[is_ok], token_ids[is_ok], num_top)
    torch.testing.assert_close(subject.kernels.buffer("logprobs")[is_ok], actual, rtol=1e-5, atol=1e-5)
    if num_top:
        torch.testing.assert_close(subject.kernels.buffer("top_logprobs")[is_ok], top, rtol=1e-5, atol=1e-5)
        assert torch.equal(subject.kernels.buffer("top_ids")[is_ok].long(), top_ids)


@pytest.mark.interpreter
def test_a_threshold_is_found_in_four_passes_over_the_list(
    loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass adds to two bins for each piece of the list. Where top-p cuts through equals, one pass more for each
    eight bits of ids finds the last that is kept."""
    from triton.runtime.interpreter import interpreter_builder

    num_additions, add = 0, interpreter_builder.create_atomic_rmw

    def counted(*arguments: Any) -> Any:
        nonlocal num_additions
        num_additions += 1
        return add(*arguments)

    monkeypatch.setattr(interpreter_builder, "create_atomic_rmw", counted)
    subject, smooth = Subject(loader, 300, 1), torch.linspace(0, 3, 300)
    num_slices, num_pieces = 5, 3
    for logits, sampling, num_passes in (
        (smooth, SlotSampling(temperature=1.0, top_k=200), 4),
        (smooth, SlotSampling(temperature=1.0, top_p=0.99), 4),
        (smooth, SlotSampling(temperature=1.0, top_k=200, top_p=0.5), 8),
        (torch.zeros(300), SlotSampling(temperature=1.0, top_p=0.5), 4 + 2),
        (smooth, SlotSampling(temperature=1.0), 0),
    ):
        num_additions = 0
        subject.check(logits.view(1, 300), [sampling], torch.zeros(1, dtype=torch.int32))
        listing = num_slices * bool(num_passes)
        size = int(subject.kernels.buffer("list_counts")[0])
        pieces = -(-size // 128)
        assert num_additions == listing + 2 * num_passes * pieces, sampling
        assert pieces == num_pieces or not num_passes


# Builds


@pytest.mark.slow
def test_kernels_are_built_ahead_of_time(tmp_path: Path) -> None:
    check_builds("sm_90", 128256, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRITON_ARCHES)
@pytest.mark.parametrize("vocab_size", [32000, 151936, 262144])
def test_kernels_are_built_for_every_architecture(tmp_path: Path, arch: str, vocab_size: int) -> None:
    check_builds(arch, vocab_size, tmp_path)


def check_builds(arch: str, vocab_size: int, directory: Path) -> None:
    loader = KernelLoader(TritonBuilder(arch), cache=KernelCache(directory), num_jobs=1)
    specs = sampling_specs(vocab_size, num_top=21)
    for entry in loader.build([specs.scan, specs.draw, specs.choose]):
        assert entry.report["spill_bytes"] == 0, entry.source.name
        assert entry.report["shared_bytes"] <= entry.report["shared_limit_bytes"]
        assert entry.report["occupancy"] > 0.1
