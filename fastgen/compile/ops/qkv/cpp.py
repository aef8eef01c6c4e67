"""Everything between the projection to queries, keys and values and attention, in one C++ kernel.

These are the norms of heads, the rotation, and the KV write.

The reference is :mod:`~fastgen.compile.ops.norm.reference`, :mod:`~fastgen.compile.ops.rotary.reference` and
:mod:`~fastgen.compile.ops.kv_write.reference`, one after the other.
"""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.attention.cpp import in_pairs
from fastgen.compile.ops.qkv.head_norm import HeadNorm, norm_arguments, norm_parameters
from fastgen.compile.spec import Argument, KernelSpec, Value


def qkv_spec(
    arch: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: str,
    rotary_dim: int = 0,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`QkvKernel`. ``cache_dtype`` is a short name; the other tensors are fp32."""
    parameters: dict[str, Value] = {"N": num_heads, "K": num_kv_heads, "D": head_dim, "P": block_size}
    parameters |= {"dtype": cache_dtype, "R": rotary_dim or None, "interleaved": interleaved}
    parameters["in_pairs"] = in_pairs(arch, cache_dtype, head_dim, block_size)
    arguments = [Argument("qkv", "fp32", "out")]
    for prefix, norm in (("q", q_norm), ("k", k_norm)):
        parameters |= norm_parameters(norm, prefix)
        arguments += norm_arguments(norm, prefix, "fp32")
    if rotary_dim:
        arguments += [Argument("cos_sin", "fp32", "in"), Argument("positions", "i32", "in")]
    arguments += [Argument("k_cache", cache_dtype, "out"), Argument("v_cache", cache_dtype, "out")]
    arguments += [Argument("slots", "i64", "in"), Argument("num_tokens", "i64", "scalar")]
    return KernelSpec("qkv", "cpp", parameters | {"arch": arch}, tuple(arguments), needed_by=needed_by)


class QkvKernel:
    """Launches a kernel of :func:`qkv_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._names = [argument.name for argument in kernel.spec.arguments]

    def __call__(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **given: Tensor
    ) -> None:
        """Norms and rotates the queries in ``qkv [T, (N + 2K) * D]`` in place. Writes its keys, normed and rotated too,
        and its values to ``slots [T]`` i64 of caches that :func:`~fastgen.compile.ops.attention.cpp.empty_cache`
        makes. ``positions [T]`` i32; ``given`` are ``cos_sin [max_positions, R]`` and the norms' weights and biases.
        """
        given |= {"qkv": qkv, "positions": positions, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        arguments = [given[name] for name in self._names[:-1]]
        self._kernel((), *arguments, len(qkv))
