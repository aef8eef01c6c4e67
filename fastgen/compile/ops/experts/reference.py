"""Mixture of experts: which experts a token goes to, and the tokens sorted by expert. ``k`` experts a token.

No token is dropped: an expert takes all tokens that choose it, which may be none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "softmax_top_k", "sigmoid"]

_LEAST_SUM = 1e-20  # least divisor of weights: sigmoids may all have underflowed to 0


def route(
    logits: Tensor,
    correction: Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    normalize: bool,
    scale: float | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` best experts of each token, best first, and their weights: ``[T, k]`` i64 and ``[T, k]`` fp32.

    ``logits [T, E]`` fp32, ``correction [E]``. ``softmax`` scores over all experts, ``softmax_top_k`` over the chosen
    ones, ``sigmoid`` each separately. The correction counts for the choice, not for the weights (DeepSeek-V3, 2024).
    Where there are more groups than ``top_groups``, only experts of the best groups can be chosen. A group's score is
    its best expert's, or with a correction the sum of its two best. Ties go to the lowest id.
    """
    match scoring:
        case "softmax":
            scores = logits.softmax(-1)
        case "softmax_top_k":
            scores = logits
        case "sigmoid":
            scores = logits.sigmoid()
    choice = scores if correction is None else scores + correction.float()
    if top_groups < num_groups:
        choice = _of_best_groups(choice, num_groups, top_groups, counted=1 if correction is None else 2)
    experts = _best(choice, top_k)
    weights = scores.gather(-1, experts)
    if scoring == "softmax_top_k":
        weights = weights.softmax(-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=_LEAST_SUM)
    return experts, weights if scale is None else weights * scale


def _best(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the ``count`` largest along the last axis, largest first, the lowest index first among
    equals.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _of_best_groups(choice: Tensor, num_groups: int, top_groups: int, *, counted: int) -> Tensor:
    """Returns ``choice [T, E]`` with −inf outside the best groups; a group's ``counted`` best experts make
    its score.
    """
    groups = choice.view(len(choice), num_groups, choice.shape[1] // num_groups)
    group_scores = groups.topk(min(counted, groups.shape[-1]), dim=-1).values.sum(-1)
    shut = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, _best(group_scores, top_groups), False)
    return groups.masked_fill(shut.unsqueeze(-1), float("-inf")).flatten(1)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the choices ``experts [T, k]`` by expert, and counts them.

    Returns ``order [T*k]``, indices into the flattened choices (token ``order // k``), and ``counts [E]``, both i64.
    """
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)


def combine(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sums the outputs of each token's experts, weighted, in fp32: ``[T, H]`` in the dtype of ``outputs``.

    ``outputs [T*k, H]`` are in ``order``; ``weights [T, k]`` come from :func:`route`.
    """
    by_choice = torch.empty_like(outputs)
    by_choice[order] = outputs
    by_choice = by_choice.view(*weights.shape, outputs.shape[1])
    return torch.einsum("tk,tkh->th", weights, by_choice.float()).to(outputs.dtype)
