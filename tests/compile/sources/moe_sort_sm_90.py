# moe_sort(E=16, block=2048, block_m=128, num_warps=8, launch_pdl=True) for triton
# deepseek_v3 on sm_90, weights in bf16
# num_warps=8
# launch_pdl=True
# experts: in i32
# order: out i32
# tiles: out i32
# num_tiles: out i32
# num_choices: scalar i32

import triton
import triton.language as tl

E = tl.constexpr(16)
BINS = tl.constexpr(32)  # one for places after the last choice
BLOCK = tl.constexpr(2048)  # choices that are read at once
BLOCK_M = tl.constexpr(128)  # rows of a tile
BLOCK_TILES = tl.constexpr(64)


@triton.jit(do_not_specialize=['num_choices'])
def moe_sort_e16_block2048_block_m128(experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_choices):
    """Lists the choices of one expert, in their order, and its tiles. Each program counts the others' choices itself,
    which is cheaper than exchanging counts; so the order of programs does not matter.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.full([BINS], 0, tl.int32)
    for begin in range(0, num_choices, BLOCK):
        choice = begin + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(experts_ptr + choice, choice < num_choices, E), BINS)
    counts = tl.where(bins < E, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < expert, counts, 0))
    end = start + tl.sum(tl.where(bins == expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))
    num_tiles = tl.sum(tl.where(bins == expert, tiles, 0))
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles))
    for begin in range(0, num_tiles, BLOCK_TILES):
        tile = begin + tl.arange(0, BLOCK_TILES)
        entry = tiles_ptr + (first_tile + tile) * 3
        tl.store(entry, expert, tile < num_tiles)
        tl.store(entry + 1, start + tile * BLOCK_M, tile < num_tiles)
        tl.store(entry + 2, end, tile < num_tiles)

    place = start
    for begin in range(0, num_choices, BLOCK):
        choice = begin + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + choice, choice < num_choices, E) == expert
        tl.store(order_ptr + place + tl.cumsum(mine.to(tl.int32), 0) - 1, choice, mine)
        place += tl.sum(mine.to(tl.int32))
