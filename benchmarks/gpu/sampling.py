"""Sampling on a GPU: time of the three launches, beside reading the logits once at this machine's copy bandwidth.

    python benchmarks/gpu/sampling.py --json sampling.json

First a numeric gate: rows drawn in every way must get the torch reference's tokens, up to a perturbed margin of 1e-3,
else nothing is measured. Then batches of one kind each, greedy to everything at once, on logits that fall off as a
language model's do; `torch.argmax` of the same logits stands beside them. Without a GPU, `--toy` with
TRITON_INTERPRET=1 runs the gate alone, at toy sizes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from attention import machine_limits, seconds
from elementwise import write_results
from torch import Tensor

from fastgen.compile import device as devices
from fastgen.compile.build_triton import TritonBuilder, triton_arch
from fastgen.compile.loader import KernelLoader
from fastgen.compile.ops.sampling import Draws, gumbel_noise, log_weights
from fastgen.compile.ops.sampling_triton import SamplingKernels, SeatSampling, sampling_specs

MARGIN = 1e-3  # of a perturbed logit, from which on tokens must be equal
KINDS = {
    "greedy": SeatSampling(),
    "temperature": SeatSampling(temperature=0.8),
    "min-p": SeatSampling(temperature=0.8, min_p=0.05),
    "top-k": SeatSampling(temperature=0.8, top_k=50),
    "top-p": SeatSampling(temperature=0.8, top_p=0.9),
    "top-k, top-p, penalties": SeatSampling(temperature=0.8, top_k=50, top_p=0.9, repetition=1.1, presence=0.2),
    "everything": SeatSampling(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, repetition=1.1, masked=True, biased=True, logprobs=True
    ),
}


class Subject:
    """Kernels for ``num_rows`` rows, one a seat, and logits that fall off by a power of a token's rank."""

    def __init__(self, vocab_size: int, num_rows: int, loader: KernelLoader, where: torch.device):
        specs = sampling_specs(vocab_size, num_top=min(21, vocab_size))
        loader.build([specs.scan, specs.draw, specs.choose])
        self.kernels = SamplingKernels(specs, loader.load, max_rows=num_rows, max_seats=num_rows, device=where)
        self.kernels.buffer("mask").fill_(-1)  # all are allowed
        ranks = torch.arange(1, vocab_size + 1, dtype=torch.float32, device=where)
        falling = -1.3 * ranks.log() + 12
        noise = torch.randn(num_rows, vocab_size, device=where)
        self.logits = torch.stack([falling[torch.randperm(vocab_size, device=where)] for _ in range(num_rows)]) + noise
        self.seats = torch.arange(num_rows, dtype=torch.int32, device=where)
        self.positions = self.seats + 100

    def write(self, samplings: list[SeatSampling]) -> None:
        for seat, sampling in enumerate(samplings):
            self.kernels.write(seat, replace(sampling, seed=seat))

    def __call__(self) -> Tensor:
        self.kernels(self.logits, self.seats, self.positions)
        return self.kernels.buffer("token_ids")

    def largest_margin(self, samplings: list[SeatSampling]) -> float:
        """By how much the reference's token beats another that the kernels chose: 0 where all are equal."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(each, name) for each in samplings], dtype=dtype, device=self.logits.device)

        self.write(samplings)
        found = self().long()
        draws = Draws(
            column("temperature", torch.float64).clamp(min=1e-6),  # in place of greedy rows' 0: they need no noise
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            self.seats.long(),
            self.positions.long(),
            self.seats.long() * 0,
        )
        scores = log_weights(self.logits, draws)
        noise = gumbel_noise(draws.seeds, draws.positions, draws.sequence_indices, self.logits.shape[1])
        scores += noise * column("temperature", torch.float64).gt(0).unsqueeze(1)
        margins = scores.amax(1) - scores.gather(1, found.clamp(min=0).unsqueeze(1)).squeeze(1)
        return float(margins.where(found >= 0, torch.inf).max())


def gate(vocab_size: int, num_rows: int, loader: KernelLoader, where: torch.device) -> float:
    """The largest margin by which a token differs from the reference's. Raises where it is too large."""
    torch.manual_seed(1)
    plain = [each for each in KINDS.values() if not each.penalised]
    samplings = [plain[row % len(plain)] for row in range(num_rows)]
    margin = Subject(vocab_size, num_rows, loader, where).largest_margin(samplings)
    if not margin < MARGIN:
        raise SystemExit(f"a token differs from the torch reference's by a margin of {margin:.1e}: nothing is measured")
    return margin


def measure(subject: Subject, kind: str, copy_rate: float) -> dict[str, Any]:
    num_rows, vocab_size = subject.logits.shape
    subject.write([KINDS[kind]] * num_rows)
    time = seconds(subject)
    return {
        "kind": kind,
        "sampling": asdict(KINDS[kind]),
        "num_rows": num_rows,
        "vocab_size": vocab_size,
        "seconds": time,
        "argmax_seconds": seconds(lambda: subject.logits.argmax(1)),
        "fraction_of_copy": subject.logits.nbytes / copy_rate / time,
    }


def describe(row: dict[str, Any]) -> str:
    return (
        "{kind:24} {num_rows:4} × {vocab_size:6}: {0:7.1f} µs, {fraction_of_copy:.2f} of reading the logits once; "
        "torch argmax {1:.1f} µs"
    ).format(row["seconds"] * 1e6, row["argmax_seconds"] * 1e6, **row)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256], help="rows of a step")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[32000, 128256], help="their sizes")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--toy", action="store_true", help="only the numeric gate, interpreted on a CPU")
    options = parser.parse_args(arguments)
    if options.toy:
        margin = gate(300, 10, KernelLoader(TritonBuilder("interpret")), torch.device("cpu"))
        print(f"numeric gate passed: tokens differ by a margin of {margin:.1e} at most")
        return 0
    if not torch.cuda.is_available():
        print(
            "no GPU here: sampling is measured on a machine that has one; --toy runs the numeric gate", file=sys.stderr
        )
        return 2
    device = devices.current("cuda")
    loader = KernelLoader(TritonBuilder(triton_arch(device)))
    margin, limits = gate(32000, 64, loader, device.torch_device), machine_limits()
    print(f"{device.name}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s; gate passed at {margin:.1e}")
    cases = []
    for vocab_size in options.vocabularies:
        for num_rows in options.rows:
            subject = Subject(vocab_size, num_rows, loader, device.torch_device)
            for kind in KINDS:
                cases.append(measure(subject, kind, limits["copy_bytes_per_s"]))
                print(describe(cases[-1]), flush=True)
    if options.json:
        write_results(options.json, device, limits=limits, gate_margin=margin, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
