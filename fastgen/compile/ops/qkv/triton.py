"""All between the projections and attention, in one Triton kernel: norms of heads, rotation, and the KV write.

The reference is :mod:`~fastgen.compile.ops.norm.reference`, :mod:`~fastgen.compile.ops.rotary.reference` and
:mod:`~fastgen.compile.ops.kv_write.reference`, one after the other: rounded to the model's dtype between them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.qkv.cpp import HeadNorm
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2

_TILE = 2048  # features that a program takes, whole heads; more only where a norm goes over all heads
_A_THREAD = 16  # features of a thread: in 16 bits, two of the widest loads, one for each half of its pairs
_MAX_WARPS = 16


def triton_qkv_spec(
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
    """The kernel for :class:`TritonQkv`, for queries, keys, values, caches and weights of ``dtype``.

    The first ``rotary_dim`` features of each query and key are rotated. Queries are changed ``in_place``, or else
    written to a tensor of their own. Raises ``ValueError`` for a ``rotary_dim`` that is odd or exceeds the head.
    """
    _check_rotary(rotary_dim, head_dim)
    q_block, k_block = (
        _rows(count, head_dim, all_at_once=norm is not None and norm.over_all)
        for count, norm in ((num_heads, q_norm), (num_kv_heads, k_norm))
    )
    v_block = _rows(num_kv_heads, head_dim)
    has_queries = q_norm is not None or rotary_dim > 0 or not in_place
    parameters: dict[str, Value] = {"N": num_heads, "K": num_kv_heads, "D": head_dim, "dtype": dtype}
    parameters |= {"R": rotary_dim or None, "interleaved": interleaved, "in_place": in_place}
    q_tiles, k_tiles = -(-num_heads // q_block) if has_queries else 0, -(-num_kv_heads // k_block)
    tiles = q_tiles + k_tiles + -(-num_kv_heads // v_block)
    arguments = [Argument("qkv", dtype, "out")]
    for prefix, norm in (("q", q_norm), ("k", k_norm)):
        parameters |= _norm_parameters(norm, prefix)
        arguments += _norm_arguments(norm, prefix, dtype)
    parameters |= {"q_block": q_block, "k_block": k_block, "v_block": v_block}
    parameters |= {"q_tiles": q_tiles, "k_tiles": k_tiles, "tiles": tiles}
    arguments += _ROTARY if rotary_dim else []
    arguments += [] if in_place else [Argument("q_out", dtype, "out")]
    arguments += [Argument("k_cache", dtype, "out"), Argument("v_cache", dtype, "out"), Argument("slots", "i64", "in")]
    options = _options(max(q_block if has_queries else 1, k_block, v_block) * power_of_2(head_dim))
    return KernelSpec("qkv", "triton", parameters, tuple(arguments), options, needed_by=needed_by)


class TritonQkv:
    """Launches a kernel of :func:`triton_qkv_spec`."""

    def __init__(self, kernel: Kernel):
        self._launch = _Launch(kernel)

    def __call__(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **given: Tensor
    ) -> None:
        """Norm and rotate the queries in ``qkv [T, (N + 2K) * D]``, and write its keys, normed and rotated too, and its
        values to ``slots [T]`` i64 of the caches ``[B, P, K, D]``.

        All is contiguous; ``positions [T]`` i32. ``given`` are, as the kernel has them, ``cos_sin [max_positions, R]``
        fp32, ``q_norm_weight`` and the like (``[D]``, or one of their own for each head), and ``q_out [T, N, D]``,
        where queries are not changed in place.
        """
        given |= {"qkv": qkv, "positions": positions, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        self._launch(len(qkv), given)


def latent_kv_spec(
    dtype: str,
    kv_norm: HeadNorm,
    *,
    num_heads: int,
    latent_dim: int,
    nope_dim: int,
    rotary_dim: int,
    interleaved: bool = False,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """The kernel for :class:`LatentKv`: ``kv_norm`` norms the latent as if it were one head of ``latent_dim``.

    A query has ``nope_dim`` features that are not rotated and ``rotary_dim`` that are, as many as the shared key.
    """
    _check_rotary(rotary_dim, rotary_dim)
    block = _rows(num_heads, rotary_dim)
    parameters: dict[str, Value] = {"N": num_heads, "L": latent_dim, "R": rotary_dim, "nope_dim": nope_dim}
    parameters |= {"dtype": dtype, "interleaved": interleaved}
    parameters |= {"block": block, "tiles": 1 + -(-num_heads // block)} | _norm_parameters(kv_norm, "kv")
    for not_of_one_head in ("kv_over", "kv_per_head"):
        del parameters[not_of_one_head]
    arguments = (
        Argument("kv", dtype, "in"),
        *_norm_arguments(kv_norm, "kv", dtype),
        *_ROTARY,
        Argument("cache", dtype, "out"),
        Argument("slots", "i64", "in"),
        Argument("q", dtype, "in"),
        Argument("q_latent", dtype, "out"),
    )
    options = _options(max(power_of_2(latent_dim), block * power_of_2(rotary_dim)))
    return KernelSpec("latent_kv", "triton", parameters, arguments, options, needed_by=needed_by)


class LatentKv:
    """Launches a kernel of :func:`latent_kv_spec`."""

    def __init__(self, kernel: Kernel):
        self._launch = _Launch(kernel)

    def __call__(
        self,
        kv: Tensor,
        q: Tensor,
        q_latent: Tensor,
        positions: Tensor,
        cache: Tensor,
        slots: Tensor,
        **given: Tensor,
    ) -> None:
        """Write ``kv [T, L + R]``, its latent normed and its shared key rotated, to ``slots [T]`` i64 of the ``cache
        [B, P, 1, L + R]``, and the rotated part of ``q [T, N, nope_dim + R]`` to the last ``R`` features of
        ``q_latent [T, N, L + R]``, whose first ``L`` are not touched.

        All is contiguous; ``positions [T]`` i32; ``given`` are ``cos_sin [max_positions, R]`` fp32, and
        ``kv_norm_weight`` and ``kv_norm_bias`` ``[L]``, as the kernel has them.
        """
        given |= {"kv": kv, "q": q, "q_latent": q_latent, "positions": positions, "cache": cache, "slots": slots}
        self._launch(len(kv), given)


class _Launch:
    """A kernel with programs along two axes: tokens, and the tiles of each."""

    def __init__(self, kernel: Kernel):
        tiles = kernel.spec.parameters["tiles"]
        assert isinstance(tiles, int)
        self._kernel, self._tiles = kernel, tiles
        self._names = [argument.name for argument in kernel.spec.arguments]

    def __call__(self, num_tokens: int, given: dict[str, Tensor]) -> None:
        self._kernel((num_tokens, self._tiles), *(given[name] for name in self._names))


_ROTARY = [Argument("cos_sin", "fp32", "in"), Argument("positions", "i32", "in")]


def _check_rotary(rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim={rotary_dim}: expected an even number of a head's {head_dim} features")


def _norm_parameters(norm: HeadNorm | None, prefix: str) -> dict[str, Value]:
    return dict.fromkeys(HeadNorm("rms", 0.0).parameters(prefix)) if norm is None else norm.parameters(prefix)


def _norm_arguments(norm: HeadNorm | None, prefix: str, dtype: str) -> list[Argument]:
    return [] if norm is None else [replace(each, dtype=dtype) for each in norm.arguments(prefix)]


def _rows(count: int, size: int, *, all_at_once: bool = False) -> int:
    """How many of ``count`` heads of ``size`` features a program takes, a power of 2."""
    return power_of_2(count) if all_at_once else min(power_of_2(count), max(1, _TILE // power_of_2(size)))


def _options(tile: int) -> dict[str, Value]:
    return {"num_warps": min(_MAX_WARPS, max(1, tile // (32 * _A_THREAD)))}
