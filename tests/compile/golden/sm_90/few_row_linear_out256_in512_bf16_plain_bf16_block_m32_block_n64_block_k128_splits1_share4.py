# few_row_linear(OUT=256, IN=512, dtype=bf16, weight=plain, bias=False, out_dtype=bf16, block_m=32, block_n=64, block_k=128, splits=1, share=4, num_warps=4, num_stages=3) for triton

import triton
import triton.language as tl

OUT = tl.constexpr(256)
IN = tl.constexpr(512)
BLOCK_M = tl.constexpr(32)  # rows of x, all of them
BLOCK_N = tl.constexpr(64)  # outputs of a program
BLOCK_K = tl.constexpr(128)  # features in a step
STEPS = tl.constexpr(4)  # steps of all features
SHARE = tl.constexpr(4)  # steps of a program


@triton.jit(do_not_specialize=['num_rows'])
def few_row_linear_out256_in512_bf16_plain_bf16_block_m32_block_n64_block_k128_splits1_share4(x_ptr, weight_ptr, out_ptr, num_rows):
    """x [num_rows, IN] times weights [OUT, IN]: a grid of [4, 1].

    Weights are the left operand: of it tensor cores want many rows, and may take it from registers.
    """
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    # Rows and outputs behind the last repeat it, and are not stored.
    x_row_ptr = x_ptr + tl.minimum(row, num_rows - 1)[None, :] * IN
    feature = tl.arange(0, BLOCK_K)
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * IN
    sums = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for step in range(STEPS):
        at = feature + step * BLOCK_K
        x = tl.load(x_row_ptr + at[:, None])
        w = tl.load(weight_row_ptr + at[None, :])
        sums = tl.dot(w, x, sums, input_precision="ieee")
    out_row = row.to(tl.int64)
    stored = (row < num_rows)[None, :]
    tl.store(out_ptr + out_row[None, :] * OUT + output[:, None], sums.to(tl.bfloat16), stored)
