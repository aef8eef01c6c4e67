"""The C++ kernel of :mod:`~fastgen.compile.ops.next_decodes.reference`."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec


def next_decodes_spec(needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel for :class:`NextDecodesKernel`."""
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
    """Launches a kernel of :func:`next_decodes_spec`; arguments as of
    :func:`~fastgen.compile.ops.next_decodes.reference.next_decodes`."""

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
        """Launches the kernel. ``sampled_positions`` may be a column of a matrix, and ``slot_mapping`` columns of one;
        all other tensors are contiguous.
        """
        strides = slot_mapping.stride(0), sampled_positions.stride(0)
        updated = (input_ids, token_source, positions, seq_lens, slot_mapping, sampled_positions)
        sizes = len(token_ids), *block_tables.shape, block_size, *strides
        self._kernel((), token_ids, slots, block_tables, *updated, *sizes)
