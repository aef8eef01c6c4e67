"""Causal attention of a ragged batch over a paged KV cache: prompt chunks and decodes in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.ops.softcap.reference import soft_cap


@dataclass(frozen=True)
class Alibi:
    """ALiBi, a bias on attention scores that is linear in the key's position (Press et al., 2022).

    ``slopes [N]``; the bias is computed in their dtype. ``scaled``: the scores' scale multiplies the bias too.
    """

    slopes: Tensor
    scaled: bool


def alibi_bias(slopes: Tensor, key_positions: Tensor) -> Tensor:
    """Computes ``slopes[head] * key_position``: ``slopes [N]``, ``key_positions [s]`` to ``[N, s]`` fp32.

    Computed in the dtype of ``slopes``: with bf16, position and product are rounded to it.
    """
    return (slopes.unsqueeze(1) * key_positions.to(slopes.dtype)).float()


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
    """Computes causal attention: each query attends to the keys of its sequence up to its own position.

    ``q [T, N, D]``, ``k_cache [B, P, K, D]``, ``v_cache [B, P, K, Dv]``, ``block_tables [S, max_blocks]``,
    ``cu_seqlens_q [S+1]``, ``seq_lens [S]`` (cached plus new tokens, the new ones already written). Query ``i`` of a
    sequence with ``n`` new tokens is at position ``seq_len − n + i``; with a ``sliding_window`` of ``w`` it sees
    the last ``w`` positions, including its own. Query head ``h`` reads KV head ``h // (N/K)``. Rows of no sequence
    (padding) are zero.

    A score is ``q·k * scale`` plus the ``alibi`` bias of its head and key, which is scaled too where it is ``scaled``.
    With a ``softcap`` ``c`` it becomes ``c * tanh(score / c)``. ``sinks [N]`` are an additional score for each head,
    without a value (gpt-oss, 2025). Scores and softmax in fp32; returns ``[T, N, Dv]`` in ``q``'s dtype.
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
