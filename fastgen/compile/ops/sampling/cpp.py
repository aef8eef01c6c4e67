"""Sampling on a CPU: one C++ kernel of :mod:`fastgen.compile.ops.sampling.reference`.

Penalties and biases are short lists of tokens, and masks are bits, so a row pays only for its own features: a greedy
row is a single read of its logits. Filters find their thresholds without sorting, and noise is drawn only for tokens
that could still win.

These agree with the reference exactly: adjusted and tempered scores, the tokens that top-k keeps, every random bit, the
order of steps, and the lowest id among equals. These may differ in fp32's last digits, since the order of sums or the
exponential or logarithm is another: the weights that top-p sums, min-p's threshold (compared as a logarithm), noise and
log-probabilities. So the token is the same where the decision had a margin of about 1e-5. A row's result does not
depend on the other rows or on the number of threads, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.sampling.reference import RowStatus
from fastgen.compile.spec import Argument, KernelSpec

_FP32 = torch.finfo(torch.float32)
_CPU = torch.device("cpu")
_NO_MASKS = torch.empty(0, dtype=torch.int32)
_SLICE = 1 << 15
_MAX_SLICES = 64
_MOST_LANES = 16
_NUM_REALS, _NUM_INTEGERS = 6, 11  # columns, in the order of the template's enumerations
_POSITION = 2  # among the integers

# Distinct token ids, and for each twice the number of times it was generated, plus 1 where it is in the prompt.
Uses = tuple[NDArray[np.int32], NDArray[np.int32]]
# Distinct token ids, and the number added to each score; −inf forbids the token.
Biases = tuple[NDArray[np.int32], NDArray[np.float32]]
# ``[⌈V/32⌉]``: bit ``i % 32`` of word ``i // 32`` is 0 where token ``i`` is forbidden. Bits after the last token's are
# 0.
Mask = NDArray[np.int32]
NO_USES: Uses = (np.empty(0, np.int32), np.empty(0, np.int32))
NO_BIASES: Biases = (np.empty(0, np.int32), np.empty(0, np.float32))


def sampling_spec(arch: str, *, slice_size: int = _SLICE, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`SamplingKernel`, for any vocabulary. Threads may share a row by slices of
    ``slice_size`` tokens, a multiple of 1024.
    """
    if slice_size % 1024:
        raise ValueError(f"slice_size={slice_size}: expected a multiple of 1024")
    failures = {"not_finite": int(RowStatus.NOT_FINITE), "nothing_left": int(RowStatus.NOTHING_LEFT)}
    return KernelSpec(
        "sampling",
        "cpp",
        {"slice": slice_size, "max_slices": _MAX_SLICES, "arch": arch, **failures},
        (
            Argument("logits", "fp32", "in"),
            Argument("reals", "fp32", "in"),
            Argument("integers", "i64", "in"),
            Argument("use_ids", "i32", "in"),
            Argument("uses", "i32", "in"),
            Argument("bias_ids", "i32", "in"),
            Argument("biases", "fp32", "in"),
            Argument("masks", "i32", "in"),
            Argument("token_ids", "i64", "out"),
            Argument("logprobs", "fp32", "out"),
            Argument("top_ids", "i64", "out"),
            Argument("workspaces", "fp32", "out"),
            *(
                Argument(name, "i64", "scalar")
                for name in ("num_rows", "vocab_size", "num_workspaces", "workspace_size")
            ),
        ),
        needed_by=needed_by,
    )


@dataclass(frozen=True)
class RowSampling:
    """A row's sampling parameters; see :class:`~fastgen.compile.ops.sampling.reference.Draws` and ``Adjustments``.

    ``seed`` is any integer, of which 64 bits count; ``top_k`` 0 keeps all. Unless ``num_top`` is ``None``, the
    log-probabilities of the row's token and of the ``num_top`` likeliest are returned.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_top: int | None = None

    @cached_property
    def reals(self) -> tuple[float, ...]:
        """Returns the kernel's columns, clamped to fp32 like the reference's."""
        return (
            min(max(self.temperature, _FP32.tiny), _FP32.max) if self.temperature > 0 else 0.0,
            1 - self.top_p,
            math.log(self.min_p) if self.min_p > 0 else -math.inf,
            min(max(self.repetition, _FP32.tiny), _FP32.max),
            self.presence,
            self.frequency,
        )

    @cached_property
    def seed_bits(self) -> int:
        """Returns the seed modulo 2**64, as the signed number with the same bits."""
        return (self.seed + 2**63) % 2**64 - 2**63


class SampledRow(NamedTuple):
    """A row of logits: its parameters and position, and which tokens are penalised, biased and allowed."""

    sampling: RowSampling
    position: int
    uses: Uses = NO_USES
    biases: Biases = NO_BIASES
    mask: Mask | None = None


class RowLogprobs(NamedTuple):
    """Log-probabilities under a row's raw logits: the token's, then those of the likeliest in order, with ids."""

    values: list[float]
    token_ids: list[int]


def _workspace_numel(vocab_size: int, num_slices: int) -> int:
    """Returns the numbers of a workspace: adjusted scores, two lists for filters, padded slices, and maxima
    of columns.
    """
    return 3 * (vocab_size + 4 * _MOST_LANES * num_slices) + vocab_size // 64 + _MOST_LANES


def _repeated(row: Tensor, num_rows: int, device: torch.device) -> Tensor:
    """Returns ``num_rows`` copies of ``row``; on ``meta`` without memory, and without importing torch's compiler."""
    return torch.empty(num_rows, len(row), dtype=row.dtype, device=device).copy_(row)


class SamplingKernel:
    """Samples up to ``max_rows`` rows of ``vocab_size`` logits by a kernel of :func:`sampling_spec`.

    Up to ``max_threads`` of the pool take part; each has a workspace of ``12 · vocab_size`` bytes and a little more.
    """

    def __init__(
        self,
        kernel: Kernel,
        vocab_size: int,
        *,
        max_rows: int,
        max_threads: int,
        device: torch.device = _CPU,
    ):
        slice_size = kernel.spec.parameters["slice"]
        assert isinstance(slice_size, int)
        num_slices = -(-vocab_size // slice_size)
        if num_slices > _MAX_SLICES:
            raise ValueError(f"vocab_size={vocab_size}: the kernel takes up to {_MAX_SLICES * slice_size}")
        self.vocab_size, self.max_rows = vocab_size, max_rows
        self._kernel = kernel
        self._workspaces = torch.empty(max_threads, _workspace_numel(vocab_size, num_slices), device=device)
        # ``[R]``: the last sampled tokens, or ``-status``.
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._found = memoryview(b"") if device.type == "meta" else self.token_ids.numpy().data
        greedy = RowSampling()
        self._greedy = (
            _repeated(torch.tensor(greedy.reals), max_rows, device),
            _repeated(torch.tensor(_integers(SampledRow(greedy, 0), 0, 0, 0, 0)), max_rows, device),
            *_end_to_end([], NO_USES),
            *_end_to_end([], NO_BIASES),
            _NO_MASKS,
        )
        self._no_logprobs = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self._held_reals, self._held_integers = self._greedy[0].clone(), self._greedy[1].clone()

    def tensors(self) -> list[Tensor]:
        """Returns the workspaces, and rows of parameters and tokens."""
        return [self._workspaces, self.token_ids, *self._greedy, self._held_reals, self._held_integers]

    def greedy(self, logits: Tensor) -> list[int]:
        """Returns the likeliest token of each row of ``logits [R, V]`` fp32, or ``-status`` of its
        :class:`RowStatus`.
        """
        self._launch(logits, *self._greedy, *self._no_logprobs)
        return self.chosen(len(logits))

    def __call__(self, logits: Tensor, rows: Sequence[SampledRow]) -> tuple[list[int], list[RowLogprobs | None]]:
        """Returns the token of each row of ``logits [R, V]`` fp32, or ``-status`` where its :class:`RowStatus` is not
        OK; and log-probabilities of rows with a ``num_top`` and a token. Ids in ``rows`` are below the vocabulary size.
        """
        integers, first_use, first_bias, first_logprob = [], 0, 0, 0
        masks: list[Mask] = []
        for row in rows:
            first_mask = len(masks) * -(-self.vocab_size // 32)
            integers.append(_integers(row, first_use, first_bias, first_mask, first_logprob))
            if row.mask is not None:
                masks.append(row.mask)
            first_use += len(row.uses[0])
            first_bias += len(row.biases[0])
            first_logprob += 0 if row.sampling.num_top is None else 1 + row.sampling.num_top
        logprobs = self._no_logprobs
        if first_logprob:
            logprobs = torch.empty(first_logprob), torch.empty(first_logprob, dtype=torch.int64)
        self._launch(
            logits,
            torch.from_numpy(np.array([row.sampling.reals for row in rows], np.float32)),
            torch.from_numpy(np.array(integers, np.int64)),
            *_end_to_end([row.uses for row in rows if row.uses is not NO_USES], NO_USES),
            *_end_to_end([row.biases for row in rows if row.biases is not NO_BIASES], NO_BIASES),
            torch.from_numpy(np.concatenate(masks)) if masks else _NO_MASKS,
            *logprobs,
        )
        token_ids = self.chosen(len(rows))
        found: list[RowLogprobs | None] = [None] * len(rows)
        if first_logprob:
            values, top_ids = (each.tolist() for each in logprobs)
            end = 0
            for index, row in enumerate(rows):
                if row.sampling.num_top is not None:
                    begin, end = end, end + 1 + row.sampling.num_top
                    if token_ids[index] >= 0:
                        found[index] = RowLogprobs(values[begin:end], top_ids[begin:end])
        return token_ids, found

    def hold(self, rows: Sequence[SampledRow]) -> None:
        """Keeps ``rows``, without uses, biases, masks and log-probabilities, for :meth:`sample_held`."""
        assert all(each.mask is None and each.sampling.num_top is None for each in rows)
        assert not any(len(each.uses[0]) + len(each.biases[0]) for each in rows)
        self._held_reals[: len(rows)] = torch.tensor([row.sampling.reals for row in rows])
        self._held_integers[: len(rows)] = torch.tensor([_integers(row, 0, 0, 0, 0) for row in rows])

    def held_positions(self, num_rows: int) -> Tensor:
        """Returns the positions ``[R]`` i64 of the first held rows, as a view that may be written."""
        return self._held_integers[:num_rows, _POSITION]

    def sample_held(self, logits: Tensor) -> None:
        """Samples each row of ``logits [R, V]`` by the held rows, into :attr:`token_ids`. May be recorded."""
        self._launch(logits, self._held_reals, self._held_integers, *self._greedy[2:], *self._no_logprobs)

    def _launch(self, logits: Tensor, *given: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        if vocab_size != self.vocab_size or num_rows > self.max_rows or not logits.is_contiguous():
            made_for = f"made for at most {self.max_rows} x {self.vocab_size}, contiguous"
            raise ValueError(f"logits {tuple(logits.shape)}, strides {logits.stride()}: {made_for}")
        *settings, logprobs, top_ids = given
        num_workspaces, workspace_size = self._workspaces.shape
        outputs = (self.token_ids, logprobs, top_ids, self._workspaces)
        self._kernel((), logits, *settings, *outputs, num_rows, vocab_size, num_workspaces, workspace_size)

    def chosen(self, num_rows: int) -> list[int]:
        """Returns the tokens of the first rows of the last launch, or ``-status``."""
        tokens: list[int] = self._found[:num_rows].tolist()
        return tokens


def _integers(row: SampledRow, first_use: int, first_bias: int, first_mask: int, first_logprob: int) -> tuple[int, ...]:
    """Returns a row's columns for the kernel."""
    sampling = row.sampling
    return (
        min(sampling.top_k, 2**31),
        sampling.seed_bits,
        row.position,
        sampling.sequence_index,
        first_use,
        len(row.uses[0]),
        first_bias,
        len(row.biases[0]),
        -1 if row.mask is None else first_mask,
        -1 if sampling.num_top is None else sampling.num_top,
        first_logprob,
    )


def _end_to_end(lists: Sequence[Uses] | Sequence[Biases], none: Uses | Biases) -> tuple[Tensor, ...]:
    columns = zip(*lists, strict=True) if lists else ((each,) for each in none)
    return tuple(torch.from_numpy(np.concatenate(column)) for column in columns)
