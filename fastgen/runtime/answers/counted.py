"""Answers of a simulated run: only their lengths and the times of their tokens count, so no tokens are made.

Handing out tokens is most of what a step costs the host. While the same decodes run, nothing is noted for each of them
but that it has one token more. The times of such a stretch of steps are shared, and are copied when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Final

from fastgen.runtime.answers.answers import Answers
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.step.step import Step

# Stands for every generated token. It is above the ids of any vocabulary, so no prompt begins like an answer unless it
# continues one.
GENERATED: Final = 2**31 - 1


class CountedAnswers(Answers):
    """Answers that end when they have ``max_new_tokens`` tokens, and for no other reason. One completion a request."""

    # The decodes of the present stretch, the times of its steps, and steps left until the first of them ends.
    _decodes: SequenceOf[Sequence] = ()
    _times_s: list[float]
    _num_left = 0

    def update(self, step: Step) -> None:
        schedule = step.schedule
        assert step.ran_s is not None
        if schedule.decodes != self._decodes:
            self._end_stretch()
            self._decodes, self._times_s = schedule.decodes, []
            self._num_left = min([_num_left(seq) for seq in self._decodes], default=0)
        if self._decodes:
            for seq in self._decodes:
                seq.token_ids.append(GENERATED)
            self._times_s.append(step.ran_s)
            self._num_left -= 1
            if not self._num_left:
                ended = [seq for seq in self._decodes if not _num_left(seq)]
                self._end_stretch()
                for seq in ended:
                    self._end_at_length(seq)
        for chunk in schedule.chunks:
            if chunk.samples:
                chunk.seq.token_ids.append(GENERATED)
                self._completion_times_s(chunk.seq).append(step.ran_s)
                if not _num_left(chunk.seq):
                    self._end_at_length(chunk.seq)

    def _end_stretch(self) -> None:
        for seq in self._decodes:
            self._completion_times_s(seq).extend(self._times_s)
        self._decodes = ()

    def _completion_times_s(self, seq: Sequence) -> list[float]:
        return self.open[seq.key[0]].completions[0].token_times_s

    def _end_at_length(self, seq: Sequence) -> None:
        self._finish(self.open[seq.key[0]].completions[0], "length")


def _num_left(seq: Sequence) -> int:
    """Returns how many tokens ``seq`` still generates."""
    return seq.num_prompt_tokens + seq.request.sampling.max_new_tokens - seq.num_tokens
