"""Finds the windows of the layers of a model, for the cost of its steps."""

from __future__ import annotations

from collections.abc import Callable

from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec
from fastgen.runtime.step_cost.sight import Sight

Attention = AttentionSpec | LatentAttentionSpec


def sights_of(spec: ModelSpec) -> tuple[Sight, ...]:
    """Returns each window that layers of a model have, with their share of its work. It is empty if every layer reads
    all of its context.
    """
    windows = list(dict.fromkeys(map(_window, spec.attentions())))
    if windows == [None]:
        return ()

    def share(window: int | None, amount: Callable[[Attention], int]) -> float:
        own = sum(amount(each) for each in spec.attentions() if _window(each) == window)
        return own / sum(map(amount, spec.attentions()))

    return tuple(
        Sight(window, share(window, lambda each: each.cached_features), share(window, _pair_operations))
        for window in windows
    )


def _window(attention: Attention) -> int | None:
    return attention.sliding_window if isinstance(attention, AttentionSpec) else None


def _pair_operations(attention: Attention) -> int:
    """Returns the operations of one token's attention to one other."""
    if isinstance(attention, AttentionSpec):
        return 4 * attention.num_heads * attention.head_dim
    return 2 * attention.num_heads * (2 * attention.kv_rank + attention.rope_dim)
