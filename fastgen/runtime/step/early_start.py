"""The next step of steady decodes, started before the host has looked at the tokens of the last one.

Once steps have followed each other for a while, and everything that is known says that another one follows, its tape
starts on other threads of the pool as soon as the last tokens are there. If another step comes instead (a sequence
ended, a request arrived), the one that was started is dropped. It has written only behind the last token of each
sequence, in blocks that the sequence held. Whichever sequence gets these blocks next writes them first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from fastgen.compile.capture.tape import Tape
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.runtime.requests.request import Sequence

# The next step starts early after ``STEPS_PER_DECODE`` continued steps for each decode, and at the latest after
# ``MOST_STEPS``. With more decodes a sequence ends sooner and a dropped step costs more, while the gain is the same.
# After ``MOST_STEPS`` steps one dropped step in 32 costs less than the others gain.
STEPS_PER_DECODE, MOST_STEPS = 8, 32


class EarlyStart:
    """Starts the tapes of steady decodes early, on threads of ``pool``."""

    def __init__(self, pool: ThreadPool, block_size: int):
        self._pool, self._block_size = pool, block_size
        # The tape of the next step, if it was started.
        self.started: Tape | None = None
        self._num_continued = 0

    def start(self, tape: Tape, decodes: SequenceOf[Sequence], positions: SequenceOf[int]) -> None:
        """Starts ``tape`` if a further step of ``decodes``, which are at ``positions``, is expected."""
        self._num_continued += 1
        num_needed = min(STEPS_PER_DECODE * len(decodes), MOST_STEPS)
        if self._num_continued >= num_needed and self._seems_to_continue(decodes, positions):
            self.started = tape if tape.begin(self._pool) else None

    def interrupted(self) -> None:
        """Notes that the last step did not continue the one before."""
        self._num_continued = 0

    def wait(self) -> None:
        """Waits for the kernels of a step that was started. It still counts as started."""
        if self.started is not None:
            self.started.end()

    def take(self) -> bool:
        """Waits for the step that was started, and forgets it. Returns whether there was one."""
        self.wait()
        was_started, self.started = self.started is not None, None
        return was_started

    def _seems_to_continue(self, decodes: SequenceOf[Sequence], positions: SequenceOf[int]) -> bool:
        """Returns whether another step follows unless a token ends a sequence or a request arrives: no sequence has all
        its tokens, and none begins a block, for which it needs the scheduler.
        """
        return all((position + 1) % self._block_size for position in positions) and not any(map(_is_last, decodes))


def _is_last(sequence: Sequence) -> bool:
    """Returns whether the token that ``sequence`` gets now is certain to be its last."""
    return sequence.num_tokens + 1 - sequence.num_prompt_tokens >= sequence.request.sampling.max_new_tokens
