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
