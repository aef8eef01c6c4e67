"""The sum over ranks, in torch."""

from __future__ import annotations

from torch import Tensor


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Writes the sum of ``parts [n, ...]`` to ``out [...]``: the first, plus the second, and so on, added in fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out.copy_(total)
