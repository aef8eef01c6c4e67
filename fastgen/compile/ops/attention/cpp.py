"""Paged attention in C++: one kernel for both chunks and decodes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.host.huge_pages import in_huge_pages
from fastgen.compile.host.workspace import Workspace
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.packed import ARCHES_WITH_BF16_DOT, ARCHES_WITH_TILES, LANES

_CPU = torch.device("cpu")
_WORKSPACE_SIZES = ("workspace_bytes", "num_threads", "scratch_bytes", "max_tasks", "max_pieces")
# As in ``attention_tasks.h``: rows by lanes, and the sizes of structs.
_MAX_ROWS = {16: 6, 8: 2, 4: 4}
_TASK_BYTES, _PIECE_BYTES = 64, 24
_TILE_FEATURES = 32  # that a matrix unit multiplies at once


def attention_spec(shape: AttentionShape, arch: str, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`AttentionKernel`. ``arch`` is one of the C++ builder's; ``shape.dtype`` is the
    cache's, while queries and results are fp32. Bf16 dots multiply a cache :func:`in_pairs`: queries and weights are
    rounded to bf16 too. A matrix unit, where there is one, multiplies these if ``head_dim`` and ``v_dim`` are multiples
    of 32.
    """
    dtype, has_v = shape.dtype, not shape.values_in_keys
    bf16_dot = has_v and in_pairs(arch, dtype, shape.head_dim, shape.block_size)
    fits_tiles = shape.head_dim % _TILE_FEATURES == 0 and shape.v_dim % _TILE_FEATURES == 0
    tiles = bf16_dot and arch in ARCHES_WITH_TILES and fits_tiles
    arguments = (
        Argument("q", "fp32", "in"),
        *(Argument(name, dtype, "in") for name in ("k_cache", *(("v_cache",) if has_v else ()))),
        *(Argument(name, "i32", "in") for name in ("block_tables", "cu_seqlens_q", "seq_lens")),
        *([Argument("slopes", "fp32", "in")] if shape.alibi else []),
        Argument("out", "fp32", "out"),
        *(Argument(name, "i64", "scalar") for name in ("num_seqs", "num_tokens", "max_blocks", "q_stride")),
        Argument("workspace", "u8", "out"),
        *(Argument(name, "i64", "scalar") for name in _WORKSPACE_SIZES),
    )
    parameters: dict[str, Value] = {
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "D": shape.head_dim,
        "DV": shape.v_dim,
        "P": shape.block_size,
        "dtype": dtype,
        "bf16_dot": bf16_dot,
        "tiles": tiles or None,
        "v_in_k": shape.values_in_keys,
        "window": shape.sliding_window,
        "alibi": shape.alibi,
        "alibi_dtype": shape.alibi_dtype if shape.alibi else None,
        "softcap": shape.softcap,
        "scale": float(shape.scale),
        "arch": arch,
    }
    return KernelSpec("attention", "cpp", parameters, arguments, needed_by=needed_by)


def in_pairs(arch: str, dtype: str, head_dim: int, block_size: int) -> bool:
    """Returns whether a cache of keys and values holds pairs, which bf16 dots multiply, where kernels are built for
    ``arch``: those in bf16, unless features or the tokens of a block are odd in number. ``dtype`` is a short name.
    """
    return arch in ARCHES_WITH_BF16_DOT and dtype == "bf16" and head_dim % 2 == 0 and block_size % 2 == 0


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
    """Returns a zeroed cache in the kernel's memory layout: ``k [B, P, K, D]`` and ``v [B, P, K, D]``. With a
    ``latent_dim`` ``v`` is a view of the first ``latent_dim`` features of the keys.

    In memory a block's keys are ``[K, D, P]``, so that a vector of keys is loaded at once, and its values ``[K, P,
    D]``. Kernels of a cache :func:`in_pairs` write ``[K, D/2, P, 2]`` and ``[K, P/2, D, 2]`` there; only whole blocks
    of what is returned mean anything then. Both are in huge pages: a sequence's blocks are scattered, and in small
    pages address translation would take as long as reading them.
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


@dataclass(frozen=True)
class AttentionLimits:
    """The largest step that a kernel is given: tokens, sequences, tokens of the longest sequence; and the threads that
    work at it."""

    max_tokens: int
    max_num_seqs: int
    max_length: int
    num_threads: int


@dataclass(frozen=True)
class _WorkspaceSizes:
    """The layout of a kernel's workspace: see ``Workspace`` in ``attention_pieces.h``."""

    workspace_bytes: int
    num_threads: int
    scratch_bytes: int
    max_tasks: int
    max_pieces: int

    @classmethod
    def of(cls, spec: KernelSpec, limits: AttentionLimits) -> _WorkspaceSizes:
        """Returns the sizes with which the kernel of ``spec`` serves steps within ``limits``.

        A task is up to ``8 * MAX_ROWS`` rows. One is shared out by segments of ``8 * TILE`` keys if it is more than a
        quarter of a thread's share of all work, so fewer than ``4 * num_threads`` of them are.
        """
        n, k, d, dv = (cast(int, spec.parameters[name]) for name in ("N", "K", "D", "DV"))
        lanes, threads, num_tokens = LANES[str(spec.parameters["arch"])], limits.num_threads, limits.max_tokens
        task_rows, tile, features = 8 * _MAX_ROWS[lanes], 4 * lanes, -(-dv // lanes) * lanes
        state = 4 * (2 * lanes + features)
        parts = (64, 4 * task_rows * d, 2 * task_rows * state, 4 * task_rows * tile, 4 * (task_rows + lanes))
        buffers = 4 * tile * (d + features)
        scratch = sum(map(_up_to_64, (*parts, buffers)))
        tasks = (num_tokens * (n // k) // task_rows + min(limits.max_num_seqs, num_tokens)) * k
        segments = -(-limits.max_length // (8 * tile))
        pieces = tasks + 4 * threads * segments
        states = segments * min(4 * threads * task_rows, num_tokens * n)
        lists = _up_to_64(_TASK_BYTES * tasks) + _up_to_64(_PIECE_BYTES * pieces)
        return cls(threads * scratch + lists + states * state, threads, scratch, tasks, pieces)


def _up_to_64(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64


class AttentionKernel:
    """Launches a kernel of :func:`attention_spec`; see
    :func:`fastgen.compile.ops.attention.reference.paged_attention`.

    It works in ``workspace``, which other attentions may share: they run one after the other. Results depend neither on
    the ``limits`` nor on the number of threads.
    """

    def __init__(self, kernel: Kernel, limits: AttentionLimits, workspace: Workspace, slopes: Tensor | None = None):
        self._kernel, self._limits, self._workspace = kernel, limits, workspace
        sizes = _WorkspaceSizes.of(kernel.spec, limits)
        workspace.require(sizes.workspace_bytes)
        self._sizes = astuple(sizes)
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
        """Takes the reference's shapes, with caches of :func:`empty_cache`. ``q``'s tokens may have any stride, the
        other tensors are contiguous. ``q`` and ``out`` are fp32."""
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
        """Returns the kernel's arguments for these tensors. Raises ``ValueError`` beyond the limits."""
        if len(q) > self._limits.max_tokens or len(seq_lens) > self._limits.max_num_seqs:
            raise ValueError(f"{len(q)} tokens of {len(seq_lens)} sequences: made for {self._limits}")
        caches = (k_cache, v_cache) if self._takes_values else (k_cache,)
        tensors = (q, *caches, block_tables, cu_seqlens_q, seq_lens, *self._slopes, out)
        step = (len(seq_lens), len(q), block_tables.shape[1], q.stride(0))
        return [*tensors, *step, self._workspace.memory, *self._sizes]
