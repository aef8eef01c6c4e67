"""Reservation: a sequence is admitted only when all KV blocks that it may ever need are free, and they are kept for it.

Servers without paging work like this. Nothing is preempted, and fewer sequences run at once. Two kinds differ in what a
sequence may need:

- ``"request"``: its prompt and ``max_new_tokens``;
- ``"context"``: ``max_model_len`` tokens, whatever it asks for, as where each sequence has a cache of the full length.

Reserved blocks are counted, and handed out when they are used. The count is of whole sequences: a block that two of
them share is reserved for both.
"""

from __future__ import annotations

from typing import Final

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.forks import Forks

KINDS: Final = ("request", "context")


class Reservations:
    """The blocks reserved for running sequences, by sequence, or by request where it has beams. Without a ``kind``
    nothing is reserved.
    """

    def __init__(self, kv: KVCacheManager, forks: Forks, kind: str | None, max_model_len: int | None):
        if kind is not None and kind not in KINDS:
            raise InvalidArgumentError(f"kv_reservation={kind!r}: expected {' or '.join(map(repr, KINDS))}, or None")
        if kind == "context" and max_model_len is None:
            raise InvalidArgumentError("kv_reservation='context' needs max_model_len, which is what it reserves")
        self.kind, self.max_model_len = kind, max_model_len
        self._kv, self._forks = kv, forks
        self._reserved: dict[Sequence | Request, int] = {}
        self.num_blocks = 0

    @property
    def num_free(self) -> int:
        """Returns how many blocks are neither held nor reserved."""
        return self._kv.num_free if self.kind is None else self._kv.pool.capacity - self.num_blocks

    def check_fits(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Refuses a request for which the whole cache is too small.

        :raises RequestTooLargeError: with the arithmetic.
        :raises InvalidArgumentError: where there are fewer slots than beams.
        """
        self._forks.check_fits(num_prompt_tokens, sampling.max_new_tokens, sampling.beam_width)
        if self.kind != "context":  # else what it may need is known to fit
            return
        needed = self._blocks_needed(num_prompt_tokens, sampling)
        if needed > self._kv.pool.capacity:
            raise RequestTooLargeError(
                f"kv_reservation='context' reserves {needed} blocks for a request with "
                f"max_model_len={self.max_model_len} and beam_width={sampling.beam_width}, the KV cache has "
                f"{self._kv.pool.capacity}: load with a lower max_model_len, or give the cache more memory "
                "(kv_cache_memory)",
                room=0,
            )

    def has_room(self, seq: Sequence) -> bool:
        """Returns whether all that the waiting ``seq`` may need is free."""
        if self.kind is None or _owner(seq) in self._reserved:
            return True
        return self._blocks_needed(seq.num_prompt_tokens, seq.request.sampling) <= self.num_free

    def reserve(self, seq: Sequence) -> None:
        """Reserves all that ``seq`` may need; it is given a slot."""
        if self.kind is not None and _owner(seq) not in self._reserved:
            num_blocks = self._blocks_needed(seq.num_prompt_tokens, seq.request.sampling)
            self._reserved[_owner(seq)] = num_blocks
            self.num_blocks += num_blocks

    def release(self, seq: Sequence) -> None:
        """Ends the reservation for ``seq``, which has no slot any more; for beams when no other has one either."""
        owner = _owner(seq)
        if owner in self._reserved and not (seq.request.has_beams and _any_runs(seq.request)):
            self.num_blocks -= self._reserved.pop(owner)

    def check_integrity(self, running: list[Sequence]) -> None:
        """Asserts that exactly the ``running`` sequences have reservations, and that the cache holds all of them."""
        owners = set() if self.kind is None else set(map(_owner, running))
        assert self._reserved.keys() == owners, f"reserved for {list(self._reserved)}, running {running}"
        assert self.num_blocks == sum(self._reserved.values()) <= self._kv.pool.capacity, f"{self.num_blocks} reserved"

    def _blocks_needed(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        num_tokens = num_prompt_tokens + sampling.max_new_tokens - 1  # the last token is never computed
        if self.kind == "context":
            assert self.max_model_len is not None
            num_tokens = max(num_tokens, self.max_model_len - 1)
        return self._forks.blocks_needed(num_prompt_tokens, num_tokens, sampling.beam_width)


def _owner(seq: Sequence) -> Sequence | Request:
    return seq.request if seq.request.has_beams else seq


def _any_runs(request: Request) -> bool:
    return any(seq.slot is not None for seq in request.sequences)
