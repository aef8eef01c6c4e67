"""The workloads of every engine: the same token ids and numbers of tokens to generate, all requests at once.

    W1  one request, 128 tokens of prompt, 128 to generate: one stream's decoding
    W2  one request of 2048 tokens, one to generate: reading a prompt
    W3  32 requests, about 520 tokens of prompt and 26 to generate, both normal with a deviation of 30 %: mixed serving
    W4  16 requests of 32 tokens, 128 to generate: many streams' decoding
    G0  five short requests: the numeric gate, and the warm-up

Standard library only, since engines run in environments of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

SEED = 0
TIMED = ("W1", "W2", "W3", "W4")
GATE = "G0"
_IDS = (300, 31_900)  # clear of special tokens and of bytes
_DEVIATION = 0.3


@dataclass(frozen=True)
class Request:
    """Holds a prompt of token ids, and how many tokens to generate whether the text ends or not."""

    prompt: list[int]
    num_new: int


def make(name: str, seed: int = SEED) -> list[Request]:
    """Returns the requests of a workload. Raises ``ValueError`` for an unknown name."""
    generator = random.Random(f"{name}/{seed}")

    def about(mean: int) -> int:
        return max(1, round(generator.gauss(mean, _DEVIATION * mean)))

    sizes = {
        "W1": lambda: [(128, 128)],
        "W2": lambda: [(2048, 1)],
        "W3": lambda: [(about(520), about(26)) for _ in range(32)],
        "W4": lambda: [(32, 128)] * 16,
        "G0": lambda: [(1, 8), (5, 8), (17, 8), (40, 8), (120, 8)],
    }
    if name not in sizes:
        raise ValueError(f"workload {name!r}: expected one of {', '.join(sizes)}")
    return [Request([generator.randrange(*_IDS) for _ in range(prompt)], num_new) for prompt, num_new in sizes[name]()]


def fingerprint(requests: list[Request]) -> str:
    """Returns a hash that is the same for the same requests on every machine."""
    plain = json.dumps([[each.prompt, each.num_new] for each in requests])
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
