"""From one step of decodes to the next of the same sequences: every input of the model follows from the last ones."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


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
    """Row ``i`` of ``R`` is the one new token of the sequence in ``slots[i]``, of which the last step chose
    ``token_ids[i]``: that is what it computes now, one position further on.

    ``token_ids [R]`` i64, ``slots [R]`` i32 and ``block_tables [G, S, max_blocks]`` i32 are read; ``input_ids``,
    ``token_source``, ``positions [R]``, ``seq_lens [S]`` i32, ``slot_mapping [G, R]`` i64 and ``sampled_positions [R]``
    i64, where the token that this step chooses will stand, are brought up to date.
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


def next_decodes_spec(needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """The C++ kernel for :class:`NextDecodesKernel`."""
    arguments = (
        Argument("token_ids", "i64", "in"),
        *(Argument(name, "i32", "in") for name in ("slots", "block_tables")),
        *(Argument(name, "i32", "out") for name in ("input_ids", "token_source", "positions", "seq_lens")),
        *(Argument(name, "i64", "out") for name in ("slot_mapping", "sampled_positions")),
        *(Argument(name, "i64", "scalar") for name in ("num_rows", "num_groups", "num_slots", "max_blocks")),
        *(Argument(name, "i64", "scalar") for name in ("block_size", "slot_stride", "position_stride")),
    )
    return KernelSpec("next_decodes", "cpp", {}, arguments, needed_by=needed_by)


class NextDecodesKernel:
    """Launches a kernel of :func:`next_decodes_spec`; arguments as of :func:`next_decodes`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(
        self,
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
        """``sampled_positions`` may be a column of a matrix, ``slot_mapping`` columns of one; all else contiguous."""
        strides = slot_mapping.stride(0), sampled_positions.stride(0)
        updated = (input_ids, token_source, positions, seq_lens, slot_mapping, sampled_positions)
        sizes = len(token_ids), *block_tables.shape, block_size, *strides
        self._kernel((), token_ids, slots, block_tables, *updated, *sizes)
