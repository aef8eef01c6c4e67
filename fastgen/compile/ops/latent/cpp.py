"""Latent attention in C++: everything between its projections except the maps of the heads, in one kernel.

The reference is :mod:`~fastgen.compile.ops.norm.reference`, :mod:`~fastgen.compile.ops.rotary.reference` and
:mod:`~fastgen.compile.ops.kv_write.reference`, as :class:`fastgen.layers.latent_attention.LatentAttention` puts them
together.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.spec import Argument, KernelSpec, Value


def latent_spec(
    arch: str,
    *,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    kv_rank: int,
    block_size: int,
    cache_dtype: str,
    rotary_dim: int,
    interleaved: bool,
    norm: HeadNorm,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`LatentKernel`. ``norm`` is the latent vector's, ``cache_dtype`` a short name; the
    other tensors are fp32."""
    parameters: dict[str, Value] = {
        **{"N": num_heads, "nope": nope_dim, "rope": rope_dim, "rank": kv_rank, "P": block_size, "dtype": cache_dtype},
        **{"R": rotary_dim, "interleaved": interleaved, "norm": norm.kind, "norm_weight": norm.weight},
        **{"norm_bias": norm.bias, "eps": norm.eps, "offset": norm.offset or None, "arch": arch},
    }
    return KernelSpec(
        "latent",
        "cpp",
        parameters,
        (
            Argument("kv", "fp32", "out"),
            Argument("q", "fp32", "in"),
            *norm.arguments("kv", "fp32"),
            Argument("cos_sin", "fp32", "in"),
            Argument("positions", "i32", "in"),
            Argument("mapped", "fp32", "out"),
            Argument("cache", cache_dtype, "out"),
            Argument("slots", "i64", "in"),
            Argument("num_tokens", "i64", "scalar"),
        ),
        needed_by=needed_by,
    )


class LatentKernel:
    """Launches a kernel of :func:`latent_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._names = [argument.name for argument in kernel.spec.arguments]

    def __call__(
        self, kv: Tensor, q: Tensor, mapped: Tensor, positions: Tensor, cache: Tensor, slots: Tensor, **given: Tensor
    ) -> None:
        """Norms the latent vectors and rotates the keys of ``kv [T, rank + rope]`` in place, and writes both to ``slots
        [T]`` i64 of ``cache``, which :func:`~fastgen.compile.ops.attention.cpp.empty_cache` makes. Rotates the last
        ``rope`` features of each head of ``q [T, N, nope + rope]`` into the last of ``mapped [T, N, rank + rope]``.

        ``positions [T]`` i32; ``given`` are ``cos_sin [max_positions, R]``, ``kv_norm_weight`` and ``kv_norm_bias``.
        Every tensor is contiguous.
        """
        given |= {"kv": kv, "q": q, "mapped": mapped, "positions": positions, "cache": cache, "slots": slots}
        self._kernel((), *(given[name] for name in self._names[:-1]), len(kv))
