"""Latent attention in Triton: everything between its projections except the maps of the heads, in one kernel.

The reference is the one of :mod:`fastgen.compile.ops.latent.cpp`, rounded to the model's dtype between its ops.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.qkv.head_norm import HeadNorm, norm_arguments, norm_parameters
from fastgen.compile.ops.qkv.triton import (
    ROTARY_ARGUMENTS,
    TileLauncher,
    check_rotary,
    heads_of_a_program,
    launch_options,
)
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2


def latent_spec(
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
    """Returns the kernel for :class:`LatentKernel`: ``kv_norm`` norms the latent as if it were one head of
    ``latent_dim``.

    A query has ``nope_dim`` features that are not rotated and ``rotary_dim`` that are, as many as the shared key.
    """
    check_rotary(rotary_dim, rotary_dim)
    block = heads_of_a_program(num_heads, rotary_dim)
    parameters: dict[str, Value] = {"N": num_heads, "L": latent_dim, "R": rotary_dim, "nope_dim": nope_dim}
    parameters |= {"dtype": dtype, "interleaved": interleaved}
    parameters |= {"block": block, "tiles": 1 + -(-num_heads // block)} | norm_parameters(kv_norm, "kv")
    for not_of_one_head in ("kv_over", "kv_per_head"):
        del parameters[not_of_one_head]
    arguments = (
        Argument("kv", dtype, "in"),
        *norm_arguments(kv_norm, "kv", dtype),
        *ROTARY_ARGUMENTS,
        Argument("cache", dtype, "out"),
        Argument("slots", "i64", "in"),
        Argument("q", dtype, "in"),
        Argument("q_latent", dtype, "out"),
    )
    options = launch_options(max(power_of_2(latent_dim), block * power_of_2(rotary_dim)))
    return KernelSpec("latent_kv", "triton", parameters, arguments, options, needed_by=needed_by)


class LatentKernel:
    """Launches a kernel of :func:`latent_spec`."""

    def __init__(self, kernel: Kernel):
        self._launch = TileLauncher(kernel)

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
        """Writes ``kv [T, L + R]``, its latent normed and its shared key rotated, to ``slots [T]`` i64 of the ``cache
        [B, P, 1, L + R]``, and the rotated part of ``q [T, N, nope_dim + R]`` to the last ``R`` features of
        ``q_latent [T, N, L + R]``, whose first ``L`` are unchanged.

        Every tensor is contiguous; ``positions [T]`` i32; ``given`` are ``cos_sin [max_positions, R]`` fp32, and
        ``kv_norm_weight`` and ``kv_norm_bias`` ``[L]``, as the kernel has them.
        """
        given |= {"kv": kv, "q": q, "q_latent": q_latent, "positions": positions, "cache": cache, "slots": slots}
        self._launch(len(kv), given)
