"""The sequences of a beam search, kept in step with it.

Every live beam is a sequence. All of them are computed up to their newest token, then the search moves all at once. A
beam stays in the sequence of the beam that it continues. If several beams continue the same one, all but the first
fork from it into sequences whose own beams ended. Blocks are shared until the beams write different tokens into them.
"""

from __future__ import annotations

from typing import Protocol

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.sampling.beam_search import BeamSearch, Hypothesis


class BeamForks(Protocol):
    """The part of :class:`~fastgen.runtime.scheduling.forks.Forks` that a search needs."""

    def fork(self, parent: Sequence, child: Sequence) -> None: ...

    def suspend(self, beam: Sequence) -> None: ...


class BeamGroup:
    """The beams of ``request``. Its first sequence begins; the others wait to be forked."""

    def __init__(self, request: Request, stop_ids: frozenset[int]):
        sampling = request.sampling
        self.request = request
        self.search = BeamSearch(
            sampling.beam_width,
            max_new_tokens=sampling.max_new_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            stop_ids=stop_ids,
        )
        # The times at which the search moved. The n-th tokens of all beams have the n-th time.
        self.token_times_s: list[float] = []
        self._live = list(request.sequences[:1])
        self._candidates: dict[Sequence, list[Candidate]] = {}

    def report(self, sequence: Sequence, candidates: list[Candidate]) -> None:
        """Takes the ``candidates`` that may follow the newest token of ``sequence``."""
        self._candidates[sequence] = candidates

    @property
    def done(self) -> bool:
        return self.search.done

    @property
    def ready(self) -> bool:
        """Returns whether every live beam has reported, so that the search can move. A beam that was preempted since is
        computed again first, for the beams that fork from it.
        """
        return all(beam in self._candidates and not beam.num_pending_tokens for beam in self._live)

    def advance(self, forks: BeamForks, now_s: float) -> None:
        """Moves the search by a token, and the sequences with it."""
        parents = self.search.advance([self._candidates[sequence] for sequence in self._live])
        self._candidates.clear()
        self.token_times_s.append(now_s)
        if self.search.done:
            return
        continued = [self._live[parent] for parent in parents]
        free = [sequence for sequence in self.request.sequences if sequence not in continued]
        next_live: list[Sequence] = []
        for parent in continued:
            if parent not in next_live:
                next_live.append(parent)
            else:
                child = free.pop()
                forks.fork(parent, child)
                next_live.append(child)
        for sequence, beam in zip(next_live, self.search.live, strict=True):
            assert beam.newest is not None
            sequence.token_ids.append(beam.newest.token_id)
        for sequence in free:
            if sequence in self._live:
                forks.suspend(sequence)
        self._live = next_live

    def hypotheses(self) -> list[Hypothesis]:
        """Returns the best ``n`` hypotheses, best first; fewer if there are no more."""
        return self.search.ranking()[: self.request.sampling.n]
