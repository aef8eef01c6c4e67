"""Hashes of a prompt's full blocks. A router compares them to find replicas that have computed the same prefix."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

# Most blocks of a prompt that are hashed. What follows them does not influence routing.
MAX_HASHED_BLOCKS: Final = 2048
_HASH_BYTES: Final = 8


def block_hashes(prompt_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Returns a hash of 64 bits for each of the first full blocks of a prompt, at most :data:`MAX_HASHED_BLOCKS`.

    The hash of a block covers all tokens up to its end (BLAKE2b), so equal hashes mean equal prefixes. Hashes are the
    same in every process. Token ids lie in [0, 2³²).
    """
    num_blocks = min(len(prompt_ids) // block_size, MAX_HASHED_BLOCKS)
    tokens, block_bytes = array("I", prompt_ids[: num_blocks * block_size]).tobytes(), 4 * block_size
    prefix, digests = blake2b(digest_size=_HASH_BYTES), []
    for begin in range(0, len(tokens), block_bytes):
        prefix.update(tokens[begin : begin + block_bytes])
        digests.append(prefix.digest())
    return struct.unpack(f"<{num_blocks}Q", b"".join(digests))
