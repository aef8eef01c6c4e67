"""The sizes of an engine: all known, or as the user asked for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. ``num_blocks`` counts the padding block; ``max_model_len`` is prompt and answer together;
    ``num_draft_tokens`` is 0 if nothing is drafted.
    """

    token_budget: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    num_kv_groups: int
    prefix_caching: bool = True
    num_draft_tokens: int = 0
    # A kind of :mod:`fastgen.runtime.scheduling.reservations`.
    kv_reservation: str | None = None

    @property
    def max_rows(self) -> int:
        """Returns how many rows of a step may need logits: a token of each sequence, and its drafts."""
        return min(self.token_budget, self.max_num_seqs * (1 + self.num_draft_tokens))

    @property
    def max_cached_len(self) -> int:
        """Returns how many tokens of the longest sequence are computed: all but the last, which nothing follows."""
        return max(1, self.max_model_len - 1)

    @property
    def max_blocks(self) -> int:
        """Returns how many blocks the longest sequence has in one KV group."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class AskedSizes:
    """Sizes that the user asked for; those left open are ``None``."""

    kv_cache_memory: int | None = None
    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    num_draft_tokens: int = 0
    kv_reservation: str | None = None
