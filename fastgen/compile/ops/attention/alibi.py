"""ALiBi: a bias on attention scores, linear in the key's position (Press et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """``slopes [N]``, in whose dtype the bias is computed; ``scaled``: the scores' scale multiplies the bias too."""

    slopes: Tensor
    scaled: bool


def alibi_bias(slopes: Tensor, key_positions: Tensor) -> Tensor:
    """``slopes[head] * key_position``: ``slopes [N]``, ``key_positions [s]`` to ``[N, s]`` fp32.

    Computed in the dtype of ``slopes``: with bf16, position and product are rounded to it.
    """
    return (slopes.unsqueeze(1) * key_positions.to(slopes.dtype)).float()
