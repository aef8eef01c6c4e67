# grouped_linear(in_features=256, out_features=1024, dtype=bf16, gathers=True, scatters=False, bias=False, top_k=2, block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4, launch_pdl=True) for triton
# mixtral on sm_90, weights in int8_weight_only
# num_warps=8
# num_stages=4
# launch_pdl=True
# x: in bf16
# weight: in bf16
# order: in i32
# tiles: in i32
# num_tiles: in i32
# out: out bf16

import triton
import triton.language as tl

# M choices of experts, sorted; x has IN features, weight [E, OUT, IN].
IN = tl.constexpr(256)
OUT = tl.constexpr(1024)
BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(128)
BLOCK_K = tl.constexpr(64)
COLUMN_TILES = tl.constexpr(8)


@triton.jit
def grouped_linear_in_features256_out_features1024_bf16_gathers_top_k2_block_m128_block_n128_block_k64(x_ptr, weight_ptr, order_ptr, tiles_ptr, num_tiles_ptr, out_ptr):
    """One tile of rows, all of one expert, by BLOCK_N of its outputs."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // COLUMN_TILES
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first_row = tl.load(tiles_ptr + tile * 3 + 1)
    end_row = tl.load(tiles_ptr + tile * 3 + 2)
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < end_row
    row = tl.minimum(row, end_row - 1)  # rows after the last repeat it, and are not stored
    choice = tl.load(order_ptr + row)
    column = tl.program_id(0) % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    feature = tl.arange(0, BLOCK_K)
    x_row = x_ptr + (choice // 2).to(tl.int64)[:, None] * IN
    weight_row = weight_ptr + expert * (OUT * IN) + tl.minimum(column, OUT - 1).to(tl.int64)[:, None] * IN
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for begin in range(0, IN, BLOCK_K):
        x = tl.load(x_row + (begin + feature)[None, :])
        weight = tl.load(weight_row + (begin + feature)[None, :])
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    out_row = out_ptr + row.to(tl.int64)[:, None] * OUT
    tl.store(out_row + column[None, :], total.to(tl.bfloat16), is_row[:, None] & is_column[None, :])
