"""Ops that C++ and Triton kernels compute in the same way: norms, and all between the projections of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from fastgen.compile.backends.modules.stored import NormParameters
from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.weights.rows import Rows

# Norms, rotates and writes to the cache, given its tensors by position and the weights it needs by name.
Prepare = Callable[..., None]
# Attends, given ``q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, out``.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class NormLaunch(Protocol):
    """Launches a norm; with a ``residual``, ``x`` is added to that first."""

    def empty_out(self, x: Tensor) -> Tensor:
        """Returns room for the norm of ``x [T, H]``."""

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, residual: Tensor | None = None
    ) -> None: ...


class Norm(nn.Module):
    """The norm of each row of ``x [T, H]``."""

    def __init__(self, launch: NormLaunch, parameters: NormParameters):
        super().__init__()
        self.weight, self.bias = parameters.weight, parameters.bias
        self._launch = launch

    def forward(self, x: Tensor) -> Tensor:
        out = self._launch.empty_out(x)
        self._launch(x.contiguous(), self.weight, self.bias, out)
        return out


class AddNorm(nn.Module):
    """Adds ``scale * y`` to ``x`` in place and norms the sum, in one kernel."""

    def __init__(self, launch: NormLaunch, norm: NormParameters):
        super().__init__()
        self.norm = norm
        self._launch = launch

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self._launch.empty_out(y)
        self._launch(y, self.norm.weight, self.norm.bias, out, x)
        return x, out


class Attention(nn.Module):
    """``prepare`` norms, rotates and writes to the cache in one kernel; ``attend`` follows."""

    def __init__(
        self,
        prepare: Prepare,
        attend: Attend,
        *,
        num_heads: int,
        head_dim: int,
        q_norm: NormParameters | None = None,
        k_norm: NormParameters | None = None,
    ):
        super().__init__()
        self.num_heads, self.head_dim, self.q_norm, self.k_norm = num_heads, head_dim, q_norm, k_norm
        self._prepare, self._attend = prepare, attend

    def forward(self, qkv: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        given = {} if cos_sin is None else {"cos_sin": cos_sin}
        given |= named_weights("q_norm", self.q_norm) | named_weights("k_norm", self.k_norm)
        self._prepare(qkv, positions, cache.k, cache.v, cache.slots, **given)
        return self.attend(qkv, cache)

    def attend(self, qkv: Tensor, cache: PagedView) -> Tensor:
        """Returns the output ``[T, N, Dv]`` of prepared queries, whose keys and values are in the cache already."""
        q = qkv.view(len(qkv), -1, self.head_dim)[:, : self.num_heads]
        mixed = q.new_empty(q.shape)
        self._attend(q, cache.k, cache.v, cache.block_tables, cache.cu_seqlens_q, cache.seq_lens, mixed)
        return mixed


class MapsInto(Protocol):
    """A map of its own for each head, by kernels or the library."""

    out_features: int

    @property
    def slot(self) -> Tensor | Rows:
        """Returns the place of the checkpoint's tensor."""

    def into(self, x: Tensor, out: Tensor) -> None:
        """Maps ``x [T, N, in]`` into ``out [T, N, out]``; each row of ``out`` may lie apart."""


class LatentAttention(nn.Module):
    """Latent attention in its absorbed form: ``prepare`` norms, rotates and writes to the cache in one kernel."""

    def __init__(
        self,
        prepare: Prepare,
        attend: Attend,
        kv_norm: NormParameters,
        k_up: MapsInto,
        v_up: MapsInto,
        *,
        nope_dim: int,
        rank: int,
    ):
        super().__init__()
        self.kv_norm, self.k_up, self.v_up, self.nope_dim, self.rank = kv_norm, k_up, v_up, nope_dim, rank
        self._prepare, self._attend = prepare, attend

    def forward(self, q: Tensor, kv: Tensor, cos_sin: Tensor, positions: Tensor, cache: PagedView) -> Tensor:
        mapped = q.new_empty(*q.shape[:2], kv.shape[1])
        given = {"cos_sin": cos_sin} | named_weights("kv_norm", self.kv_norm)
        self._prepare(kv, q, mapped, positions, cache.k, cache.slots, **given)
        self.k_up.into(q[..., : self.nope_dim], mapped[..., : self.rank])
        mixed = q.new_empty(*q.shape[:2], self.rank)
        self._attend(mapped, cache.k, cache.v, cache.block_tables, cache.cu_seqlens_q, cache.seq_lens, mixed)
        out = q.new_empty(*q.shape[:2], self.v_up.out_features)
        self.v_up.into(mixed, out)
        return out


def named_weights(prefix: str, norm: NormParameters | Norm | None) -> dict[str, Tensor]:
    """Returns the weights of a norm by the names of a kernel's arguments."""
    found = {} if norm is None else {"weight": norm.weight, "bias": norm.bias}
    return {f"{prefix}_{name}": each for name, each in found.items() if each is not None}
