"""The cost of leading other ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanCosts:
    """Plans written so far, their bytes, and the seconds that took."""

    num_plans: int = 0
    num_bytes: int = 0
    took_s: float = 0.0
