"""Speculative decoding by prompt lookup: drafts come from the sequence's own earlier tokens.

Where the last n tokens of a sequence occurred in it before, the tokens that followed them are proposed as drafts::

    tokens    5  9  2  7  4  1  5  9  2
              -------           -------    the last three stood at the beginning,
                       7  4  1  5          and with k = 4 these are the drafts

The drafts are computed with the pending token as one ragged chunk in which every row gets logits. Each row is sampled
as it would be without drafts. A draft is accepted while it equals the token that was sampled before it. So the tokens
are the same as without drafts, and a step that accepts ``a`` of them gives ``a + 1`` tokens.

After "Prompt Lookup Decoding" (Saxena, 2023) and "Inference with Reference: Lossless Acceleration of Large Language
Models" (Yang et al., 2023), which copies from a text beside the prompt. The copied tokens may overlap their copy, as in
LZ77 (Ziv and Lempel, 1977), so a text that repeats a single word gets all its drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from fastgen.runtime.requests.request import TO_COME, Sequence
from fastgen.runtime.scheduling.schedule import ScheduledTokens

# Returns at most so many guesses of what follows the tokens of a decode.
ProposeDrafts = Callable[[Sequence, int], SequenceOf[int]]

# Sizes of the n-grams that are looked up. A single token is no evidence of what comes next.
MIN_NGRAM, MAX_NGRAM = 2, 3
# Most tokens of a long prompt that one step indexes, in about a millisecond.
INDEXED_AT_ONCE = 1024
_TOKEN_BITS = 32


class NgramIndex:
    """Holds where each n-gram of a sequence occurred last. It follows the growing sequence in constant time a token,
    and takes about 200 bytes for each token.
    """

    def __init__(self) -> None:
        sizes = range(MAX_NGRAM, MIN_NGRAM - 1, -1)
        # For each size: the mask of its bits, and by n-gram the position of the token that followed it.
        self._followers: list[tuple[int, dict[int, int]]] = [((1 << size * _TOKEN_BITS) - 1, {}) for size in sizes]
        self._num_indexed = 0
        # The last tokens as one number, each plus 1, so that too few tokens match no n-gram. Unlike a tuple, a number
        # is not visited by garbage collection.
        self._last = 0

    def find(self, token_ids: list[int]) -> int | None:
        """Returns the position of the token that followed an earlier occurrence of the last tokens of ``token_ids``:
        for the longest n-gram that occurred, its latest occurrence. ``None`` where there is none, or the index still
        lags behind.
        """
        end = min(len(token_ids), self._num_indexed + INDEXED_AT_ONCE)
        last, longest = self._last, self._followers[0][0]
        for place in range(self._num_indexed, end):
            for bits, followers in self._followers:
                followers[last & bits] = place
            last = (last << _TOKEN_BITS | token_ids[place] + 1) & longest
        self._num_indexed, self._last = end, last
        if end < len(token_ids):
            return None
        for bits, followers in self._followers:
            if (found := followers.get(last & bits)) is not None:
                return found
        return None


class NgramDrafter:
    """Proposes drafts for the decodes of an engine, at most ``num_draft_tokens`` for each.

    A sequence gets as many drafts as were right the last time, at least one, and twice as many where all were right. So
    text that does not repeat itself costs one row more where an n-gram happens to occur again, and nothing elsewhere.
    Sequences with a ``response_format``, beams, and sequences that ``may_draft`` refuses get none.
    """

    def __init__(self, num_draft_tokens: int, may_draft: Callable[[Sequence], bool] = lambda sequence: True):
        self.num_draft_tokens, self._may_draft = num_draft_tokens, may_draft
        self._of_sequence: dict[Sequence, _Drafts] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> SequenceOf[int]:
        """Returns at most ``max_tokens`` drafts for what follows the tokens of ``sequence``, a decode.

        The token sampled after the last draft never exceeds ``max_new_tokens``. The result depends on the tokens of the
        sequence and on the steps in which drafts were requested before.
        """
        sampling = sequence.request.sampling
        num_generated = sequence.num_tokens - sequence.num_prompt_tokens
        most = min(max_tokens, sampling.max_new_tokens - num_generated - 1)
        if most < 1 or not self.may_draft(sequence):
            return ()
        drafts = self._of_sequence.get(sequence)
        if drafts is None:
            drafts = self._of_sequence[sequence] = _Drafts(self.num_draft_tokens)
        return drafts.next(sequence.token_ids, most)

    def may_draft(self, sequence: Sequence) -> bool:
        """Returns whether ``sequence`` can get drafts at all."""
        return sequence.matcher is None and not sequence.request.has_beams and self._may_draft(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of ``sequence``, which has ended."""
        self._of_sequence.pop(sequence, None)


class _Drafts:
    """Holds the state of one sequence."""

    __slots__ = ("_end", "_index", "_last", "_limit", "_most")

    def __init__(self, most: int):
        self._index = NgramIndex()
        self._limit = self._most = most
        self._last: list[int] = []
        # The position of the first of the ``_last`` drafts.
        self._end = 0

    def next(self, token_ids: list[int], max_tokens: int) -> list[int]:
        if self._last and len(token_ids) > self._end:
            self._judge(token_ids)
        place = self._index.find(token_ids)
        if place is None:
            return []
        period = len(token_ids) - place
        self._last = [token_ids[place + ahead % period] for ahead in range(min(self._limit, max_tokens))]
        self._end = len(token_ids)
        return self._last

    def _judge(self, token_ids: list[int]) -> None:
        came = token_ids[self._end : self._end + len(self._last)]
        num_right = 0
        while num_right < len(came) and came[num_right] == self._last[num_right]:
            num_right += 1
        all_right = num_right == len(self._last)
        self._limit = min(max(self._limit, 2 * num_right), self._most) if all_right else max(num_right, 1)
        self._last = []


class DraftedSequence:
    """A sequence as it would be with ``drafts`` generated, as the sampler sees it for the row of the last draft."""

    # Sequences with a matcher get no drafts: only the step that samples a token knows what may follow it.
    matcher = None

    __slots__ = ("drafts", "index", "num_prompt_tokens", "num_tokens", "request", "sequence")

    def __init__(self, sequence: Sequence, drafts: SequenceOf[int]):
        self.sequence, self.drafts = sequence, drafts
        self.request, self.index = sequence.request, sequence.index
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.num_tokens = sequence.num_tokens + len(drafts)

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids, *self.drafts]


# The sequence, perhaps with drafts, that a row of logits is sampled for.
SampledSequence = Sequence | DraftedSequence


def owner(row: SampledSequence) -> Sequence:
    """Returns the sequence that a row belongs to."""
    return row if isinstance(row, Sequence) else row.sequence


def with_drafts(
    decodes: list[Sequence], num_places: int, propose: ProposeDrafts, allocate: Callable[[Sequence, int], bool]
) -> tuple[list[Sequence], list[ScheduledTokens]]:
    """Returns the decodes without drafts (beams have none), and the decodes with drafts as chunks, with at most
    ``num_places`` drafts in all. There are none where ``allocate`` has no blocks for so many tokens.
    """
    plain, drafted = [], []
    for seq in decodes:
        may_draft = num_places and not seq.request.has_beams and seq.token_ids[-1] != TO_COME
        drafts = tuple(propose(seq, num_places)) if may_draft else ()
        if drafts and allocate(seq, 1 + len(drafts)):
            drafted.append(ScheduledTokens(seq, seq.num_computed_tokens, 1 + len(drafts), True, drafts))
            num_places -= len(drafts)
        else:
            plain.append(seq)
    return plain, drafted
