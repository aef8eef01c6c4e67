"""Averages by their definitions."""

from __future__ import annotations


def ewm_mean(gaps: list[float]) -> list[float]:
    """Returns ``pandas.Series(gaps).ewm(span=16, adjust=True).mean()``, by its definition."""
    alpha = 2 / (16 + 1)
    found = []
    for end in range(len(gaps)):
        weights = [(1 - alpha) ** (end - at) for at in range(end + 1)]
        found.append(sum(w * g for w, g in zip(weights, gaps[: end + 1], strict=True)) / sum(weights))
    return found
