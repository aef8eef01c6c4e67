"""The routers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.routing.known_blocks import KNOWN_BLOCKS
from fastgen.runtime.routing.prefix import PrefixAffinity
from fastgen.runtime.routing.router import Router
from fastgen.runtime.routing.routers import LeastTokens, RandomOrder, RoundRobin

# Makes a router from the tokens of a block, the blocks of a replica, and the seed of random choices.
_Maker = Callable[[int, int, int], Router]

ROUTERS: Final[dict[str, _Maker]] = {
    "round_robin": lambda block_size, num_blocks, seed: RoundRobin(),
    "random": lambda block_size, num_blocks, seed: RandomOrder(seed),
    "least_tokens": lambda block_size, num_blocks, seed: LeastTokens(),
    "prefix": lambda block_size, num_blocks, seed: PrefixAffinity(block_size=block_size, known_blocks=num_blocks),
}


def make_router(name: str, *, block_size: int, num_blocks: int = KNOWN_BLOCKS, seed: int = 0) -> Router:
    """Returns a new router of this kind.

    :param block_size: tokens of a block, as in the hashes of requests.
    :param num_blocks: blocks of a replica's KV cache.
    :param seed: seed of random choices.
    :raises InvalidArgumentError: for an unknown name.
    """
    if name not in ROUTERS:
        raise InvalidArgumentError(f"router={name!r} is not known; expected one of {', '.join(map(repr, ROUTERS))}")
    return ROUTERS[name](block_size, num_blocks, seed)
