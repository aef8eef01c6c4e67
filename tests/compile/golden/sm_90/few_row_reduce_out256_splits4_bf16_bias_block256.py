# few_row_reduce(OUT=256, splits=4, dtype=bf16, bias=True, block=256, num_warps=2) for triton

import triton
import triton.language as tl


@triton.jit(do_not_specialize=['num_rows'])
def few_row_reduce_out256_splits4_bf16_bias_block256(part_ptr, bias_ptr, out_ptr, num_rows):
    """Adds the parts [SPLITS, num_rows, OUT] of a row's outputs in their order, and the bias: a grid of [num_rows * 1]."""
    OUT: tl.constexpr = 256
    BLOCK: tl.constexpr = 256
    SPLITS: tl.constexpr = 4
    row = (tl.program_id(0) // 1).to(tl.int64)
    output = tl.program_id(0) % 1 * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(part_ptr + row * OUT + output)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(part_ptr + (split * num_rows + row) * OUT + output)
    y += tl.load(bias_ptr + output).to(tl.float32)
    tl.store(out_ptr + row * OUT + output, y.to(tl.bfloat16))
