# activation(kind=gelu_new, gated=False, F=1024, dtype=bf16, x_stride=1024, block=1024, tiles=1, num_warps=4) for triton

import triton
import triton.language as tl


@triton.jit
def activation_gelu_new_f1024_bf16_x_stride1024_block1024_tiles1(x_ptr, out_ptr):
    """act(x) of rows of F features; act is gelu_new."""
    F: tl.constexpr = 1024
    BLOCK: tl.constexpr = 1024
    TILES: tl.constexpr = 1  # programs that share a row
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * 1024 + column).to(tl.float32)
    # (1 + tanh(z)) / 2 is sigmoid(2z), here with z = sqrt(2/pi) * (x + 0.044715 x³)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out_ptr + row * F + column, y.to(tl.bfloat16))
