"""Answers of a simulated run: only their lengths and the times of their tokens count, so no tokens are made.

Handing out tokens is most of what a step costs the host. Here a step notes its time once for all of its decodes, and
which of them end with it is known since they began. An answer takes its times out of those of all steps when its
sequence is no longer a decode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Any, Final, NamedTuple

from fastgen.runtime.answers.answers import Answers
from fastgen.runtime.answers.generation import Completion
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.step.step import Step

# Stands for every generated token. It is above the ids of any vocabulary, so no prompt begins like an answer unless it
# continues one.
GENERATED: Final = 2**31 - 1


class _Stretch(NamedTuple):
    """Steps one after another that decode the sequence of ``completion``: their first one, and the end of those that
    would complete it. Steps are numbered as their times.
    """

    completion: Completion
    begin: int
    end: int


class CountedAnswers(Answers):
    """Answers that end when they have ``max_new_tokens`` tokens, and for no other reason. One completion a request."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # The decodes of the last step, the stretch of each, and the decodes by the end of their stretch.
        self._decodes: SequenceOf[Sequence] = ()
        self._stretches: dict[Sequence, _Stretch] = {}
        self._ending: defaultdict[int, list[Sequence]] = defaultdict(list)
        # The times of the steps with decodes, since there was one without.
        self._times_s: list[float] = []

    def update(self, step: Step) -> None:
        schedule = step.schedule
        assert step.ran_s is not None
        if schedule.decodes != self._decodes:
            self._change(schedule.decodes)
        if self._decodes:
            for seq in self._decodes:
                seq.token_ids.append(GENERATED)
            self._times_s.append(step.ran_s)
            for seq in self._ending.pop(len(self._times_s), ()):
                self._finish(self._leave(seq), "length")
        for chunk in schedule.chunks:
            if chunk.samples:
                chunk.seq.token_ids.append(GENERATED)
                completion = self._completion(chunk.seq)
                completion.token_times_s.append(step.ran_s)
                if not _num_left(chunk.seq):
                    self._finish(completion, "length")

    def _change(self, decodes: SequenceOf[Sequence]) -> None:
        """Ends the stretches of sequences that are none of ``decodes``, and begins those of new ones."""
        for seq in self._stretches.keys() - decodes:
            self._ending[self._stretches[seq].end].remove(seq)
            self._leave(seq)
        if not decodes:
            self._times_s.clear()
            self._ending.clear()
        for seq in decodes:
            if seq not in self._stretches:
                begin = len(self._times_s)
                stretch = _Stretch(self._completion(seq), begin, begin + _num_left(seq))
                self._stretches[seq] = stretch
                self._ending[stretch.end].append(seq)
        self._decodes = decodes

    def _leave(self, seq: Sequence) -> Completion:
        """Ends the stretch of ``seq`` with the last step. Returns its completion, which has the times now."""
        completion, begin, _ = self._stretches.pop(seq)
        completion.token_times_s += self._times_s[begin:]
        return completion

    def _completion(self, seq: Sequence) -> Completion:
        return self.open[seq.key[0]].completions[0]


def _num_left(seq: Sequence) -> int:
    """Returns how many tokens ``seq`` still generates."""
    return seq.num_prompt_tokens + seq.request.sampling.max_new_tokens - seq.num_tokens
