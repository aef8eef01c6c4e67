"""Run-ahead: which sequences can continue before the tokens that a step samples for them are known on the host.

The forward pass of the next step reads such a token where it was sampled, on the device. Everything else that the host
does with the token (text, stops, masks, penalties) it does while that forward pass runs, before sampling from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from fastgen.runtime.requests.request import TO_COME, Sequence, SequenceStatus
from fastgen.runtime.step.step import Step


def awaited(step: Step, may_draft: Callable[[Sequence], bool]) -> tuple[list[Sequence], list[Sequence]]:
    """Splits the running sequences that ``step`` samples for into those that can continue and those that are held back
    until their token is known. Those that it has postponed are neither: they get no token.

    Held back are sequences whose inputs the host makes, and those that are certain to end with this token. The host
    makes the inputs of beams, which replace one another, and of drafted sequences, which get an unknown number of
    tokens.
    """
    ready: list[Sequence] = []
    held_back: list[Sequence] = []
    schedule = step.schedule
    drafted = {chunk.seq for chunk in schedule.chunks if chunk.drafts}
    for seq in (*schedule.decodes, *(chunk.seq for chunk in schedule.chunks if chunk.samples)):
        if seq.status is not SequenceStatus.RUNNING or seq in step.postponed:
            continue
        num_generated = seq.num_tokens + 1 - seq.num_prompt_tokens
        needs_host = seq.request.has_beams or seq in drafted or num_generated >= seq.request.sampling.max_new_tokens
        with tokens_to_come([seq]):
            needs_host = needs_host or may_draft(seq)
        (held_back if needs_host else ready).append(seq)
    return ready, held_back


@contextlib.contextmanager
def tokens_to_come(sequences: Iterable[Sequence]) -> Iterator[None]:
    """Gives each of ``sequences`` one more token, whose id is not known, for the duration of the block."""
    given: list[Sequence] = []
    try:
        for seq in sequences:
            seq.token_ids.append(TO_COME)
            given.append(seq)
        yield
    finally:
        for seq in given:
            seq.token_ids.pop()
