"""The sequences of a request that searches with beams, kept in step with its search.

Every live beam is a sequence. All of them are computed up to their newest token, then the search moves all at once: a
beam goes on in the sequence of the beam it continues, and where one beam is continued by several, all but the first
fork from it into sequences whose own beams ended. Blocks are shared until the beams write different tokens into them.
"""

from __future__ import annotations

from typing import Protocol

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.sampling.beam_search import BeamSearch, Candidate, Hypothesis


class BeamForks(Protocol):
    """What of :class:`~fastgen.runtime.kv_cache.forks.Forks` a search asks for."""

    def fork(self, parent: Sequence, child: Sequence) -> None: ...

    def suspend(self, beam: Sequence) -> None: ...


class BeamGroup:
    """The beams of ``request``; its first sequence begins, the others wait to be forked."""

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
        # When the search moved; the n-th tokens of all beams have the n-th time.
        self.token_times_s: list[float] = []
        self._live = list(request.sequences[:1])
        self._candidates: dict[Sequence, list[Candidate]] = {}

    def report(self, sequence: Sequence, candidates: list[Candidate]) -> None:
        """``candidates`` may follow the newest token of ``sequence``."""
        self._candidates[sequence] = candidates

    @property
    def done(self) -> bool:
        return self.search.done

    @property
    def ready(self) -> bool:
        """Whether every live beam has reported, so that the search can move. One that was preempted since is computed
        again first, for the beams that fork from it."""
        return all(beam in self._candidates and not beam.num_pending_tokens for beam in self._live)

    def advance(self, forks: BeamForks, now_s: float) -> None:
        """Move the search by a token, and the sequences with it."""
        parents = self.search.advance([self._candidates[sequence] for sequence in self._live])
        self._candidates.clear()
        self.token_times_s.append(now_s)
        if self.search.done:
            return
        goes_on = [self._live[parent] for parent in parents]
        free = [sequence for sequence in self.request.sequences if sequence not in goes_on]
        next_live: list[Sequence] = []
        for parent in goes_on:
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
        """The best ``n``, best first; fewer where there are no more."""
        return self.search.ranking()[: self.request.sampling.n]
