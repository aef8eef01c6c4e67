"""Measures sampling: the time of the three launches beside reading the logits once at the machine's copy bandwidth.

First a numeric gate: rows drawn in every way must get the torch reference's tokens, up to a perturbed margin of 1e-3.
Then batches of one kind each are timed, from greedy to all settings at once, on logits that fall off as a language
model's do. `torch.argmax` of the same logits is measured for comparison.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.gates import gate, run_repeatedly
from benchmarks.gpu.measuring import Bench, Row, Rows
from fastgen.compile.ops.sampling.reference import Draws, gumbel_noise, log_weights
from fastgen.compile.ops.sampling.triton import SamplingKernel, SlotSampling, sampling_specs

ROWS, VOCABULARIES = (1, 32, 256), (32000, 128256)
MARGIN = 1e-3  # of a perturbed logit, from which on tokens must be equal
KINDS = {
    "greedy": SlotSampling(),
    "temperature": SlotSampling(temperature=0.8),
    "min-p": SlotSampling(temperature=0.8, min_p=0.05),
    "top-k": SlotSampling(temperature=0.8, top_k=50),
    "top-p": SlotSampling(temperature=0.8, top_p=0.9),
    "top-k, top-p, penalties": SlotSampling(temperature=0.8, top_k=50, top_p=0.9, repetition=1.1, presence=0.2),
    "everything": SlotSampling(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, repetition=1.1, masked=True, biased=True, logprobs=True
    ),
}


class Subject:
    """Holds kernels for ``num_rows`` rows, one for each slot, and logits that fall off by a power of a token's rank."""

    def __init__(self, vocab_size: int, num_rows: int, bench: Bench):
        loader, where = bench.loader, bench.where
        specs = sampling_specs(vocab_size, num_top=min(21, vocab_size))
        loader.build([specs.scan, specs.draw, specs.choose])
        self.kernels = SamplingKernel(specs, loader.load, max_rows=num_rows, max_slots=num_rows, device=where)
        self.kernels.buffer("mask").fill_(-1)  # all are allowed
        ranks = torch.arange(1, vocab_size + 1, dtype=torch.float32, device=where)
        falling = -1.3 * ranks.log() + 12
        noise = torch.randn(num_rows, vocab_size, device=where)
        self.logits = torch.stack([falling[torch.randperm(vocab_size, device=where)] for _ in range(num_rows)]) + noise
        self.slots = torch.arange(num_rows, dtype=torch.int32, device=where)
        self.positions = self.slots + 100

    def write(self, samplings: list[SlotSampling]) -> None:
        for slot, sampling in enumerate(samplings):
            self.kernels.write(slot, replace(sampling, seed=slot))

    def __call__(self) -> Tensor:
        self.kernels(self.logits, self.slots, self.positions)
        return self.kernels.buffer("token_ids")

    def largest_margin(self, samplings: list[SlotSampling], runs: int) -> float:
        """Returns by how much the reference's token beats another that the kernels chose; 0 where all are equal."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(each, name) for each in samplings], dtype=dtype, device=self.logits.device)

        self.write(samplings)
        run_repeatedly("sampling", self, runs, [self.kernels.buffer("token_ids")])
        found = self.kernels.buffer("token_ids").long()
        draws = Draws(
            column("temperature", torch.float64).clamp(min=1e-6),  # in place of greedy rows' 0: they need no noise
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            self.slots.long(),
            self.positions.long(),
            self.slots.long() * 0,
        )
        scores = log_weights(self.logits, draws)
        noise = gumbel_noise(draws.seeds, draws.positions, draws.sequence_indices, self.logits.shape[1])
        scores += noise * column("temperature", torch.float64).gt(0).unsqueeze(1)
        margins = scores.amax(1) - scores.gather(1, found.clamp(min=0).unsqueeze(1)).squeeze(1)
        return float(margins.where(found >= 0, torch.inf).max())


def check(vocab_size: int, num_rows: int, bench: Bench) -> float:
    """Returns the largest margin by which a token differs from the reference's. Raises where it is too large."""
    torch.manual_seed(1)
    plain = [each for each in KINDS.values() if not each.penalised]
    samplings = [plain[row % len(plain)] for row in range(num_rows)]
    margin = Subject(vocab_size, num_rows, bench).largest_margin(samplings, bench.gate_runs)
    return gate("the margin of a token", margin, MARGIN)


def measure(bench: Bench) -> Rows:
    gated, vocabularies, rows = ((70, 5), (70,), (3,)) if bench.toy else ((32000, 64), VOCABULARIES, ROWS)
    yield bench.attempt("numeric gate", lambda: {"margin": check(*gated, bench)})
    for vocab_size in vocabularies:
        for num_rows in rows:
            subject = Subject(vocab_size, num_rows, bench)
            for kind in KINDS:
                case = f"{kind}, {num_rows} × {vocab_size}"
                yield bench.attempt(case, partial(measure_case, subject, kind, bench))


def measure_case(subject: Subject, kind: str, bench: Bench) -> Row:
    subject.write([KINDS[kind]] * len(subject.logits))
    time = bench.seconds(subject)
    return {
        "seconds": time,
        "fraction_of_copy": subject.logits.nbytes / bench.limits.copy_bytes_per_s / time,
        "argmax_seconds": bench.seconds(lambda: subject.logits.argmax(1)),
    }
