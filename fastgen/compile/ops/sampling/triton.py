"""Sampling on a GPU: the reference of :mod:`fastgen.compile.ops.sampling.reference` in three launches, without the
host.

Each row of a step has its own sampling parameters, so greedy and filtered rows can be mixed. The parameters are in
static buffers on the device, with a row for each of ``S`` *slots*. Two rows of logits with different penalties, as with
drafts, have two slots.

A row of logits is cut into slices, one program each. ``scan`` finds peaks and non-finite numbers. ``draw`` adds Gumbel
noise where neither top-k nor top-p filters; else it lists the tokens that may be kept. ``choose`` decides with one
program a row: it finds the filters' thresholds in four passes over the list each, by eight bits of scores at a time,
and sums the weights of tokens as integers. So no sort is needed, and results do not depend on the order in which
programs run. The noise is the reference's, up to the rounding of a logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.device import to_device
from fastgen.compile.ops.sampling.reference import RowStatus
from fastgen.compile.spec import MAX_REGISTERS, Argument, KernelSpec, Value, power_of_2

REALS = ("temperature", "tail_p", "min_p", "repetition", "presence", "frequency")
INTEGERS = ("top_k", "sequence_index", "adjusts", "logprobs")
_FP32 = torch.finfo(torch.float32)
_BINS = 256  # of a pass over a row's list
_PENALISED, _MASKED, _BIASED = 1, 2, 4  # bits of `adjusts`


@dataclass(frozen=True)
class SlotSampling:
    """A slot's parameters; see :class:`~fastgen.compile.ops.sampling.reference.Draws` and ``Adjustments``.

    With ``masked`` the slot's ``mask`` applies, with ``biased`` its ``bias``, and its ``uses`` where a penalty is not
    neutral. ``seed`` is any integer, of which 64 bits count; ``top_k`` 0 keeps all.
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
    masked: bool = False
    biased: bool = False
    logprobs: bool = False

    @property
    def penalised(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    def reals(self) -> list[float]:
        """Returns the numbers of :data:`REALS`, in order, clamped to fp32 like the reference's."""
        temperature = min(max(self.temperature, _FP32.tiny), _FP32.max) if self.temperature > 0 else 0.0
        repetition = min(max(self.repetition, _FP32.tiny), _FP32.max)
        return [temperature, 1 - self.top_p, self.min_p, repetition, self.presence, self.frequency]

    def integers(self, vocab_size: int) -> list[int]:
        """Returns the numbers of :data:`INTEGERS`, in order."""
        adjusts = _PENALISED * self.penalised | _MASKED * self.masked | _BIASED * self.biased
        top_k = self.top_k if 0 < self.top_k < vocab_size else 0
        return [top_k, _signed(self.sequence_index, 32), adjusts, int(self.logprobs)]


class SamplingSpecs(NamedTuple):
    """The kernels of sampling, in launch order."""

    scan: KernelSpec
    draw: KernelSpec
    choose: KernelSpec

    @property
    def vocab_size(self) -> int:
        return _number(self.scan, "V")


def sampling_specs(
    vocab_size: int,
    *,
    num_top: int | None = None,
    penalties: bool = True,
    mask: bool = True,
    bias: bool = True,
    block: int = 2048,
    chunk: int = 1024,
    needed_by: tuple[str, ...] = (),
) -> SamplingSpecs:
    """Returns the kernels for a vocabulary, for :class:`SamplingKernel`.

    ``num_top`` is how many of the likeliest tokens' log-probabilities are computed for slots with ``logprobs``; with 0
    only those of the sampled tokens, with ``None`` none. Slots can use ``penalties``, ``mask`` and ``bias`` only where
    these are set. A slice has ``block`` tokens; ``chunk`` tokens of a list are read at once: powers of 2, 4 at least.
    With twice the defaults kernels spill registers on some devices, whatever the number of warps. Raises
    ``ValueError`` for a ``num_top`` beyond the vocabulary.
    """
    if num_top is not None and not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top={num_top}: there are {vocab_size} tokens")
    block = max(4, min(block, power_of_2(vocab_size)))
    common: dict[str, Value] = {"V": vocab_size, "block": block, "slices": -(-vocab_size // block)}
    adjusting: dict[str, Value] = {"penalties": penalties, "mask": mask, "bias": bias}
    logging: dict[str, Value] = {"logprobs": num_top is not None, "num_top": num_top or None}
    failures: dict[str, Value] = {"not_finite": int(RowStatus.NOT_FINITE), "nothing_left": int(RowStatus.NOTHING_LEFT)}
    adjustments = [("uses", "i32")] * penalties + [("mask", "i32")] * mask + [("bias", "fp32")] * bias
    settings = _read(("slots", "i32"), ("reals", "fp32"), ("integers", "i32"))
    drawn = _read(("positions", "i32"), ("seeds", "i64"))
    raw_parts = [("raw_peaks", "fp32"), ("raw_sums", "fp32")] * (num_top is not None)
    raw_parts += [("slice_top", "i32"), ("slice_top_ids", "i32")] * bool(num_top)
    found = [("peaks", "fp32"), ("states", "i32")]
    filtered = [("masses", "i64"), ("list_keys", "i32"), ("list_ids", "i32")]
    results = [("logprobs", "fp32")] * (num_top is not None)
    results += [("top_logprobs", "fp32"), ("top_ids", "i32")] * bool(num_top)
    logits = _read(("logits", "fp32"))
    # Products and sums are rounded separately, like the reference's.
    exact: dict[str, Value] = {"enable_fp_fusion": False}

    def spec(
        op: str, parameters: dict[str, Value], at_once: int, *arguments: list[Argument], **more: Value
    ) -> KernelSpec:
        flat = tuple(each for group in arguments for each in group)
        options = exact | {"num_warps": max(1, at_once // 512)} | more
        return KernelSpec(op, "triton", {**common, **parameters}, flat, options, needed_by=needed_by)

    return SamplingSpecs(
        scan=spec(
            "sampling_scan",
            {**adjusting, **logging},
            block,
            [*logits, *settings, *_read(*adjustments)],
            _written(*found, ("peak_ids", "i32"), ("sums", "fp32"), *raw_parts, ("list_counts", "i32")),
        ),
        draw=spec(
            "sampling_draw",
            adjusting,
            block,
            [*logits, *settings, *drawn, *_read(*adjustments), *_read(*found, ("sums", "fp32"))],
            _written(("drawn", "fp32"), ("drawn_ids", "i32"), *filtered, ("list_counts", "i32")),
        ),
        choose=spec(
            "sampling_choose",
            {"chunk": chunk, "penalties": penalties, **logging, **failures},
            chunk,
            [*(logits if raw_parts else []), *settings, *drawn],
            _read(*found, ("peak_ids", "i32"), ("drawn", "fp32"), ("drawn_ids", "i32"), *filtered),
            _read(("list_counts", "i32"), *raw_parts),
            _written(("bin_counts", "i32"), ("bin_masses", "i64")),
            _written(*adjustments[:penalties], ("token_ids", "i32"), ("sampled_ids", "i32"), *results),
            maxnreg=MAX_REGISTERS,  # there is one program a row
        ),
    )


class SamplingKernel:
    """Samples up to ``max_rows`` rows by the parameters of ``max_slots`` slots.

    Callers write to its buffers: to ``reals [S, 6]``, ``integers [S, 4]`` and ``seeds [S]`` by :meth:`write`;
    where the specs have them, to ``uses [S, V]`` i32 (twice how often a token was generated, plus 1 where it is in the
    prompt), ``mask [S, ⌈V/32⌉]`` i32 (bit ``i % 32`` of word ``i // 32``: token ``i`` is allowed) and ``bias [S, V]``
    fp32. It writes ``token_ids [R]`` i32, ``sampled_ids [S]`` i32 (or a given tensor), and for slots with ``logprobs``,
    of the raw logits, ``logprobs [R]``, ``top_logprobs [R, num_top]`` fp32 in falling order and ``top_ids`` i32.

    It also holds lists of ``8 · R · V`` bytes, the most that filters need.
    """

    def __init__(
        self,
        specs: SamplingSpecs,
        load: Callable[[KernelSpec], Kernel],
        *,
        max_rows: int,
        max_slots: int,
        device: torch.device,
        sampled_ids: Tensor | None = None,
    ):
        self.vocab_size, self.num_slices = specs.vocab_size, _number(specs.scan, "slices")
        self.max_rows, self.max_slots = max_rows, max_slots
        self._kernels = [load(spec) for spec in (specs.scan, specs.draw, specs.choose)]
        self._specs = (specs.scan, specs.draw, specs.choose)
        dtypes = {each.name: each.dtype for spec in self._specs for each in spec.arguments}
        sizes = self._sizes(int(specs.choose.parameters["num_top"] or 0))
        self._buffers: dict[str, Tensor] = {
            name: torch.zeros(size, dtype=_TORCH[dtypes[name]], device=device)
            for name, size in sizes.items()
            if name in dtypes
        }
        if sampled_ids is not None:
            self._buffers["sampled_ids"] = sampled_ids

    def tensors(self) -> list[Tensor]:
        """Returns all its buffers, a given ``sampled_ids`` among them."""
        return list(self._buffers.values())

    def buffer(self, name: str) -> Tensor:
        """Returns a buffer that the class describes. Raises ``KeyError`` for one that the specs leave out."""
        return self._buffers[name]

    def write(self, slot: int, sampling: SlotSampling) -> None:
        """Sets a slot's parameters, from the host. Raises ``ValueError`` for an adjustment that was left out."""
        wanted = {"uses": sampling.penalised, "mask": sampling.masked, "bias": sampling.biased}
        wanted["logprobs"] = sampling.logprobs
        missing = [name for name, is_wanted in wanted.items() if is_wanted and name not in self._buffers]
        if missing:
            raise ValueError(f"{sampling}: these kernels were made without {', '.join(missing)}")
        given = {
            "reals": torch.tensor(sampling.reals(), dtype=torch.float32),
            "integers": torch.tensor(sampling.integers(self.vocab_size), dtype=torch.int32),
            "seeds": torch.tensor(_signed(sampling.seed, 64)),
        }
        for name, values in given.items():
            buffer = self._buffers[name]
            buffer[slot] = to_device(values, buffer.device)

    def __call__(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Samples a token for each row of ``logits [R, V]`` fp32, contiguous; ``slots, positions [R]`` i32.

        A slot of −1 marks a padding row, which is skipped; ``positions`` are those of the drawn tokens. Writes each
        row's token to ``token_ids``, or ``-status`` where its :class:`RowStatus` is not OK; then ``sampled_ids`` gets
        0, since the next step may read it before the host sees the status. A penalised slot's token is counted in its
        ``uses``.
        """
        if logits.shape[1:] != (self.vocab_size,) or len(logits) > self.max_rows:
            raise ValueError(f"logits {tuple(logits.shape)}: made for at most {self.max_rows} x {self.vocab_size}")
        given: Mapping[str, Tensor] = {**self._buffers, "logits": logits, "slots": slots, "positions": positions}
        num_programs = len(logits) * self.num_slices
        for kernel, spec, grid in zip(
            self._kernels, self._specs, (num_programs, num_programs, len(logits)), strict=True
        ):
            kernel((grid,), *(given[each.name] for each in spec.arguments))

    def _sizes(self, num_top: int) -> dict[str, tuple[int, ...]]:
        slots, rows, vocab_size, slices = self.max_slots, self.max_rows, self.vocab_size, self.num_slices
        a_slice = ("peaks", "peak_ids", "states", "sums", "masses", "drawn", "drawn_ids", "raw_peaks", "raw_sums")
        return {
            **{"reals": (slots, len(REALS)), "integers": (slots, len(INTEGERS)), "seeds": (slots,)},
            **{"uses": (slots, vocab_size), "bias": (slots, vocab_size), "mask": (slots, -(-vocab_size // 32))},
            **{"token_ids": (rows,), "sampled_ids": (slots,), "logprobs": (rows,)},
            **{"top_logprobs": (rows, num_top), "top_ids": (rows, num_top)},
            **dict.fromkeys(a_slice, (rows, slices)),
            **dict.fromkeys(("slice_top", "slice_top_ids"), (rows, slices, num_top)),
            **dict.fromkeys(("bin_counts", "bin_masses"), (rows, _BINS)),
            **{"list_counts": (rows,), "list_keys": (rows, vocab_size), "list_ids": (rows, vocab_size)},
        }


_TORCH = {"fp32": torch.float32, "i32": torch.int32, "i64": torch.int64}


def _read(*arguments: tuple[str, str]) -> list[Argument]:
    return [Argument(name, dtype, "in") for name, dtype in arguments]


def _written(*arguments: tuple[str, str]) -> list[Argument]:
    return [Argument(name, dtype, "out") for name, dtype in arguments]


def _number(spec: KernelSpec, name: str) -> int:
    number = spec.parameters[name]
    assert isinstance(number, int)
    return number


def _signed(number: int, bits: int) -> int:
    """Returns the number modulo 2**bits, as the signed one with the same bits."""
    half: int = 2 ** (bits - 1)
    return (number + half) % (2 * half) - half
