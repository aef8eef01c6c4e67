"""Mixture of experts: which experts a token goes to, and the tokens sorted by expert. ``k`` experts a token.

Nothing is dropped: an expert takes as many tokens as choose it, none included.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "softmax_top_k", "sigmoid"]

_LEAST_SUM = 1e-20  # what weights are divided by at least: sigmoids may all have underflowed to 0


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
    """The ``k`` best experts of each token, best first, and their weights: ``[T, k]`` i64 and ``[T, k]`` fp32.

    ``logits [T, E]`` fp32, ``correction [E]``. ``softmax`` scores over all experts, ``softmax_top_k`` over the chosen
    ones, ``sigmoid`` each by itself. The correction counts for the choice, not for the weights (DeepSeek-V3, 2024).
    Where there are more groups than ``top_groups``, experts of the others are not chosen from; a group's score is its
    best expert's, or with a correction the sum of its two best. Ties go to the lowest id.
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
    """Indices of the ``count`` largest along the last axis, largest first, the lowest index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _of_best_groups(choice: Tensor, num_groups: int, top_groups: int, *, counted: int) -> Tensor:
    """``choice [T, E]`` with −inf outside the best groups; a group's ``counted`` best experts make its score."""
    groups = choice.view(len(choice), num_groups, choice.shape[1] // num_groups)
    group_scores = groups.topk(min(counted, groups.shape[-1]), dim=-1).values.sum(-1)
    shut = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, _best(group_scores, top_groups), False)
    return groups.masked_fill(shut.unsqueeze(-1), float("-inf")).flatten(1)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order in which the choices ``experts [T, k]`` lie expert by expert, and how many each expert has.

    Returns ``order [T*k]``, indices into the flattened choices (token ``order // k``), and ``counts [E]``, both i64.
    """
    flat = experts.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)


def combine(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Each token's experts' outputs, weighted and summed in fp32: ``[T, H]`` in the dtype of ``outputs``.

    ``outputs [T*k, H]`` lie in ``order``; ``weights [T, k]`` as :func:`route` gives them.
    """
    by_choice = torch.empty_like(outputs)
    by_choice[order] = outputs
    by_choice = by_choice.view(*weights.shape, outputs.shape[1])
    return torch.einsum("tk,tkh->th", weights, by_choice.float()).to(outputs.dtype)
