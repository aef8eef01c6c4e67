# activation(kind=silu, gated=True, F=128, dtype=bf16, x_stride=256, block=128, tiles=1, num_warps=1) for triton

import triton
import triton.language as tl


@triton.jit
def activation_silu_gated_f128_bf16_x_stride256_block128_tiles1(x_ptr, out_ptr):
    """act(gate) * up of rows with F features of gate, then F of up; act is silu."""
    F: tl.constexpr = 128
    BLOCK: tl.constexpr = 128
    TILES: tl.constexpr = 1  # programs that share a row
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * 256 + column).to(tl.float32)
    y = x * tl.sigmoid(x)
    y = y.to(tl.bfloat16).to(tl.float32)
    y *= tl.load(x_ptr + row * 256 + F + column).to(tl.float32)
    tl.store(out_ptr + row * F + column, y.to(tl.bfloat16))
