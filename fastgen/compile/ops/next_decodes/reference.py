"""The inputs of a decode step that follows a decode step of the same sequences, computed from that step's inputs."""

from __future__ import annotations

from torch import Tensor


def next_decodes(
    token_ids: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    input_ids: Tensor,
    token_source: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    sampled_positions: Tensor,
    *,
    block_size: int,
) -> None:
    """Moves each sequence one position further, in place. Row ``i`` of ``R`` is the one new token of the sequence in
    ``slots[i]``: ``token_ids[i]``, which the last step chose.

    Reads ``token_ids [R]`` i64, ``slots [R]`` i32 and ``block_tables [G, S, max_blocks]`` i32. Updates ``input_ids``,
    ``token_source``, ``positions [R]``, ``seq_lens [S]`` i32, ``slot_mapping [G, R]`` i64 and ``sampled_positions [R]``
    i64, the positions of the tokens that this step will choose.
    """
    places = slots.long()
    input_ids.copy_(token_ids)
    token_source.fill_(-1)
    positions += 1
    seq_lens[places] += 1
    sampled_positions += 1
    blocks = block_tables[:, places].gather(
        2, (positions // block_size).long().expand(len(block_tables), -1)[..., None]
    )
    slot_mapping.copy_(blocks[..., 0].long() * block_size + positions % block_size)
