"""Entries, updates and copies of block tables, and how many blocks a sequence holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from fastgen.runtime.kv_cache.block_pool import PADDING_BLOCK
from fastgen.runtime.requests.request import Sequence


class TableEntry(NamedTuple):
    """``block_tables[group][table_index]`` of a sequence is now ``block_id``."""

    group: int
    table_index: int
    block_id: int


class BlockUpdate(NamedTuple):
    """Sets ``block_tables[group, slot, table_index] = block_id`` on the device."""

    slot: int
    group: int
    table_index: int
    block_id: int


class BlockCopy(NamedTuple):
    """Entry ``table_index`` of a sequence's table in ``group`` was block ``source`` and is now ``destination``. The
    device copies the contents of ``source`` before the step's forward pass.
    """

    group: int
    table_index: int
    source: int
    destination: int


class Allocation(NamedTuple):
    """The tables of a sequence have new blocks from entry ``first`` on, and ``copies`` of blocks that it shared."""

    first: int
    copies: list[BlockCopy]


def held_entries(seq: Sequence) -> list[TableEntry]:
    """Returns every entry of the block tables of ``seq`` that holds a block."""
    return [
        TableEntry(group, index, block_id)
        for group, table in enumerate(seq.block_tables)
        for index, block_id in enumerate(table)
        if block_id != PADDING_BLOCK
    ]


def max_blocks_held(num_tokens: int, window: int | None, block_size: int, *, max_chunk: int | None) -> int:
    """Returns the most blocks of one KV group that a sequence of ``num_tokens`` tokens holds at once, in steps of at
    most ``max_chunk`` of its tokens.

    With a window ``w``, before a chunk of ``c`` tokens that begins in block ``b``, the kept blocks reach from the block
    of token ``b*P - w + 1`` to the last block of the chunk: ``ceil((w - 1)/P)`` blocks, ``b``, and ``ceil((c - 1)/P)``
    more.
    """
    num_blocks = -(-num_tokens // block_size)
    if window is None or max_chunk is None:
        return num_blocks
    return min(num_blocks, -(-(window - 1) // block_size) + 1 - (-(max_chunk - 1) // block_size))


def arithmetic(
    num_prompt_tokens: int, max_new_tokens: int, windows: SequenceOf[int | None], block_size: int, max_chunk: int | None
) -> str:
    """Returns the most blocks that a sequence needs as the text of a sum over KV groups that need the same."""
    num_tokens = num_prompt_tokens + max_new_tokens - 1
    terms: Counter[str] = Counter()
    for window in windows:
        most = max_blocks_held(num_tokens, window, block_size, max_chunk=max_chunk)
        if most == -(-num_tokens // block_size):
            terms[f"ceil(({num_prompt_tokens} + {max_new_tokens} - 1) / {block_size})"] += 1
        else:
            terms[f"{most} (a window of {window} tokens and a chunk of {max_chunk})"] += 1
    return " + ".join(f"{times} * {term}" if times > 1 else term for term, times in terms.items())
