"""Token embedding of a ragged batch, and other rows looked up by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.compile.weights.quantized import QuantizedWeight


def resolve_token_ids(input_ids: Tensor, token_source: Tensor, sampled_ids: Tensor) -> Tensor:
    """Returns the ids to embed: ``input_ids[t]``, or the last sampled id of slot ``token_source[t]`` where that is not
    −1.

    ``input_ids``, ``token_source`` ``[T]`` i32, ``sampled_ids`` ``[S]`` i32; returns ``[T]`` i32.
    """
    sampled = sampled_ids[token_source.clamp(min=0).long()]
    return torch.where(token_source < 0, input_ids, sampled)


def embed(ids: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """Looks up rows of ``weight [V, H]`` for ``ids [T]``; returns ``[T, H]``, in fp32 where the weight is quantized."""
    return weight.rows(ids) if isinstance(weight, QuantizedWeight) else F.embedding(ids, weight)


def embed_some(ids: Tensor, weight: Tensor | QuantizedWeight, first_id: int) -> Tensor:
    """Returns what :func:`embed` returns for a table of which ``weight`` has the rows from ``first_id`` on, and zeros
    for ids of other rows."""
    num_rows = weight.out_features if isinstance(weight, QuantizedWeight) else len(weight)
    rows = ids - first_id
    is_here = (rows >= 0) & (rows < num_rows)
    return embed(rows.clamp(0, num_rows - 1), weight) * is_here.unsqueeze(1)
