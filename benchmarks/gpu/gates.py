"""Numeric gates: a kernel's outputs against a reference in fp32, and the same bits in every one of several runs.

Before each run the outputs are NaN, or what they were at first where a kernel also reads them. So memory that is not
written shows, and so do most races.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class GateError(Exception):
    """An output is wrong, so its case is not measured."""


def excess(found: Tensor, expected: Tensor, absolute: float, relative: float) -> float:
    """Returns the largest difference, in units of what is allowed: ``absolute`` and a part of the expected number."""
    wanted = expected.float()
    found_part = (found.float() - wanted).abs() / (absolute + relative * wanted.abs())
    return float(found_part.nan_to_num(torch.inf, torch.inf).max()) if found_part.numel() else 0.0


def gate(what: str, largest: float, allowed: float = 1.0) -> float:
    """Returns ``largest``. Raises :class:`GateError` where it is not at most ``allowed``."""
    if not largest <= allowed:
        raise GateError(f"{what} differs from the torch reference by {largest:.1e}, and {allowed:.1e} is allowed")
    return largest


def run_repeatedly(
    what: str, run: Callable[[], object], times: int, outputs: Sequence[Tensor], *, read: Sequence[Tensor] = ()
) -> None:
    """Runs a kernel that number of ``times``. It writes ``outputs``, and both reads and writes ``read``.

    Raises :class:`GateError` where a run gives other bits than the first.
    """
    before = [each.clone() for each in read]
    first: list[Tensor] = []
    for turn in range(times):
        for each in outputs:
            each.fill_(torch.nan if each.is_floating_point() else -1)
        for each, saved in zip(read, before, strict=True):
            each.copy_(saved)
        run()
        made = [*outputs, *read]
        if turn == 0:
            first = [each.clone() for each in made]
        elif not all(map(_same_bits, made, first)):
            raise GateError(f"{what} gives other bits in run {turn + 1} than in the first")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares bytes, since NaN differs from itself."""
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))
