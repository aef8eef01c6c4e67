"""Postpones sequences in a step because it is not known yet what their format allows next.

Their row is computed, and its token is dropped. The step does not count for them, and the next one computes the same
token again. So no sequence waits long for the mask of another, unless its own are slow too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.scheduling.drafts import SampledSequence

# Seconds that a step waits for all its masks together, after it has computed its logits.
MAX_WAIT_S = 0.03


def without_mask(rows: SequenceOf[SampledSequence]) -> frozenset[Sequence]:
    """Returns those sequences of ``rows`` whose mask is not ready, after a short wait."""
    constrained = [row for row in rows if row.matcher is not None and isinstance(row, Sequence)]
    if not constrained:
        return frozenset()
    late = _late(constrained, time.monotonic() + MAX_WAIT_S)
    if late and len(late) == len(rows):  # nothing else makes progress, so waiting delays nothing
        assert late[0].matcher is not None
        late[0].matcher.wait(MAX_WAIT_S)
        late = _late(late, 0.0)
    return frozenset(late)


def _late(sequences: list[Sequence], deadline_s: float) -> list[Sequence]:
    return [each for each in sequences if each.matcher is not None and not each.matcher.is_ready(deadline_s)]
