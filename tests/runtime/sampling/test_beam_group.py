"""The steps at which the sequences of a beam search move."""

from __future__ import annotations

from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampled import Candidate
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.beam_group import BeamGroup

PROMPT = [5, 6, 7]
CANDIDATES = [Candidate(token_id, -0.5 * token_id) for token_id in range(10, 14)]


class Forks:
    """Copies tokens as :class:`~fastgen.runtime.scheduling.forks.Forks` does, and has no blocks."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.token_ids[:] = parent.token_ids
        child.num_computed_tokens = parent.num_computed_tokens

    def suspend(self, beam: Sequence) -> None:
        raise AssertionError(f"{beam} has a successor")


def computed(beam: Sequence) -> None:
    beam.num_computed_tokens = beam.num_tokens


def two_beams() -> tuple[BeamGroup, Sequence, Sequence]:
    """Returns a search whose two beams have a token each, which is not computed yet."""
    request = Request(0, PROMPT, SamplingParams(beam_width=2, max_new_tokens=9), arrival_s=0.0)
    group, (first, second) = BeamGroup(request, frozenset()), request.sequences
    computed(first)
    group.report(first, CANDIDATES)
    group.advance(Forks(), 0.0)
    assert [beam.token_ids[len(PROMPT) :] for beam in (first, second)] == [[10], [11]]
    return group, first, second


def test_a_search_moves_once_all_beams_have_reported() -> None:
    group, first, second = two_beams()
    for beam in (second, first):
        assert not group.ready
        computed(beam)
        group.report(beam, CANDIDATES)
    assert group.ready


def test_a_search_does_not_move_while_a_beam_that_has_reported_is_computed_again() -> None:
    """The blocks of a preempted beam are gone, and other beams may fork from it."""
    group, first, second = two_beams()
    computed(first)
    group.report(first, CANDIDATES)
    first.num_computed_tokens = 0  # preempted
    computed(second)
    group.report(second, CANDIDATES)
    assert not group.ready
    first.num_computed_tokens = len(PROMPT)
    assert not group.ready
    computed(first)
    assert group.ready
