"""Decides when an engine that has died is started again, and when it is given up."""

from __future__ import annotations

# Engines that may die one after the other without having answered a request.
MAX_USELESS = 10
# Seconds before the second such engine is replaced; doubled each time, up to the longest.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
# An engine that lived this long was of use, even without a request.
USEFUL_LIFE_S = 600.0


class Restarts:
    """Counts engines that die without having been of use. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.num_useless = 0
        self._ready_s = 0.0
        self._has_answered = False

    def ready(self, now_s: float) -> None:
        """Records that an engine accepts requests."""
        self._ready_s, self._has_answered = now_s, False

    def answered(self) -> None:
        """Records that the engine has ended an answer by itself."""
        self._has_answered = True

    def died(self, now_s: float) -> float | None:
        """Records the engine's death. Returns in how many seconds to start another, or ``None`` for never."""
        is_useful = self._has_answered or now_s - self._ready_s >= USEFUL_LIFE_S
        self.num_useless = 0 if is_useful else self.num_useless + 1
        if self.num_useless >= MAX_USELESS:
            return None
        if self.num_useless < 2:
            return 0.0
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_useless - 2)))
