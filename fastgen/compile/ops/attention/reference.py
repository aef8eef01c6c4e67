"""Causal attention of a ragged batch over a paged KV cache: prompt chunks and decodes in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.attention.alibi import Alibi, alibi_bias
from fastgen.compile.ops.attention.specs import MAX_DECODE_QUERIES, AttentionSpecs
from fastgen.compile.ops.softcap.reference import soft_cap
from fastgen.compile.spec import KernelSpec


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    alibi: Alibi | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each query attends to the keys of its own sequence up to its own position.

    ``q [T, N, D]``, ``k_cache [B, P, K, D]``, ``v_cache [B, P, K, Dv]``, ``block_tables [S, max_blocks]``,
    ``cu_seqlens_q [S+1]``, ``seq_lens [S]`` (cached plus new tokens, the new ones already written). Query ``i`` of a
    sequence with ``n`` new tokens stands at position ``seq_len − n + i``; with a ``sliding_window`` of ``w`` it sees
    the last ``w`` positions, its own included. Query head ``h`` reads KV head ``h // (N/K)``. Rows of no sequence
    (padding) are zero.

    A score is ``q·k * scale``, plus the ``alibi`` bias of its head and key, which comes before the scale where it is
    ``scaled``; a ``softcap`` ``c`` makes ``c * tanh(score / c)`` of it. ``sinks [N]`` are one score more for each head,
    to which no value belongs (gpt-oss, 2025). Scores and softmax in fp32; returns ``[T, N, Dv]`` in ``q``'s dtype.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads, v_dim = v_cache.shape[1:]
    out = q.new_zeros(len(q), num_heads, v_dim)
    starts = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        num_new = end - start
        if num_new == 0:
            continue
        first_key = 0 if sliding_window is None else max(0, seq_len - num_new - sliding_window + 1)
        first_block = first_key // block_size
        blocks = block_tables[row, first_block : -(-seq_len // block_size)].long()
        first_key = first_block * block_size
        k = k_cache[blocks].flatten(0, 1)[: seq_len - first_key].float()
        v = v_cache[blocks].flatten(0, 1)[: seq_len - first_key].float()
        query_pos = torch.arange(seq_len - num_new, seq_len, device=q.device).unsqueeze(1)
        key_pos = torch.arange(first_key, seq_len, device=q.device)
        # [n, N, D] -> [K, N/K, n, D]: the query heads of one KV head lie together
        queries = q[start:end].float().view(num_new, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.einsum("kgqd,skd->kgqs", queries, k)
        if alibi is None:
            scores *= scale
        else:
            bias = alibi_bias(alibi.slopes, key_pos).view(num_kv_heads, -1, 1, len(key_pos))
            scores = (scores + bias) * scale if alibi.scaled else scores * scale + bias
        if softcap is not None:
            scores = soft_cap(scores, softcap)
        hidden = key_pos > query_pos
        if sliding_window is not None:
            hidden |= key_pos <= query_pos - sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        probs = scores.softmax(-1)[..., : len(key_pos)]
        mixed = torch.einsum("kgqs,skd->qkgd", probs, v)
        out[start:end] = mixed.reshape(num_new, num_heads, v_dim).to(q.dtype)
    return out


class AttentionPlan:
    """The work lists of a step and the room for parts, in static buffers; serves every layer of the same shape.

    Filled on the device, from lengths that never come to the host. A *query tile* is ``block_m`` (query, head) pairs of
    one sequence and one KV head.

    ================  ===================  ========================================================================
    buffer            shape                what it holds
    ================  ===================  ========================================================================
    ``counts``        ``[3]``              query tiles of chunks; KV tiles of all decodes; a program's share of these
    ``chunk_tiles``   ``[…, 2]``           a query tile of a chunk: its sequence, its first row
    ``decode_tiles``  ``[…, 4]``           a query tile of a decode: sequence, first row, KV tiles before it, its own
    ``shares``        ``[programs, 2]``    the query tiles in which a program's share begins and ends
    ``part`` …        ``[2 programs, …]``  what a program computed of a query tile that it shares with others
    ================  ===================  ========================================================================

    Worked example: one KV head, KV tiles of 64 keys, 3 programs, decodes at lengths 200, 64 and 500. They are 4 + 1 + 8
    KV tiles, so a share is 5. Program 0 does the first two sequences, program 1 the first five tiles of the third,
    program 2 the last three; their two parts are combined.

    Why shares rather than a number of splits: with P programs and W KV tiles, whole sequences leave programs idle when
    there are fewer of them than P or when their number is a little above a multiple of P, and any fixed number of
    splits is wrong for some batch. Even shares of the whole line end at the same time for every batch; the price is at
    most P − 1 cuts, whose parts are a static 2 P slots whatever the batch. P is what the multiprocessors hold at once
    (``Tiling.programs_per_sm``), over the KV heads. (After Sanovar et al., "Lean Attention", 2024.)
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
        self.num_programs = max(1, num_sms * specs.decode.programs_per_sm // self.shape.num_kv_heads)
        self._kernel = load(specs.plan)

        def lists(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def parts(*size: int) -> Tensor:
            size = (2 * self.num_programs, self.shape.num_kv_heads, self.decode_m, *size)
            return torch.zeros(size, dtype=torch.float32, device=device)

        self.counts, self.shares = lists(3), lists(self.num_programs, 2)
        self.chunk_tiles = lists(max(1, self.max_chunk_tiles(token_budget)), 2)
        self.decode_tiles = lists(self.max_decode_tiles(token_budget), 4)
        self.part, self.part_best, self.part_total = parts(self.shape.v_dim), parts(), parts()

    def max_chunk_tiles(self, num_tokens: int) -> int:
        """Query tiles of chunks, for one KV head, that ``num_tokens`` can make at most."""
        max_chunks = min(self.max_num_seqs, num_tokens // (MAX_DECODE_QUERIES + 1))
        return num_tokens * self.shape.group_size // self.chunk_m + max_chunks if max_chunks else 0

    def max_decode_tiles(self, num_tokens: int) -> int:
        """Query tiles of decodes, for one KV head, that ``num_tokens`` can make at most."""
        group_size, max_decodes = self.shape.group_size, min(self.max_num_seqs, num_tokens)
        of_tokens = num_tokens * -(-group_size // self.decode_m)
        of_rows = num_tokens * group_size // self.decode_m + max_decodes
        of_sequences = max_decodes * -(-MAX_DECODE_QUERIES * group_size // self.decode_m)
        return min(of_tokens, of_rows, of_sequences)

    def __call__(self, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
        """Fill the lists for a step: ``cu_seqlens_q [S+1]``, ``seq_lens [S]``, with ``S`` at most ``max_num_seqs``."""
        assert len(seq_lens) <= self.max_num_seqs, f"{len(seq_lens)} sequences, room for {self.max_num_seqs}"
        lists = (self.chunk_tiles, self.decode_tiles, self.shares, self.counts)
        self._kernel((len(seq_lens),), cu_seqlens_q, seq_lens, *lists, len(seq_lens), self.num_programs)


class PagedAttention:
    """:func:`paged_attention` by three kernels: chunks, decodes, and what joins decodes' parts.

    All are launched for every batch, on grids that depend on the number of tokens, padding included, and on nothing
    that a batch holds; what they do is in the plan's lists. So a captured graph serves any mix.
    """

    def __init__(self, specs: AttentionSpecs, load: Callable[[KernelSpec], Kernel], plan: AttentionPlan):
        self._plan = plan
        self._chunks, self._decodes, self._combine = load(specs.chunks), load(specs.decodes), load(specs.combine)
        self._takes_values = any(argument.name == "v_cache" for argument in specs.chunks.arguments)
        # one for each border between two programs' shares, KV head, and few rows of a query tile
        rows = int(specs.combine.parameters["rows"] or 1)
        self._num_combines = max(1, plan.num_programs - 1) * plan.shape.num_kv_heads * (plan.decode_m // rows)

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
        """Shapes as for :func:`paged_attention`; writes ``out [T, N, Dv]``, zeros in rows of no sequence.

        The plan must have been filled for this batch. ``q``'s tokens lie ``q_stride`` apart, all else is contiguous,
        and ``v_cache`` a view of ``k_cache`` where the shape says so. ``sinks [N]`` are fp32.
        """
        plan, num_kv_heads = self._plan, self._plan.shape.num_kv_heads
        assert len(q) <= plan.token_budget, f"{len(q)} tokens, room for {plan.token_budget}"
        caches = (k_cache, v_cache) if self._takes_values else (k_cache,)
        extras = [tensor for tensor in (slopes, sinks) if tensor is not None]
        inputs = (q, *caches, block_tables, cu_seqlens_q, seq_lens, *extras)
        parts = (plan.part, plan.part_best, plan.part_total)
        max_blocks = block_tables.shape[1]
        chunk_grid = (plan.max_chunk_tiles(len(q)) * num_kv_heads,)
        self._chunks(chunk_grid, *inputs, plan.chunk_tiles, plan.counts, out, max_blocks)
        decode_grid = (plan.num_programs * num_kv_heads,)
        lists = (plan.decode_tiles, plan.shares, plan.counts)
        self._decodes(decode_grid, *inputs, *lists, out, *parts, max_blocks)
        self._combine((self._num_combines,), cu_seqlens_q, *lists, *parts, out, len(seq_lens), len(q))
