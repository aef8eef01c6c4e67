"""The shape and the features of an attention, with every number known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AttentionShape:
    """Holds everything that a recipe says about an attention, with every number known.

    ``dtype`` is the short name of the dtype of queries, cache and output. A value has ``v_dim`` features; with
    ``values_in_keys`` they are the first of the key's and are not stored again (latent attention). ``q_stride`` is the
    distance from a token's queries to the next token's, by default ``num_heads * head_dim``. ``alibi`` says whether the
    scores' scale multiplies the bias too, ``alibi_dtype`` what the bias is rounded to.

    Raises ``ValueError`` for impossible sizes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scale: float
    v_dim: int = 0
    values_in_keys: bool = False
    q_stride: int = 0
    sliding_window: int | None = None
    alibi: Literal["plain", "scaled"] | None = None
    alibi_dtype: str = "fp32"
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_dim", self.v_dim or self.head_dim)
        object.__setattr__(self, "q_stride", self.q_stride or self.num_heads * self.head_dim)
        window = 1 if self.sliding_window is None else self.sliding_window
        sizes = (self.num_kv_heads, self.head_dim, self.v_dim, self.block_size, window)
        if min(sizes) < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self}: sizes must be positive, and num_heads a multiple of num_kv_heads")
        if self.values_in_keys and self.v_dim > self.head_dim:
            raise ValueError(f"{self}: values of {self.v_dim} features cannot lie in keys of {self.head_dim}")
        if self.q_stride < self.num_heads * self.head_dim:
            raise ValueError(f"{self}: tokens' queries overlap")
        if self.scale <= 0:
            raise ValueError(f"{self}: the scale must be positive")

    @property
    def group_size(self) -> int:
        """Returns the number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads
