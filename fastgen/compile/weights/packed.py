"""A linear layer's weights, packed in the order in which C++ kernels read them."""

from __future__ import annotations

import sys
from copy import copy
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastgen.compile.host.huge_pages import in_huge_pages, whole_huge_pages
from fastgen.compile.weights.formats import GROUP, Quantized, quantize_channels, quantize_groups
from fastgen.errors import InvalidArgumentError

# ``"bf16_dot"``, ``"int8"`` and ``"int4"`` have their inputs rounded too; the others multiply in fp32.
WeightFormat = Literal["fp32", "bf16", "fp16", "bf16_dot", "int8_weight_only", "int8", "int4"]
# Outputs whose weights are side by side, by instruction set.
PANELS = {"amx": 32, "avx512bf16": 32, "avx512vnni": 32, "avx512": 32, "avx2": 16, "portable": 16}
# 32-bit numbers in a vector, by instruction set.
LANES = {"amx": 16, "avx512bf16": 16, "avx512vnni": 16, "avx512": 16, "avx2": 8, "portable": 4}
# Instruction sets with bf16 dots: two products of bf16 are added at once.
ARCHES_WITH_BF16_DOT = ("amx", "avx512bf16")
# Instruction sets with a matrix unit. Its tiles of x have rows of 64 bytes.
ARCHES_WITH_TILES = ("amx",)
# The dtypes of weights that are not quantized.
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_dot": torch.bfloat16, "fp16": torch.float16}
# Neighbouring weights of one output, where more than one.
_STEPS = {"bf16_dot": 2, "int8": 4, "int4": GROUP}
# Formats that a matrix unit multiplies, and the weights of one output that one tile of them has.
TILED: dict[WeightFormat, int] = {"bf16": 32, "bf16_dot": 32, "int8": 64, "int4": GROUP}
_SCALED = ("int8_weight_only", "int8")
# So that a sum of products of 8 bits has room in 32.
MAX_IN_FEATURES = (2**31 - 1) // 127**2
_PIECE = 4 << 20  # weights converted at a time
_CPU = torch.device("cpu")


def formats_of(arch: str) -> tuple[WeightFormat, ...]:
    """Returns the formats that the instruction set supports."""
    return tuple(each for each in get_args(WeightFormat) if each != "bf16_dot" or arch in ARCHES_WITH_BF16_DOT)


def matrix_format(plain: WeightFormat, arch: str) -> WeightFormat:
    """Returns the format for matrices of a model in ``plain`` whose inputs may be rounded to as many bits."""
    return "bf16_dot" if plain == "bf16" and arch in ARCHES_WITH_BF16_DOT else plain


def layout_of(weight_format: WeightFormat, arch: str) -> WeightFormat:
    """Returns the format whose weights lie in memory as these do. A matrix unit reads all bf16 as bf16 dots do."""
    return "bf16_dot" if weight_format == "bf16" and arch in ARCHES_WITH_TILES else weight_format


def padded_features(weight_format: WeightFormat, in_features: int, arch: str) -> int:
    """Returns the weights that an output has in memory, and the numbers of a prepared row: as many as fill steps, or
    tiles where there is a matrix unit. Those after ``in_features`` are zero.
    """
    unit = TILED.get(weight_format, 1) if arch in ARCHES_WITH_TILES else _STEPS.get(weight_format, 1)
    return -(-in_features // unit) * unit


class PackedWeight:
    """``weight [out_features, in_features]`` and ``bias [out_features]`` of one layer, packed for one instruction set,
    or of ``num_groups`` equal ones, one after the other: one for each head, or each expert.

    It is written by rows as they are read, from any float dtype, in pieces, so that only the current rows exist beside
    the packed weights. Groups are written separately (:meth:`group`). Rows and biases that were never written are zero.
    The memory is in huge pages where the system has them, and is freed with the object and all its tensors.

    ``panels`` holds bytes, ``[num_groups * num_panels, bytes]``, in the order that ``linear_float.cpp.j2`` and
    ``linear_int.cpp.j2`` of ``ops/linear/templates`` describe; ``scale`` and ``bias`` fp32, one for each output, the
    padding of each group's last panel included.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        out_features: int,
        in_features: int,
        arch: str,
        *,
        num_groups: int = 1,
        device: torch.device = _CPU,
    ):
        if weight_format not in get_args(WeightFormat):
            raise InvalidArgumentError(f"weight format {weight_format!r}: expected {', '.join(get_args(WeightFormat))}")
        most = MAX_IN_FEATURES if weight_format == "int8" else sys.maxsize
        if out_features < 1 or not 1 <= in_features <= most:
            raise InvalidArgumentError(
                f"a weight of {out_features} x {in_features} cannot be packed in {weight_format}"
            )
        self.format, self.arch = weight_format, arch
        self.out_features, self.in_features, self.num_groups = out_features, in_features, num_groups
        self._panel, self._lanes = PANELS[arch], LANES[arch]
        num_panels = num_groups * -(-out_features // self._panel)
        self._layout = layout_of(weight_format, arch)
        self._step = _STEPS.get(self._layout, 1)
        self._padded_features = padded_features(weight_format, in_features, arch)
        size_bytes = num_panels * _panel_bytes(weight_format, self._padded_features, self._panel)
        pages = in_huge_pages(whole_huge_pages(size_bytes), device)
        self.panels = pages[:size_bytes].view(num_panels, -1)
        self.scale = torch.zeros(num_panels * self._panel if weight_format in _SCALED else 0, device=device)
        self.bias = torch.zeros(num_panels * self._panel, device=device)

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that a forward pass reads."""
        return self.panels.nbytes + self.scale.nbytes + self.bias.nbytes

    @property
    def page_rest_bytes(self) -> int:
        """Returns the bytes of the last huge page behind the panels, those of all groups together."""
        return self.panels.untyped_storage().nbytes() - self.panels.nbytes

    def group(self, index: int) -> PackedWeight:
        """Returns one of the groups, as a weight in the same memory."""
        one, num_panels = copy(self), len(self.panels) // self.num_groups
        one.num_groups = 1
        one.panels = self.panels[index * num_panels : (index + 1) * num_panels]
        outputs = slice(index * num_panels * self._panel, (index + 1) * num_panels * self._panel)
        one.scale, one.bias = self.scale[outputs], self.bias[outputs]
        return one

    def write(self, start: int, rows: Tensor, largest: Tensor | None = None) -> None:
        """Packs ``rows [n, in_features]`` as outputs ``start`` to ``start + n``. Raises ``ValueError``.

        In formats with a scale for each output, ``largest [n]`` are the magnitudes that get the largest code, where
        these are not those of ``rows``.
        """
        end = start + len(rows)
        if start < 0 or end > self.out_features or rows.shape[1:] != (self.in_features,):
            raise ValueError(
                f"rows {start} to {end} of {tuple(rows.shape[1:])} do not fit a weight of "
                f"{self.out_features} x {self.in_features}"
            )
        piece = max(1, _PIECE // (self.in_features * self._panel)) * self._panel
        while start < end:
            place = start % self._panel
            count = min(end - start, self._panel - place if place else piece)
            if not place and count > self._panel:
                count -= count % self._panel
            self._write_piece(start, rows[:count], None if largest is None else largest[:count])
            start, rows = start + count, rows[count:]
            largest = None if largest is None else largest[count:]

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the rows ``indices [n]`` of the weight, dequantized, in fp32: ``[n, in_features]``. Only these rows
        are read.
        """
        panels, outputs = indices // self._panel, indices % self._panel
        if self.format == "int4":
            return self._int4_rows(panels, outputs)[:, : self.in_features]
        view = self._view(self.panels)
        if self._layout == "bf16":
            pair, half = outputs // (2 * self._lanes), outputs // self._lanes % 2
            return view[panels, pair, half, outputs % self._lanes].float()
        values = view[panels, outputs].flatten(1)[:, : self.in_features]
        if self.format not in _SCALED:
            return values.float()
        return (values ^ -128 if self.format == "int8" else values) * self.scale[indices].unsqueeze(1)

    def _int4_rows(self, panels: Tensor, outputs: Tensor) -> Tensor:
        """Returns the rows that :func:`unpack_nibbles` would return."""
        groups = self.panels.view(len(self.panels), -1, 18 * self._panel)
        scale = groups.view(torch.float16)[panels, :, outputs].float()
        both = groups[:, :, 2 * self._panel :].view(*groups.shape[:2], -1, 4, self._lanes, 4)
        both = both[panels, :, outputs // self._lanes, :, outputs % self._lanes]
        codes = torch.stack([both & 15, both >> 4], dim=2).to(torch.int8) - 8
        return (codes.flatten(2) * scale.unsqueeze(2)).flatten(1)

    def _write_piece(self, start: int, rows: Tensor, largest: Tensor | None) -> None:
        """Writes a number of panels, or a part of one."""
        values = self._convert(rows, largest)
        panels = slice(start // self._panel, -(-(start + len(rows)) // self._panel))
        if len(rows) % self._panel:
            before, place = self._read(torch.tensor([panels.start])), slice(start % self._panel, None)
            for old, new in zip(_tensors(before), _tensors(values), strict=True):
                old[place][: len(rows)] = new
            values = before
        codes = values.codes if isinstance(values, Quantized) else values
        if isinstance(values, Quantized) and self.format == "int4":
            self.panels[panels] = pack_nibbles(codes, values.scale, self._lanes, self._panel)
            return
        if isinstance(values, Quantized):
            self.scale.view(-1, self._panel)[panels] = values.scale.view(-1, self._panel)
        if missing := self._padded_features - self.in_features:
            codes = pad(codes, (0, missing))
        if self.format == "int8":
            codes = codes ^ -128
        view = self._view(self.panels[panels])
        view.copy_(codes.view(view.shape))

    def _read(self, panels: Tensor) -> Tensor | Quantized:
        """Returns the result of :meth:`_convert` for the rows of these panels."""
        if self.format == "int4":
            return unpack_nibbles(self.panels[panels], self._lanes, self._panel)
        codes = self._view(self.panels[panels]).reshape(len(panels) * self._panel, -1)[:, : self.in_features]
        if self.format in FLOATS:
            return codes
        scale = self.scale.view(-1, self._panel)[panels].view(-1, 1)
        return Quantized(codes ^ -128 if self.format == "int8" else codes, scale)

    def _convert(self, rows: Tensor, largest: Tensor | None) -> Tensor | Quantized:
        if self.format in FLOATS:
            return rows.to(FLOATS[self.format])
        return quantize_groups(rows) if self.format == "int4" else quantize_channels(rows, largest)

    def _view(self, panels: Tensor) -> Tensor:
        """Returns a view of the panels' bytes as numbers, in the order of ``[outputs, in_features]``."""
        count, panel, lanes = len(panels), self._panel, self._lanes
        if self._layout == "bf16":
            return panels.view(torch.bfloat16).view(count, -1, panel // lanes // 2, lanes, 2).permute(0, 2, 4, 3, 1)
        numbers = panels.view(FLOATS.get(self.format, torch.int8))
        return numbers.view(count, -1, panel, self._step).transpose(1, 2)


def _panel_bytes(weight_format: WeightFormat, padded: int, panel: int) -> int:
    step = _STEPS.get(weight_format, 1)
    step_bytes = 18 if weight_format == "int4" else step * FLOATS.get(weight_format, torch.int8).itemsize
    return padded // step * step_bytes * panel


def pack_nibbles(codes: Tensor, scale: Tensor, lanes: int, panel: int) -> Tensor:
    """Packs panels of int4, ``[n, bytes]``, from ``codes [n * panel, K]`` and ``scale [n * panel, K / 32]``."""
    groups = scale.shape[1]
    parts = (codes + 8).to(torch.uint8).view(-1, panel // lanes, lanes, groups, 2, 4, 4)
    low, high = parts.permute(4, 0, 3, 1, 5, 2, 6).reshape(2, -1, groups, 16 * panel)
    scales = scale.half().view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([scales, low | high << 4], dim=2).flatten(1)


def unpack_nibbles(panels: Tensor, lanes: int, panel: int) -> Quantized:
    """Inverts :func:`pack_nibbles`."""
    grouped = panels.view(len(panels), -1, 18 * panel)
    scales, both = grouped[:, :, : 2 * panel].contiguous().view(torch.float16), grouped[:, :, 2 * panel :]
    parts = torch.stack([both & 15, both >> 4]).view(2, len(panels), -1, panel // lanes, 4, lanes, 4)
    codes = parts.permute(1, 3, 5, 2, 0, 4, 6).reshape(len(panels) * panel, -1).to(torch.int8) - 8
    return Quantized(codes, scales.transpose(1, 2).reshape(len(codes), -1).float())


def _tensors(values: Tensor | Quantized) -> tuple[Tensor, ...]:
    return (values.codes, values.scale) if isinstance(values, Quantized) else (values,)
