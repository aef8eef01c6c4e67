"""Everything between the projections and attention, in one Triton kernel: norms of heads, rotation, the KV write.

The reference is :mod:`~fastgen.compile.ops.norm.reference`, :mod:`~fastgen.compile.ops.rotary.reference` and
:mod:`~fastgen.compile.ops.kv_write.reference`, one after the other: rounded to the model's dtype between them.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.qkv.head_norm import HeadNorm, norm_arguments, norm_parameters
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2

_TILE = 2048  # features that a program takes: a number of heads; more only where a norm is over all heads
_A_THREAD = 16  # features of a thread: in 16 bits, two of the widest loads, one for each half of its pairs
_MAX_WARPS = 16


def qkv_spec(
    dtype: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int = 0,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
    in_place: bool = True,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`QkvKernel`, for queries, keys, values, caches and weights of ``dtype``.

    The first ``rotary_dim`` features of each query and key are rotated. Queries are changed ``in_place``, or
    written to another tensor. Raises ``ValueError`` for a ``rotary_dim`` that is odd or exceeds the head.
    """
    check_rotary(rotary_dim, head_dim)
    q_block, k_block = (
        heads_of_a_program(count, head_dim, all_at_once=norm is not None and norm.over_all)
        for count, norm in ((num_heads, q_norm), (num_kv_heads, k_norm))
    )
    v_block = heads_of_a_program(num_kv_heads, head_dim)
    has_queries = q_norm is not None or rotary_dim > 0 or not in_place
    parameters: dict[str, Value] = {"N": num_heads, "K": num_kv_heads, "D": head_dim, "dtype": dtype}
    parameters |= {"R": rotary_dim or None, "interleaved": interleaved, "in_place": in_place}
    q_tiles, k_tiles = -(-num_heads // q_block) if has_queries else 0, -(-num_kv_heads // k_block)
    tiles = q_tiles + k_tiles + -(-num_kv_heads // v_block)
    arguments = [Argument("qkv", dtype, "out")]
    for prefix, norm in (("q", q_norm), ("k", k_norm)):
        parameters |= norm_parameters(norm, prefix)
        arguments += norm_arguments(norm, prefix, dtype)
    parameters |= {"q_block": q_block, "k_block": k_block, "v_block": v_block}
    parameters |= {"q_tiles": q_tiles, "k_tiles": k_tiles, "tiles": tiles}
    arguments += ROTARY_ARGUMENTS if rotary_dim else []
    arguments += [] if in_place else [Argument("q_out", dtype, "out")]
    arguments += [Argument("k_cache", dtype, "out"), Argument("v_cache", dtype, "out"), Argument("slots", "i64", "in")]
    options = launch_options(max(q_block if has_queries else 1, k_block, v_block) * power_of_2(head_dim))
    return KernelSpec("qkv", "triton", parameters, tuple(arguments), options, needed_by=needed_by)


class QkvKernel:
    """Launches a kernel of :func:`qkv_spec`."""

    def __init__(self, kernel: Kernel):
        self._launch = TileLauncher(kernel)

    def __call__(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **given: Tensor
    ) -> None:
        """Norms and rotates the queries in ``qkv [T, (N + 2K) * D]``. Writes its keys, normed and rotated too, and its
        values to ``slots [T]`` i64 of the caches ``[B, P, K, D]``.

        Every tensor is contiguous; ``positions [T]`` i32. ``given`` are, as the kernel has them, ``cos_sin
        [max_positions, R]`` fp32, ``q_norm_weight`` and the like (``[D]``, or one for each head), and ``q_out [T, N,
        D]``, where queries are not changed in place.
        """
        given |= {"qkv": qkv, "positions": positions, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        self._launch(len(qkv), given)


class TileLauncher:
    """Launches a kernel with programs along two axes: tokens, and the tiles of each."""

    def __init__(self, kernel: Kernel):
        tiles = kernel.spec.parameters["tiles"]
        assert isinstance(tiles, int)
        self._kernel, self._tiles = kernel, tiles
        self._names = [argument.name for argument in kernel.spec.arguments]

    def __call__(self, num_tokens: int, given: dict[str, Tensor]) -> None:
        self._kernel((num_tokens, self._tiles), *(given[name] for name in self._names))


ROTARY_ARGUMENTS = [Argument("cos_sin", "fp32", "in"), Argument("positions", "i32", "in")]


def check_rotary(rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim={rotary_dim}: expected an even number of a head's {head_dim} features")


def heads_of_a_program(count: int, size: int, *, all_at_once: bool = False) -> int:
    """Returns how many of ``count`` heads of ``size`` features a program takes, a power of 2."""
    return power_of_2(count) if all_at_once else min(power_of_2(count), max(1, _TILE // power_of_2(size)))


def launch_options(tile: int) -> dict[str, Value]:
    return {"num_warps": min(_MAX_WARPS, max(1, tile // (32 * _A_THREAD)))}
