"""The prompts of conversations, which grow by answers that are not known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.lab.workloads.request import PlannedRequest


class Conversations:
    """Holds what has been said in each session of a run.

    A load asks it for the prompt of each request just before it sends it, and gives it the answer after it has ended::

        prompt_ids = conversations.prompt(request)
        …
        conversations.answered(request, prompt_ids, answer_ids)

    A request without a session passes through unchanged. After an answer that failed, a session continues with the
    tokens of it that came.
    """

    def __init__(self) -> None:
        self._said: dict[str, list[int]] = {}
        # Where each message of a session ends.
        self._ends: dict[str, tuple[int, ...]] = {}

    def prompt(self, request: PlannedRequest) -> list[int]:
        """Returns the whole prompt of ``request``: what its session has said so far, if it ``continues``, and its own
        tokens.
        """
        if not request.continues or request.session is None:
            return list(request.prompt_ids)
        return [*self._said.get(request.session, ()), *request.prompt_ids]

    def message_ends(self, request: PlannedRequest) -> tuple[int, ...]:
        """Returns where in :meth:`prompt` each message before the last one ends."""
        return self._ends.get(request.session, ()) if request.continues and request.session is not None else ()

    def answered(self, request: PlannedRequest, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Adds ``prompt_ids``, which :meth:`prompt` returned for ``request``, and its answer to the session."""
        if request.session is not None:
            said = [*prompt_ids, *answer_ids]
            self._ends[request.session] = (*self.message_ends(request), len(prompt_ids), len(said))
            self._said[request.session] = said


def longest_sequence(requests: Sequence[PlannedRequest]) -> int:
    """Returns the most tokens that a prompt and its answer have together, if every answer has the length asked for;
    0 without requests.
    """
    said: dict[str, int] = {}
    longest = 0
    for request in requests:
        before = said.get(request.session, 0) if request.session is not None and request.continues else 0
        total = before + len(request.prompt_ids) + request.num_new_tokens
        if request.session is not None:
            said[request.session] = total
        longest = max(longest, total)
    return longest
