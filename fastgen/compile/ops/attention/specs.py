"""What paged attention's kernels are made of: an attention's shape and features; for Triton, tile sizes and specs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fastgen.compile.spec import Argument, KernelSpec, Value

# A sequence with at most so many new tokens is a decode (a token and its drafts), one with more is a chunk.
MAX_DECODE_QUERIES = 8

# KV tiles that a program is started for at least: fewer would take less time than their parts take to combine.
_MIN_SHARE = 2


@dataclass(frozen=True)
class AttentionShape:
    """All that a recipe says about an attention, with every number known.

    ``dtype`` is the short name of queries', cache's and output's dtype. ``v_dim`` features of a value; with
    ``values_in_keys`` they are the first of the key's and there is no other storage (latent attention). ``q_stride`` is
    how far a token's queries lie from the next one's, ``num_heads * head_dim`` where nothing lies between. ``alibi``
    says whether the scores' scale multiplies the bias too, ``alibi_dtype`` what the bias is rounded to.

    Raises ``ValueError`` for sizes that no cache has.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scale: float
    v_dim: int = 0
    values_in_keys: bool = False
    q_stride: int = 0
    sliding_window: int | None = None
    alibi: Literal["plain", "scaled"] | None = None
    alibi_dtype: str = "fp32"
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_dim", self.v_dim or self.head_dim)
        object.__setattr__(self, "q_stride", self.q_stride or self.num_heads * self.head_dim)
        window = 1 if self.sliding_window is None else self.sliding_window
        sizes = (self.num_kv_heads, self.head_dim, self.v_dim, self.block_size, window)
        if min(sizes) < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self}: sizes must be positive, and num_heads a multiple of num_kv_heads")
        if self.values_in_keys and self.v_dim > self.head_dim:
            raise ValueError(f"{self}: values of {self.v_dim} features cannot lie in keys of {self.head_dim}")
        if self.q_stride < self.num_heads * self.head_dim:
            raise ValueError(f"{self}: tokens' queries overlap")
        if self.scale <= 0:
            raise ValueError(f"{self}: the scale must be positive")

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut: rows of a query tile, keys of a KV tile, what Triton is told, and of how many programs a
    multiprocessor holds at once (which matters for decodes: see :class:`AttentionPlan`)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1

    @property
    def maxnreg(self) -> int:
        """Registers that a thread may have, for so many programs to fit one of NVIDIA's multiprocessors.

        Left to itself the assembler takes more where it can, and spills some where that makes room for one program
        more, which nothing is planned for.
        """
        return min(255, _SM_REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


_SM_REGISTERS = 65536  # of a multiprocessor, given out eight a thread at a time


# Tile sizes, by architecture and by the features of the larger of a key and a value, up to which they hold: the largest
# that build without spilling registers and fit shared memory (99 KiB on sm_86 and sm_89, 64 KiB on gfx942). On Hopper,
# 128 rows take two warp groups and halve what is read of keys and values against 64. None of this is measured yet.
# Of n stages Triton has (n - 1) // 2 for keys and values, since where they lie is loaded first. With five, the next
# tile is on its way while one is computed on; with three it is fetched in between, which only other programs of the
# same multiprocessor hide, and tiles of chunks leave room for none. So these would rather be smaller than have three.
_CHUNKS: dict[str, dict[int, Tiling]] = {
    "sm_80": {
        80: Tiling(128, 64, 8, 5),
        128: Tiling(128, 32, 8, 5),
        192: Tiling(64, 64, 8, 5),
        256: Tiling(64, 32, 8, 5),
        576: Tiling(32, 32, 8, 5),
    },
    "sm_86": {
        80: Tiling(128, 64, 8, 5),
        192: Tiling(128, 32, 8, 5),
        256: Tiling(64, 16, 8, 5),
        576: Tiling(32, 16, 8, 5),
    },
    "sm_90": {192: Tiling(128, 64, 8, 5), 256: Tiling(64, 64, 8, 5), 576: Tiling(32, 64, 8, 5)},
    "gfx942": {128: Tiling(128, 32, 4, 2), 256: Tiling(64, 32, 4, 2), 576: Tiling(16, 32, 4, 1)},
    "interpret": {1024: Tiling(32, 16, 4, 1)},
}
_CHUNKS |= {"sm_89": _CHUNKS["sm_86"], "sm_100": {**_CHUNKS["sm_90"], 576: Tiling(32, 32, 8, 5)}}
# Query tiles of decodes have 16 rows, the least that tensor cores take; more where more heads share a KV head, so that
# its keys and values are not read again for each 16 of them: up to 64 rows, or 32 where a head is large.
_DECODES: dict[str, dict[int, Tiling]] = {
    "sm_80": {
        64: Tiling(16, 64, 4, 3, programs_per_sm=4),
        80: Tiling(16, 64, 4, 3, programs_per_sm=2),
        128: Tiling(16, 64, 4, 3, programs_per_sm=3),
        256: Tiling(16, 32, 4, 3, programs_per_sm=2),
        576: Tiling(16, 32, 4, 2, programs_per_sm=2),
    },
    "sm_86": {
        64: Tiling(16, 64, 4, 3, programs_per_sm=4),
        80: Tiling(16, 64, 4, 3, programs_per_sm=2),
        128: Tiling(16, 32, 4, 3, programs_per_sm=3),
        256: Tiling(16, 32, 4, 3, programs_per_sm=2),
        576: Tiling(16, 32, 4, 2, programs_per_sm=1),
    },
    "gfx942": {
        128: Tiling(16, 64, 4, 2, programs_per_sm=2),
        256: Tiling(16, 32, 4, 2, programs_per_sm=2),
        576: Tiling(16, 16, 4, 1, programs_per_sm=1),
    },
    "interpret": {1024: Tiling(16, 16, 4, 1, programs_per_sm=2)},
}
_DECODES |= {"sm_89": _DECODES["sm_86"], "sm_100": _DECODES["sm_80"]}
# Three programs, which gathered keys leave room for, would make whole blocks spill.
_DECODES |= {"sm_90": {**_DECODES["sm_80"], 128: Tiling(16, 64, 4, 3, programs_per_sm=2)}}
# Where a block is smaller than a KV tile, keys are gathered, which takes registers; these would spill some otherwise,
# by Triton 3.6 or by later ones.
_CHUNKS_GATHERED = {"sm_90": {256: Tiling(64, 32, 8, 5), 576: Tiling(32, 32, 8, 5)}}
_CHUNKS_GATHERED |= {"sm_100": _CHUNKS_GATHERED["sm_90"]}
_DECODES_GATHERED = {"sm_80": {64: Tiling(16, 64, 4, 2, programs_per_sm=4)}, "sm_90": {128: _DECODES["sm_80"][128]}}
# fp32 dots are exact, without tensor cores, and their operands lie in registers.
_CHUNKS_FP32, _DECODES_FP32 = Tiling(16, 16, 8, 1), Tiling(16, 16, 4, 1, programs_per_sm=1)


def chunk_tiling(shape: AttentionShape, arch: str) -> Tiling:
    """The default; an architecture that is not listed gets the smallest of NVIDIA's."""
    if shape.dtype == "fp32" and arch != "interpret":
        return _CHUNKS_FP32
    return _smallest_that_holds(_CHUNKS.get(arch, _CHUNKS["sm_86"]), _CHUNKS_GATHERED.get(arch, {}), shape)


def decode_tiling(shape: AttentionShape, arch: str) -> Tiling:
    """The default; an architecture that is not listed gets the smallest of NVIDIA's."""
    if shape.dtype == "fp32" and arch != "interpret":
        return _DECODES_FP32
    tiling = _smallest_that_holds(_DECODES.get(arch, _DECODES["sm_86"]), _DECODES_GATHERED.get(arch, {}), shape)
    largest = 64 if shape.head_dim <= 128 else 32
    block_m = min(max(16, _power_of_2(shape.group_size)), largest)
    if block_m == tiling.block_m:
        return tiling
    return replace(tiling, block_m=block_m, num_warps=2 * tiling.num_warps, programs_per_sm=1)


def candidate_tilings(default: Tiling) -> list[Tiling]:
    """What is worth measuring beside a default, which comes first: KV tiles halved and doubled, one less and one more
    of them on its way, and query tiles of half as many rows by half as many warps."""
    found = [default]
    if default.block_n > 16:
        found.append(replace(default, block_n=default.block_n // 2))
    found.append(replace(default, block_n=default.block_n * 2))
    step = 2 if default.num_stages > 2 else 1  # NVIDIA's: see the table
    found += [replace(default, num_stages=default.num_stages + change) for change in (-step, step)]
    if default.block_m > 32:
        found.append(replace(default, block_m=default.block_m // 2, num_warps=max(4, default.num_warps // 2)))
    return [tiling for tiling in found if tiling.num_stages > 0]


def _smallest_that_holds(tilings: dict[int, Tiling], gathered: dict[int, Tiling], shape: AttentionShape) -> Tiling:
    size = max(shape.head_dim, shape.v_dim)
    if size > max(tilings):
        raise ValueError(f"{shape}: heads of more than {max(tilings)} features do not fit")
    limit = min(limit for limit in tilings if limit >= size)
    return gathered.get(limit, tilings[limit]) if shape.block_size < tilings[limit].block_n else tilings[limit]


@dataclass(frozen=True)
class AttentionSpecs:
    """The kernels of one attention, in the order in which they are launched, and how they are cut."""

    shape: AttentionShape
    chunk: Tiling
    decode: Tiling
    plan: KernelSpec
    chunks: KernelSpec
    decodes: KernelSpec
    combine: KernelSpec


def attention_specs(
    shape: AttentionShape,
    *,
    max_num_seqs: int,
    arch: str,
    chunk: Tiling | None = None,
    decode: Tiling | None = None,
    needed_by: tuple[str, ...] = (),
) -> AttentionSpecs:
    """The kernels for batches of at most ``max_num_seqs`` sequences; tile sizes are ``arch``'s unless given."""
    chunk = chunk or chunk_tiling(shape, arch)
    decode = decode or decode_tiling(shape, arch)
    return AttentionSpecs(
        shape,
        chunk,
        decode,
        _plan(shape, chunk, decode, max_num_seqs, needed_by),
        _attend("chunks", shape, chunk, arch, needed_by),
        _attend("decodes", shape, decode, arch, needed_by),
        _combine(shape, decode, needed_by),
    )


def _plan(
    shape: AttentionShape, chunk: Tiling, decode: Tiling, max_num_seqs: int, needed_by: tuple[str, ...]
) -> KernelSpec:
    parameters = {
        "G": shape.group_size,
        "chunk_m": chunk.block_m,
        "decode_m": decode.block_m,
        "decode_n": decode.block_n,
        "window": shape.sliding_window,
        "block_s": _power_of_2(max_num_seqs),
        "max_decode": MAX_DECODE_QUERIES,
        "min_share": _MIN_SHARE,
    }
    arguments = (
        *(Argument(name, "i32", "in") for name in ("cu_seqlens_q", "seq_lens")),
        *(Argument(name, "i32", "out") for name in ("chunk_tiles", "decode_tiles", "shares", "counts")),
        *(Argument(name, "i32", "scalar") for name in ("num_seqs", "num_programs")),
    )
    return KernelSpec("attention_plan", "triton", parameters, arguments, {"num_warps": 4}, needed_by=needed_by)


def _attend(
    kind: Literal["chunks", "decodes"], shape: AttentionShape, tiling: Tiling, arch: str, needed_by: tuple[str, ...]
) -> KernelSpec:
    d_parts, v_parts = _parts(shape.head_dim), _parts(shape.v_dim)
    v_is_k = shape.values_in_keys and (shape.v_dim == d_parts[0] or v_parts == d_parts)
    parameters: dict[str, Value] = {
        "kind": kind,
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "D": shape.head_dim,
        "DV": shape.v_dim,
        "P": shape.block_size,
        "dtype": shape.dtype,
        "window": shape.sliding_window,
        "alibi": shape.alibi,
        "alibi_dtype": shape.alibi_dtype if shape.alibi else None,
        "softcap": shape.softcap,
        "sinks": shape.sinks,
        "block_m": tiling.block_m,
        "block_n": tiling.block_n,
        "d_high": d_parts[0],
        "d_low": d_parts[1],
        "v_high": v_parts[0],
        "v_low": v_parts[1],
        "v_is_k": v_is_k,
        "v_stride": shape.head_dim if shape.values_in_keys else shape.v_dim,
        "q_stride": shape.q_stride,
        "scale": float(shape.scale),
    }
    lists = ("chunk_tiles",) if kind == "chunks" else ("decode_tiles", "shares")
    arguments = (
        *(Argument(name, shape.dtype, "in") for name in ("q", "k_cache", *(() if v_is_k else ("v_cache",)))),
        *(Argument(name, "i32", "in") for name in ("block_tables", "cu_seqlens_q", "seq_lens")),
        *([Argument("slopes", shape.alibi_dtype, "in")] if shape.alibi else []),
        *([Argument("sinks", "fp32", "in")] if shape.sinks else []),
        *(Argument(name, "i32", "in") for name in (*lists, "counts")),
        Argument("out", shape.dtype, "out"),
        *(Argument(name, "fp32", "out") for name in _PARTS if kind == "decodes"),
        Argument("max_blocks", "i32", "scalar"),
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    if arch.startswith("sm_"):
        options["maxnreg"] = tiling.maxnreg
    return KernelSpec("attention", "triton", parameters, arguments, options, needed_by=needed_by)


_PARTS = ("part", "part_best", "part_total")


def _combine(shape: AttentionShape, decode: Tiling, needed_by: tuple[str, ...]) -> KernelSpec:
    block_d = _power_of_2(shape.v_dim)
    rows = 4 if block_d <= 256 else 1
    parameters: dict[str, Value] = {
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "DV": shape.v_dim,
        "dtype": shape.dtype,
        "block_m": decode.block_m,
        "block_d": block_d,
        "rows": rows,
        "parts": max(1, 4096 // (rows * block_d)),
    }
    arguments = (
        *(Argument(name, "i32", "in") for name in ("cu_seqlens_q", "decode_tiles", "shares", "counts")),
        *(Argument(name, "fp32", "in") for name in _PARTS),
        Argument("out", shape.dtype, "out"),
        *(Argument(name, "i32", "scalar") for name in ("num_seqs", "num_tokens")),
    )
    return KernelSpec("attention_combine", "triton", parameters, arguments, {"num_warps": 4}, needed_by=needed_by)


def _parts(size: int) -> tuple[int, int | None]:
    """The powers of two, 16 at least, that a head is cut into: two that make it up exactly, or one that holds it."""
    high = 1 << (size.bit_length() - 1)
    low = size - high
    return (high, low) if low >= 16 and low.bit_count() == 1 else (max(16, _power_of_2(size)), None)


def _power_of_2(number: int) -> int:
    """The smallest that is at least ``number``."""
    return 1 << (number - 1).bit_length()
