"""Packed weights refuse rows that they have no place for."""

from __future__ import annotations

import pytest
import torch

from fastgen.compile.weights import packed
from fastgen.compile.weights.packed import MAX_IN_FEATURES, PackedWeight, WeightFormat
from fastgen.compile.weights.rows import PackedHeads, PackedRows
from fastgen.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("start", "shape"),
    [(-1, (2, 8)), (19, (2, 8)), (20, (1, 8)), (0, (21, 8)), (0, (2, 7)), (0, (2, 9))],
    ids=["before the first", "over the end", "behind the end", "too many", "too narrow", "too wide"],
)
def test_rows_that_do_not_fit_are_refused(start: int, shape: tuple[int, int]) -> None:
    weight = PackedWeight("fp32", 20, 8, "portable")
    before = weight.panels.clone()
    with pytest.raises(ValueError, match=r"rows .* do not fit a weight of 20 x 8"):
        weight.write(start, torch.ones(shape))
    assert torch.equal(weight.panels, before)


def test_a_weight_is_the_same_in_whatever_pieces_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    whole, in_pieces = PackedWeight("fp32", 100, 8, "portable"), PackedWeight("fp32", 100, 8, "portable")
    whole.write(0, rows)
    monkeypatch.setattr(packed, "_PIECE", 1)  # less than a panel: it is packed panel by panel
    in_pieces.write(0, rows)
    assert torch.equal(in_pieces.panels, whole.panels)


@pytest.mark.parametrize(
    ("weight_format", "row_bytes"),
    [("fp32", 70 * 4), ("bf16", 70 * 2), ("int8_weight_only", 70 + 4), ("int8", 72 + 4), ("int4", 3 * (2 + 16))],
)
def test_its_size_is_that_of_whole_panels_with_scales_and_biases(weight_format: WeightFormat, row_bytes: int) -> None:
    assert PackedWeight(weight_format, 33, 70, "portable").size_bytes == 48 * (row_bytes + 4)


def test_a_sum_of_the_most_products_of_8_bits_has_room_in_32() -> None:
    assert MAX_IN_FEATURES * 127**2 < 2**31 <= (MAX_IN_FEATURES + 1) * 127**2
    meta = torch.device("meta")
    PackedWeight("int8", 1, MAX_IN_FEATURES, "portable", device=meta)
    PackedWeight("int8_weight_only", 1, MAX_IN_FEATURES + 1, "portable", device=meta)
    with pytest.raises(InvalidArgumentError, match="cannot be packed in int8"):
        PackedWeight("int8", 1, MAX_IN_FEATURES + 1, "portable", device=meta)


@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8_weight_only", "int4"])
def test_rows_are_held_if_they_are_packed_the_same(weight_format: WeightFormat) -> None:
    weight, rows = PackedWeight(weight_format, 40, 32, "portable"), torch.randn(20, 32)
    place = PackedRows(weight, 18, (20, 32))
    PackedRows(weight, 0, (18, 32)).copy_(torch.randn(18, 32))
    place.copy_(rows)
    assert place.holds(rows)
    assert not place.holds(2 * rows)
    rows[19] = -rows[19]
    assert not place.holds(rows)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_heads_are_held_if_each_head_has_its_own(transposed: bool) -> None:
    heads = PackedHeads([PackedWeight("fp32", 20, 8, "portable") for _ in range(3)], transposed)
    assert heads.shape == ((24, 20) if transposed else (60, 8))
    rows = torch.randn(heads.shape)
    heads.copy_(rows)
    assert heads.holds(rows)
    first = heads.heads[0].rows(torch.arange(20))
    assert torch.equal(first, rows[:8].t() if transposed else rows[:20])
    rows[-1] = 0
    assert not heads.holds(rows)
