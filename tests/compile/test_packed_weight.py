"""Packed weights refuse rows that they have no place for."""

from __future__ import annotations

import pytest
import torch

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
