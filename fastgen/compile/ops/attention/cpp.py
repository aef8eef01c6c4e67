"""Paged attention on the ``cpp`` target: one kernel for chunks and decodes alike."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.huge_pages import in_huge_pages
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.packed import ARCHES_WITH_PAIRS, LANES

_CPU = torch.device("cpu")


def attention_spec(shape: AttentionShape, arch: str, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The kernel for :class:`AttentionKernel`. ``arch`` is one of the C++ builder's; ``shape.dtype`` is the cache's,
    while queries and results are fp32. With a cache in bf16 an ``arch`` that adds two of its products at once does so,
    with queries and weights rounded to bf16 too, unless ``head_dim`` is odd or keys hold the values.
    """
    dtype, has_v = shape.dtype, not shape.values_in_keys
    in_pairs = arch in ARCHES_WITH_PAIRS and dtype == "bf16" and shape.head_dim % 2 == 0 and has_v
    arguments = (
        Argument("q", "fp32", "in"),
        *(Argument(name, dtype, "in") for name in ("k_cache", *(("v_cache",) if has_v else ()))),
        *(Argument(name, "i32", "in") for name in ("block_tables", "cu_seqlens_q", "seq_lens")),
        *([Argument("slopes", "fp32", "in")] if shape.alibi else []),
        Argument("out", "fp32", "out"),
        *(Argument(name, "i64", "scalar") for name in ("num_seqs", "num_tokens", "max_blocks", "q_stride")),
    )
    parameters: dict[str, Value] = {
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "D": shape.head_dim,
        "DV": shape.v_dim,
        "P": shape.block_size,
        "dtype": dtype,
        "pairs": in_pairs,
        "v_in_k": shape.values_in_keys,
        "window": shape.sliding_window,
        "alibi": shape.alibi,
        "alibi_dtype": shape.alibi_dtype if shape.alibi else None,
        "softcap": shape.softcap,
        "scale": float(shape.scale),
        "arch": arch,
    }
    return KernelSpec("attention", "cpp", parameters, arguments, needed_by=needed_by)


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    latent_dim: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> tuple[Tensor, Tensor]:
    """A cache as the kernel wants it, seen as everybody sees it: ``k [B, P, K, D]``, ``v [B, P, K, D]``, or with a
    ``latent_dim`` the first so many features of the keys.

    In memory a block's keys lie ``[K, D, P]``, so that a vector of keys is loaded at once, and values ``[K, P, D]``,
    all in huge pages: a sequence's blocks lie anywhere, and in small pages finding one takes as long as reading it.
    """
    size_bytes = num_blocks * num_kv_heads * head_dim * block_size * dtype.itemsize
    k = (
        in_huge_pages(size_bytes, device)
        .view(dtype)
        .view(num_blocks, num_kv_heads, head_dim, block_size)
        .permute(0, 3, 1, 2)
    )
    if latent_dim is not None:
        return k, k[..., :latent_dim]
    v = in_huge_pages(size_bytes, device).view(dtype).view(num_blocks, num_kv_heads, block_size, head_dim)
    return k, v.transpose(1, 2)


def scratch_bytes(shape: AttentionShape, arch: str, *, num_threads: int, num_tokens: int, length: int) -> int:
    """At most what a kernel of :func:`attention_spec` holds by itself, after steps of ``num_tokens`` tokens over
    sequences of up to ``length``: what each thread works on, and the parts of sequences that threads share.

    As the templates have it: a task of ``8 · MAX_ROWS`` rows is shared out by segments of ``8 · TILE`` keys where they
    are more than a quarter of a thread's share of all work, so fewer than ``4 · num_threads`` of them are.
    """
    lanes, most_rows = LANES[arch], 8 * {16: 6, 8: 2, 4: 4}[LANES[arch]]
    tile, features = 4 * lanes, -(-shape.v_dim // lanes) * lanes
    state = 4 * (2 * lanes + features)
    rows = most_rows * (4 * (shape.head_dim + tile + 1) + 2 * state)
    thread = rows + 4 * tile * (shape.head_dim + features)
    num_rows = min(4 * num_threads * most_rows, num_tokens * shape.num_heads)
    return num_threads * thread + -(-length // (8 * tile)) * num_rows * state


class AttentionKernel:
    """:func:`fastgen.compile.ops.attention.reference.paged_attention` by a kernel of :func:`attention_spec`."""

    def __init__(self, kernel: Kernel, slopes: Tensor | None = None):
        self._kernel = kernel
        self._slopes = () if slopes is None else (slopes.float().contiguous(),)
        self._takes_values = not kernel.spec.parameters["v_in_k"]

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        """Shapes as there; caches of :func:`empty_cache`. ``q``'s tokens may lie apart, all else is contiguous.
        ``q`` and ``out`` are fp32."""
        self._kernel((), *self.arguments(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, out))

    def arguments(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> list[Tensor | int]:
        """The kernel's own arguments for these."""
        caches = (k_cache, v_cache) if self._takes_values else (k_cache,)
        tensors = (q, *caches, block_tables, cu_seqlens_q, seq_lens, *self._slopes, out)
        return [*tensors, len(seq_lens), len(q), block_tables.shape[1], q.stride(0)]
