"""Beam search: from the likeliest next tokens of every live beam to the next beams and to finished hypotheses.

The search of "Sequence Transduction with Recurrent Neural Networks" (Graves, 2012) with the length normalisation of
"Google's Neural Machine Translation System" (Wu et al., 2016) in the form that transformers gives it; scores and
termination are those of ``GenerationMixin._beam_search`` in transformers 5. With ``W = beam_width``, each step

1. extends every live beam by every token, a continuation scoring the sum of its tokens' scores, and takes the best
   ``W * max(2, 1 + stop ids)`` continuations: so many that ``W`` of them continue even if all others end;
2. makes hypotheses of those among the best ``W`` that end, by a stop id or by being ``max_new_tokens`` long. The score
   of a hypothesis is its sum divided by ``length ** length_penalty``, the length being that of its generated tokens
   with the one that ends it. A continuation that ends behind the best ``W`` is dropped. The best ``W`` hypotheses of
   all steps are kept;
3. lets the best ``W`` continuations that do not end live on.

It is over when nothing lives on, or ``W`` hypotheses are kept and ``early_stopping`` says that they are enough:
``True`` says so at once; ``False`` when the best live beam, divided by its present length to the same power, does not
beat the worst of them; ``"never"`` does the same with ``max_new_tokens`` in place of the present length where
``length_penalty`` is positive, so that no live beam could beat it however long it grew.

Where two scores are equal, the older hypothesis, the better beam, the likelier token and the lower id come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastgen.runtime.requests.sampled import Candidate

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One path of the search: the ``newest`` token after those of ``parent``."""

    parent: Beam | None = None
    newest: Candidate | None = None
    # The sum of the scores of its tokens.
    score: float = 0.0
    # How many tokens were generated.
    length: int = 0

    def extended(self, token: Candidate) -> Beam:
        return Beam(self, token, self.score + token.score, self.length + 1)

    def tokens(self) -> list[Candidate]:
        """Returns the generated tokens, oldest first."""
        found: list[Candidate] = []
        beam = self
        while beam.parent is not None:
            assert beam.newest is not None
            found.append(beam.newest)
            beam = beam.parent
        return found[::-1]


class Hypothesis(NamedTuple):
    """A beam and its score by length."""

    beam: Beam
    score: float


class BeamSearch:
    """A beam search. ``live`` are the beams to be continued, best first: at first a single one without tokens."""

    def __init__(
        self,
        beam_width: int,
        *,
        max_new_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        stop_ids: frozenset[int] = frozenset(),
    ):
        self.beam_width, self.max_new_tokens = beam_width, max_new_tokens
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.stop_ids = stop_ids
        self.live: list[Beam] = [Beam()]
        # Best first, at most ``beam_width``.
        self.finished: list[Hypothesis] = []

    @property
    def done(self) -> bool:
        return not self.live

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[int]:
        """Makes one step. ``candidates[i]`` are the likeliest tokens after ``live[i]``, best first,
        :func:`num_candidates` of them or all that are possible.

        Returns for each beam that is live now the index of the beam that it continues; none if the search is over.
        """
        assert len(candidates) == len(self.live), f"{len(candidates)} candidate lists for {len(self.live)} live beams"
        continuations = [
            (index, beam.extended(token)) for index, beam in enumerate(self.live) for token in candidates[index]
        ]
        continuations.sort(key=lambda continuation: -continuation[1].score)  # stable, which decides ties
        del continuations[num_candidates(self.beam_width, self.stop_ids) :]

        next_beams: list[tuple[int, Beam]] = []
        for rank, (index, beam) in enumerate(continuations):
            assert beam.newest is not None
            if beam.length < self.max_new_tokens and beam.newest.token_id not in self.stop_ids:
                next_beams.append((index, beam))
            elif rank < self.beam_width:
                self.finished.append(self._hypothesis(beam))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.beam_width :]

        del next_beams[self.beam_width :]
        if next_beams and self._is_enough(best=next_beams[0][1]):
            next_beams = []
        self.live = [beam for _, beam in next_beams]
        return [index for index, _ in next_beams]

    def ranking(self) -> list[Hypothesis]:
        """Returns the hypotheses, best first. Before the search is done the live beams are ranked with them, as if they
        ended here.
        """
        found = self.finished + [self._hypothesis(beam) for beam in self.live]
        return sorted(found, key=lambda hypothesis: -hypothesis.score)

    def _is_enough(self, best: Beam) -> bool:
        """Returns whether the hypotheses kept are the answer, even though the ``best`` beam is live."""
        if len(self.finished) < self.beam_width:
            return False
        if self.early_stopping is True:
            return True
        never = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_new_tokens if never else best.length
        return self._by_length(best.score, length) <= self.finished[-1].score

    def _hypothesis(self, beam: Beam) -> Hypothesis:
        return Hypothesis(beam, self._by_length(beam.score, beam.length))

    def _by_length(self, score: float, length: int) -> float:
        divisor: float = max(length, 1) ** self.length_penalty
        return score / divisor


def num_candidates(beam_width: int, stop_ids: frozenset[int]) -> int:
    """Returns how many continuations a step of the search considers, and so how many candidates of one beam it may
    need.
    """
    return beam_width * max(2, 1 + len(stop_ids))
