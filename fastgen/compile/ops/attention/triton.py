"""Paged attention on a GPU: one kernel for chunks, and one for decodes, which also joins the parts of split ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling, chunk_tiling, decode_tiling
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.spec import MAX_REGISTERS, Argument, KernelSpec, Value, power_of_2

# A sequence with at most this many new tokens is a decode (a token and its drafts), one with more is a chunk.
MAX_DECODE_QUERIES = 8

# Programs of chunks that take tiles in turn, as a multiple of those that the multiprocessors hold at once. With one,
# the last tiles end at different times. With four, a multiprocessor that is done takes another program.
CHUNK_PROGRAMS = 4

# Numbers by which the plan describes a decode's query tile.
_TILE_NUMBERS = 7

# Parts of a query tile that a program joins at once. More of them are joined in several levels.
_PARTS_AT_ONCE = 8


@dataclass(frozen=True)
class AttentionSpecs:
    """The kernels of one attention, in launch order, and how they are cut."""

    shape: AttentionShape
    chunk: Tiling
    decode: Tiling
    plan: KernelSpec
    chunks: KernelSpec
    decodes: KernelSpec

    def overlapped(self, arch: str) -> AttentionSpecs:
        """Returns the kernels as engines launch them on ``arch``."""
        launched = (overlapped(spec, arch) for spec in (self.plan, self.chunks, self.decodes))
        return AttentionSpecs(self.shape, self.chunk, self.decode, *launched)


@lru_cache(maxsize=256)  # layers of a model have few shapes
def attention_specs(
    shape: AttentionShape,
    *,
    max_num_seqs: int,
    arch: str,
    chunk: Tiling | None = None,
    decode: Tiling | None = None,
    needed_by: tuple[str, ...] = (),
) -> AttentionSpecs:
    """Returns the kernels for batches of at most ``max_num_seqs`` sequences; tile sizes are ``arch``'s unless given."""
    chunk = chunk or chunk_tiling(shape, arch)
    decode = decode or decode_tiling(shape, arch)
    return AttentionSpecs(
        shape,
        chunk,
        decode,
        _plan(shape, chunk, decode, max_num_seqs, needed_by),
        _attend("chunks", shape, chunk, needed_by),
        _attend("decodes", shape, decode, needed_by),
    )


def _plan(
    shape: AttentionShape, chunk: Tiling, decode: Tiling, max_num_seqs: int, needed_by: tuple[str, ...]
) -> KernelSpec:
    parameters = {
        "G": shape.group_size,
        "chunk_m": chunk.block_m,
        "decode_m": decode.block_m,
        "decode_n": decode.block_n,
        "window": shape.sliding_window,
        "block_s": power_of_2(max_num_seqs),
        "max_decode": MAX_DECODE_QUERIES,
        "tile_numbers": _TILE_NUMBERS,
    }
    arguments = (
        *(Argument(name, "i32", "in") for name in ("cu_seqlens_q", "seq_lens")),
        *(Argument(name, "i32", "out") for name in ("chunk_tiles", "decode_tiles", "shares", "counts", "arrivals")),
        *(Argument(name, "i32", "scalar") for name in ("num_seqs", "num_programs", "num_arrivals")),
    )
    return KernelSpec("attention_plan", "triton", parameters, arguments, {"num_warps": 4}, needed_by=needed_by)


def _attend(
    kind: Literal["chunks", "decodes"], shape: AttentionShape, tiling: Tiling, needed_by: tuple[str, ...]
) -> KernelSpec:
    d_parts, v_parts = _parts(shape.head_dim), _parts(shape.v_dim)
    v_is_k = shape.values_in_keys and (shape.v_dim == d_parts[0] or v_parts == d_parts)
    parameters: dict[str, Value] = {
        "kind": kind,
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "D": shape.head_dim,
        "DV": shape.v_dim,
        "P": shape.block_size,
        "dtype": shape.dtype,
        "window": shape.sliding_window,
        "alibi": shape.alibi,
        "alibi_dtype": shape.alibi_dtype if shape.alibi else None,
        "softcap": shape.softcap,
        "sinks": shape.sinks,
        "block_m": tiling.block_m,
        "block_n": tiling.block_n,
        "d_high": d_parts[0],
        "d_low": d_parts[1],
        "v_high": v_parts[0],
        "v_low": v_parts[1],
        "v_is_k": v_is_k,
        "ahead": kind == "chunks" and tiling.ahead and not v_is_k,
        "persistent": kind == "chunks" and tiling.persistent,
        "v_stride": shape.head_dim if shape.values_in_keys else shape.v_dim,
        "q_stride": shape.q_stride,
        "scale": float(shape.scale),
    }
    if kind == "decodes":
        parameters |= {"parts": _PARTS_AT_ONCE, "rows": _rows_at_once(shape, tiling), "tile_numbers": _TILE_NUMBERS}
        # Whether a query tile's entry is read while the tile before is computed, which takes registers.
        parameters["early_lists"] = _has_all_registers(tiling)
    lists = ("chunk_tiles",) if kind == "chunks" else ("decode_tiles", "shares")
    arguments = (
        *(Argument(name, shape.dtype, "in") for name in ("q", "k_cache", *(() if v_is_k else ("v_cache",)))),
        *(Argument(name, "i32", "in") for name in ("block_tables", "cu_seqlens_q")),
        *([Argument("seq_lens", "i32", "in")] if kind == "chunks" else []),
        *([Argument("slopes", shape.alibi_dtype, "in")] if shape.alibi else []),
        *([Argument("sinks", "fp32", "in")] if shape.sinks else []),
        *(Argument(name, "i32", "in") for name in (*lists, "counts")),
        Argument("out", shape.dtype, "out"),
        *([Argument(name, "fp32", "out") for name in _PARTS] if kind == "decodes" else []),
        *([Argument("arrivals", "i32", "out")] if kind == "decodes" else []),
        *(Argument(name, "i32", "scalar") for name in (("max_blocks",) if kind == "chunks" else _DECODE_NUMBERS)),
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "maxnreg": tiling.maxnreg}
    return KernelSpec("attention", "triton", parameters, arguments, options, needed_by=needed_by)


_PARTS = ("part", "part_best", "part_total")
_DECODE_NUMBERS = ("max_blocks", "num_seqs", "num_tokens")


def _rows_at_once(shape: AttentionShape, decode: Tiling) -> int:
    """Returns how many rows of :data:`_PARTS_AT_ONCE` parts a program reads at once: those of a decode without drafts,
    and at most 32 numbers a thread. Where a thread has few registers, it is one row."""
    rows = 32 * 32 * decode.num_warps // (_PARTS_AT_ONCE * power_of_2(shape.v_dim))
    return min(max(1, rows), power_of_2(shape.group_size), decode.block_m) if _has_all_registers(decode) else 1


def _has_all_registers(tiling: Tiling) -> bool:
    """Returns whether a thread may have as many registers as there can be, so that none must be spilled for others."""
    return tiling.maxnreg == MAX_REGISTERS


def _parts(size: int) -> tuple[int, int | None]:
    """Returns the powers of two, 16 at least, that a head is cut into: two with exactly its size, or one
    that holds it.
    """
    high = 1 << (size.bit_length() - 1)
    low = size - high
    return (high, low) if low >= 16 and low.bit_count() == 1 else (max(16, power_of_2(size)), None)


class AttentionPlan:
    """The work lists of a step and the buffers for parts, all static; one plan serves every layer of the same shape.

    It is filled on the device, from lengths that are never copied to the host. A *query tile* is ``block_m`` (query,
    head) pairs of one sequence and one KV head.

    ================  ===================  ========================================================================
    buffer            shape                what it holds
    ================  ===================  ========================================================================
    ``counts``        ``[3]``              query tiles of chunks; KV tiles of all decodes; a program's share of these
    ``chunk_tiles``   ``[…, 2]``           a query tile of a chunk: its sequence, its first row
    ``decode_tiles``  ``[…, 7]``           a query tile of a decode: sequence, first row, KV tiles before it, its own;
                                           of the sequence the first token in the batch, new tokens, length
    ``shares``        ``[programs, 9]``    the query tiles in which a program's share begins and ends; the first one's
                                           entry again, so that a program need not look it up
    ``part`` …        ``[2 programs, …]``  a program's result for a query tile that it shares with others
    ``arrivals``      ``[…, programs, K]`` at each level, how many parts are there to be joined to this program's
    ================  ===================  ========================================================================

    Worked example: one KV head, KV tiles of 64 keys, 3 programs, decodes at lengths 200, 64 and 500. They are 4 + 1 + 8
    KV tiles, so a share is 5. Program 0 does the first two sequences, program 1 the first five tiles of the third,
    program 2 the last three; whichever of these two ends last joins their parts.

    Why shares rather than a number of splits: with one sequence a program, some of P programs are idle when there are
    fewer sequences than P, or slightly more than a multiple of P; and any fixed number of splits is wrong for some
    batch. Even shares of all KV tiles end at the same time for every batch. The price is at most P − 1 cuts, so 2 P
    static buffers hold the parts of any batch. P is the number of programs that the multiprocessors hold at once
    (``Tiling.programs_per_sm``), divided by the KV heads. (After Sanovar et al., "Lean Attention", 2024.)
    """

    def __init__(
        self,
        specs: AttentionSpecs,
        load: Callable[[KernelSpec], Kernel],
        *,
        token_budget: int,
        max_num_seqs: int,
        num_sms: int,
        device: torch.device,
    ):
        self.shape, self.token_budget, self.max_num_seqs = specs.shape, token_budget, max_num_seqs
        self.chunk_m, self.decode_m = specs.chunk.block_m, specs.decode.block_m
        self.num_sms = num_sms
        self.num_programs = max(1, num_sms * specs.decode.programs_per_sm // self.shape.num_kv_heads)
        self._kernel = load(specs.plan)

        def lists(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def parts(*size: int) -> Tensor:
            size = (2 * self.num_programs, self.shape.num_kv_heads, self.decode_m, *size)
            return torch.zeros(size, dtype=torch.float32, device=device)

        self.counts, self.shares = lists(3), lists(self.num_programs, 2 + _TILE_NUMBERS)
        self.chunk_tiles = lists(max(1, self.max_chunk_tiles(token_budget)), 2)
        self.decode_tiles = lists(self.max_decode_tiles(token_budget), _TILE_NUMBERS)
        self.part, self.part_best, self.part_total = parts(self.shape.v_dim), parts(), parts()
        num_levels = 1
        while _PARTS_AT_ONCE**num_levels < self.num_programs:
            num_levels += 1
        self.arrivals = lists(num_levels, self.num_programs, self.shape.num_kv_heads)

    def max_chunk_tiles(self, num_tokens: int) -> int:
        """Returns the most query tiles of chunks, for one KV head, in a step of ``num_tokens``."""
        max_chunks = min(self.max_num_seqs, num_tokens // (MAX_DECODE_QUERIES + 1))
        return num_tokens * self.shape.group_size // self.chunk_m + max_chunks if max_chunks else 0

    def max_decode_tiles(self, num_tokens: int) -> int:
        """Returns the most query tiles of decodes, for one KV head, in a step of ``num_tokens``."""
        group_size, max_decodes = self.shape.group_size, min(self.max_num_seqs, num_tokens)
        of_tokens = num_tokens * -(-group_size // self.decode_m)
        of_rows = num_tokens * group_size // self.decode_m + max_decodes
        of_sequences = max_decodes * -(-MAX_DECODE_QUERIES * group_size // self.decode_m)
        return min(of_tokens, of_rows, of_sequences)

    def __call__(self, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
        """Fills the lists for a step: ``cu_seqlens_q [S+1]``, ``seq_lens [S]``, with ``S`` at most ``max_num_seqs``."""
        assert len(seq_lens) <= self.max_num_seqs, f"{len(seq_lens)} sequences, room for {self.max_num_seqs}"
        lists = (self.chunk_tiles, self.decode_tiles, self.shares, self.counts, self.arrivals)
        numbers = (len(seq_lens), self.num_programs, self.arrivals.numel())
        self._kernel((len(seq_lens),), cu_seqlens_q, seq_lens, *lists, *numbers)


class AttentionKernel:
    """Launches the two kernels of :func:`~fastgen.compile.ops.attention.reference.paged_attention`: for chunks, and for
    decodes.

    Both are launched for every batch, on grids that depend only on the number of tokens, padding included; the work is
    in the plan's lists. So a captured graph serves any mix of chunks and decodes.
    """

    def __init__(self, specs: AttentionSpecs, load: Callable[[KernelSpec], Kernel], plan: AttentionPlan):
        self._plan = plan
        self._chunks, self._decodes = load(specs.chunks), load(specs.decodes)
        # The most programs of chunks where they take tiles in turn. Another attention with this plan may have a program
        # for each tile.
        at_once = plan.num_sms * specs.chunk.programs_per_sm
        self._max_chunk_programs = max(1, CHUNK_PROGRAMS * at_once) if specs.chunk.persistent else None
        self._takes_values = any(argument.name == "v_cache" for argument in specs.chunks.arguments)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        *,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes ``out [T, N, Dv]``, zeros in rows of no sequence; shapes as for
        :func:`~fastgen.compile.ops.attention.reference.paged_attention`.

        The plan must have been filled for this batch. ``q``'s tokens have the stride ``q_stride``, the other tensors
        are contiguous, and ``v_cache`` is a view of ``k_cache`` with ``values_in_keys``. ``sinks [N]`` are fp32.
        """
        plan, num_kv_heads = self._plan, self._plan.shape.num_kv_heads
        assert len(q) <= plan.token_budget, f"{len(q)} tokens, room for {plan.token_budget}"
        caches = (k_cache, v_cache) if self._takes_values else (k_cache,)
        extras = [tensor for tensor in (slopes, sinks) if tensor is not None]
        inputs = (q, *caches, block_tables, cu_seqlens_q)
        parts = (plan.part, plan.part_best, plan.part_total, plan.arrivals)
        max_blocks = block_tables.shape[1]
        chunk_programs = plan.max_chunk_tiles(len(q)) * num_kv_heads
        chunk_grid = (min(chunk_programs, self._max_chunk_programs or chunk_programs),)
        self._chunks(chunk_grid, *inputs, seq_lens, *extras, plan.chunk_tiles, plan.counts, out, max_blocks)
        decode_grid = (plan.num_programs * num_kv_heads,)
        lists = (plan.decode_tiles, plan.shares, plan.counts)
        self._decodes(decode_grid, *inputs, *extras, *lists, out, *parts, max_blocks, len(seq_lens), len(q))
