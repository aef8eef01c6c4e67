"""Tile sizes of the Triton kernels of paged attention, by architecture and head size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.spec import MAX_REGISTERS, power_of_2
from fastgen.errors import InvalidArgumentError
from fastgen.version import installed_version


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel's tiles: rows of a query tile, keys of a KV tile, Triton's options, and how many programs a
    multiprocessor holds at once, which matters for decodes
    (see :class:`fastgen.compile.ops.attention.triton.AttentionPlan`). ``ahead`` chunks issue the product with the next
    KV tile's keys before the softmax of this one. ``persistent`` chunks take query tiles in turn; otherwise there is a
    program for each tile that a batch could have.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    ahead: bool = False
    persistent: bool = False

    @property
    def maxnreg(self) -> int:
        """Returns how many registers a thread may have, so that this many programs fit one NVIDIA multiprocessor.

        Without a limit the assembler takes more where it can, and spills some where that makes room for one more
        program, which is not planned for.
        """
        return min(MAX_REGISTERS, _SM_REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


_TWO_BUFFERS = 5  # stages on NVIDIA's: see below
_SM_REGISTERS = 65536  # of a multiprocessor, allocated eight a thread at a time


# Tile sizes, by architecture and by the features of the larger of a key and a value, up to which they hold: the largest
# that build without spilling registers and fit shared memory (99 KiB on sm_86 and sm_89, 64 KiB on gfx942). On Hopper,
# 128 rows take two warp groups and halve what is read of keys and values against 64. Only heads of 128 features are
# measured, on an H200. Of n stages Triton uses (n - 1) // 2 for keys and values, since their block numbers are loaded
# first. With five, the next tile is on its way while one is computed on. With three it is fetched in between, which
# only other programs of the same multiprocessor hide, and tiles of chunks leave room for none. So these would rather be
# smaller than have three.
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
# Heads of these sizes, without features that take more registers, can overlap products and exponentials. On an H200
# that is slower with Triton 3.6: 1.28 ms instead of 1.19 ms for a prompt of 8192 tokens.
_CHUNKS_AHEAD = {"sm_90": (64, 128), "interpret": (16, 64, 128)}
# Chunks of these architectures take query tiles in turn. The loop over query tiles takes registers too: where KV tiles
# have as many features as this, the assembler of Triton 3.6 spills. That of 3.9 does not.
_PERSISTENT, _LARGE_KV_TILE = {"sm_90", "interpret"}, 256 * 64
_TRITON_WITH_ROOM = (3, 9)
# Query tiles of decodes have 16 rows, the least that tensor cores take; more where more heads share a KV head, so that
# its keys and values are not read again for each 16 of them: up to 64 rows, or 32 where a head is large.
_DECODES: dict[str, dict[int, Tiling]] = {
    "sm_80": {
        64: Tiling(16, 64, 4, 3, programs_per_sm=3),
        80: Tiling(16, 64, 4, 3, programs_per_sm=2),
        128: Tiling(16, 64, 4, 3, programs_per_sm=2),
        256: Tiling(16, 32, 4, 3, programs_per_sm=2),
        576: Tiling(16, 32, 4, 2, programs_per_sm=2),
    },
    "sm_86": {
        64: Tiling(16, 64, 4, 3, programs_per_sm=3),
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
_DECODES["sm_90"] = {**_DECODES["sm_80"], 128: Tiling(16, 64, 4, 5, programs_per_sm=2)}
_DECODES |= {"sm_89": _DECODES["sm_86"], "sm_100": _DECODES["sm_80"]}
# For blocks smaller than a KV tile. Keys are gathered, which takes registers: larger tiles would spill some, by Triton
# 3.6 or by later ones.
_CHUNKS_GATHERED = {"sm_90": {256: Tiling(64, 32, 8, 5), 576: Tiling(32, 32, 8, 5)}}
_CHUNKS_GATHERED |= {"sm_100": _CHUNKS_GATHERED["sm_90"]}
_DECODES_GATHERED = {"sm_80": {64: Tiling(16, 64, 4, 2, programs_per_sm=3)}}
# fp32 dots are exact, without tensor cores, and their operands lie in registers.
_CHUNKS_FP32, _DECODES_FP32 = Tiling(16, 16, 8, 1), Tiling(16, 16, 4, 1, programs_per_sm=1)


def chunk_tiling(shape: AttentionShape, arch: str) -> Tiling:
    """Returns the default; an architecture that is not listed gets the smallest of NVIDIA's."""
    if shape.dtype == "fp32" and arch != "interpret":
        return _CHUNKS_FP32
    tiling = _smallest_that_holds(_CHUNKS.get(arch, _CHUNKS["sm_86"]), _CHUNKS_GATHERED.get(arch, {}), shape)
    is_large = max(shape.head_dim, shape.v_dim) * tiling.block_n >= _LARGE_KV_TILE
    return replace(tiling, persistent=arch in _PERSISTENT and (not is_large or _triton() >= _TRITON_WITH_ROOM))


def decode_tiling(shape: AttentionShape, arch: str) -> Tiling:
    """Returns the default; an architecture that is not listed gets the smallest of NVIDIA's."""
    if shape.dtype == "fp32" and arch != "interpret":
        return _DECODES_FP32
    tiling = _smallest_that_holds(_DECODES.get(arch, _DECODES["sm_86"]), _DECODES_GATHERED.get(arch, {}), shape)
    largest = 64 if shape.head_dim <= 128 else 32
    block_m = min(max(16, power_of_2(shape.group_size)), largest)
    if block_m == tiling.block_m:
        return tiling
    return replace(tiling, block_m=block_m, num_warps=2 * tiling.num_warps, programs_per_sm=1)


def chunk_tilings(shape: AttentionShape, arch: str) -> list[Tiling]:
    """Returns the tilings of chunks worth measuring, the default first: neighbours of it, products that are ahead,
    tiles in turn or not, and two programs a multiprocessor, of which one computes products while the other computes
    exponentials. These have half the registers, and spill a few outside the loop over keys."""
    default = chunk_tiling(shape, arch)
    found = _with_neighbours(default)
    is_plain = not (shape.alibi or shape.softcap or shape.values_in_keys) and shape.head_dim == shape.v_dim
    if is_plain and shape.head_dim in _CHUNKS_AHEAD.get(arch, ()):
        found += [replace(default, ahead=True, persistent=each) for each in (False, True)]
    if arch in _PERSISTENT:
        found.append(replace(default, persistent=not default.persistent))
        if default.block_m == 128 and shape.head_dim <= 128:
            found += [replace(default, num_stages=3, programs_per_sm=2, persistent=each) for each in (False, True)]
    return list(dict.fromkeys(found))


def decode_tilings(shape: AttentionShape, arch: str) -> list[Tiling]:
    """Returns the tilings of decodes worth measuring, the default first: neighbours of it, and two buffers of keys and
    values with two and with three programs a multiprocessor."""
    default = decode_tiling(shape, arch)
    found = _with_neighbours(default)
    if default.programs_per_sm > 1:
        stages = _TWO_BUFFERS if _stage_step(default) == 2 else default.num_stages + 1
        found += [replace(default, num_stages=stages, programs_per_sm=count) for count in (2, 3)]
    return list(dict.fromkeys(found))


def _with_neighbours(default: Tiling) -> list[Tiling]:
    """Returns the default, then KV tiles halved and doubled, one stage less and more, query tiles of half as many rows
    with half as many warps."""
    step = _stage_step(default)
    found = [default]
    if default.block_n > 16:
        found.append(replace(default, block_n=default.block_n // 2))
    # Two buffers of large tiles would be more than a multiprocessor has.
    stages = default.num_stages if default.block_m <= 32 else max(1, default.num_stages - step)
    found.append(replace(default, block_n=default.block_n * 2, num_stages=stages))
    found += [replace(default, num_stages=default.num_stages + change) for change in (-step, step)]
    if default.block_m > 32:
        found.append(replace(default, block_m=default.block_m // 2, num_warps=max(4, default.num_warps // 2)))
    return [tiling for tiling in found if tiling.num_stages > 0]


def _stage_step(tiling: Tiling) -> int:
    """Returns how many stages more are one buffer more of keys and values; NVIDIA's need two: see the table."""
    return 2 if tiling.num_stages > 2 else 1


def _smallest_that_holds(tilings: dict[int, Tiling], gathered: dict[int, Tiling], shape: AttentionShape) -> Tiling:
    size = max(shape.head_dim, shape.v_dim)
    if size > max(tilings):
        raise InvalidArgumentError(
            f"attention's heads have {size} features, and on a GPU at most {max(tilings)} fit; run this model on a CPU"
        )
    limit = min(limit for limit in tilings if limit >= size)
    return gathered.get(limit, tilings[limit]) if shape.block_size < tilings[limit].block_n else tilings[limit]


@cache
def _triton() -> tuple[int, ...]:
    """Returns the first two numbers of the installed Triton's version."""
    return tuple(map(int, (installed_version("triton") or "0.0").split(".")[:2]))
