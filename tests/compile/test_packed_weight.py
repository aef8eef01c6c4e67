"""Packed weights refuse rows that they have no place for."""

from __future__ import annotations

import pytest
import torch

from fastgen.compile.weights import packed
from fastgen.compile.weights.packed import PackedWeight


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
