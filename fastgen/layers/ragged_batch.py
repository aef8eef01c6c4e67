"""The ragged batch: all that a forward pass may see, passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RaggedBatch:
    """The tokens of one step, laid end to end without padding between sequences.

    ``S`` rows are the engine's slots: a row without tokens in this step has zero length. Worked example, three rows
    with blocks of ``P = 4``: a chunk of 4 prompt tokens after 2 cached ones, a decode at length 9, one at length 3. A
    decode with drafts is a chunk too, and has a row of logits for each of its tokens.

    ==================  =====================  =========================================================
    field               shape                  in the example
    ==================  =====================  =========================================================
    ``input_ids``       ``[T]`` i32            6 token ids
    ``token_source``    ``[T]`` i32            ``-1 -1 -1 -1 1 2``: −1 takes ``input_ids``, else ``sampled_ids``
    ``positions``       ``[T]`` i32            ``2 3 4 5 8 2``
    ``cu_seqlens_q``    ``[S+1]`` i32          ``0 4 5 6``
    ``seq_lens``        ``[S]`` i32            ``6 9 3`` (cached + new)
    ``block_tables``    ``[G, S, max_blocks]`` row 0 ``7 2 …``; one table for each of G KV groups
    ``slot_mapping``    ``[G, T]`` i64         ``block * P + offset`` of each new key and value: ``30 31 8 9 …``
    ``logits_indices``  ``[R]`` i32            ``4 5 3``: tokens whose logits are needed, those of decodes first
    ``sampled_ids``     ``[S]`` i32            the id that kernels sampled last for each row, still on the device
    ==================  =====================  =========================================================

    ``T`` may exceed the tokens in use: the padding lies behind ``cu_seqlens_q[S]``, belongs to no sequence, and its
    slots lie in block 0, which is never read.
    """

    input_ids: Tensor
    token_source: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor
    sampled_ids: Tensor
