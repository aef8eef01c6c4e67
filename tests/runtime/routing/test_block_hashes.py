"""Hashes of blocks: each names its whole prefix, and is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fastgen.runtime.routing import block_hashes
from fastgen.runtime.routing.block_hashes import MAX_HASHED_BLOCKS

ROOT = Path(__file__).resolve().parents[3]
TOKENS = st.lists(st.integers(0, 5), max_size=60)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_hashes_are_equal_as_far_as_full_blocks_are(one: list[int], other: list[int], size: int) -> None:
    first, second = block_hashes(one, size), block_hashes(other, size)
    assert (len(first), len(second)) == (len(one) // size, len(other) // size)
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        assert 0 <= a < 2**64
        assert (a == b) == (one[: (number + 1) * size] == other[: (number + 1) * size])


def test_a_hash_is_that_of_all_tokens_before_it() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in range(8))
    expected = [int.from_bytes(blake2b(tokens[:end], digest_size=8).digest(), "little") for end in (16, 32)]
    assert block_hashes(range(11), 4) == tuple(expected)


def test_long_prompts_are_hashed_as_far_as_the_bound() -> None:
    hashes = block_hashes(range(16 * MAX_HASHED_BLOCKS + 100), 16)
    assert len(hashes) == MAX_HASHED_BLOCKS
    assert hashes == block_hashes(range(16 * MAX_HASHED_BLOCKS), 16)


def test_every_process_has_the_same_hashes_and_needs_no_torch() -> None:
    code = (
        "import sys; from fastgen.runtime.routing import block_hashes\n"
        "print(block_hashes(range(2**31, 2**31 + 100), 16), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert printed == [f"{block_hashes(range(2**31, 2**31 + 100), 16)} False False"] * 2
