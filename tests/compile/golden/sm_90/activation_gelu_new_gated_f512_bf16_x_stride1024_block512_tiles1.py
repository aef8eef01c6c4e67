# activation(kind=gelu_new, gated=True, F=512, dtype=bf16, x_stride=1024, block=512, tiles=1, num_warps=2) for triton

import triton
import triton.language as tl


@triton.jit
def activation_gelu_new_gated_f512_bf16_x_stride1024_block512_tiles1(x_ptr, out_ptr):
    """act(gate) * up of rows with F features of gate, then F of up; act is gelu_new."""
    F: tl.constexpr = 512
    BLOCK: tl.constexpr = 512
    TILES: tl.constexpr = 1  # programs that share a row
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * 1024 + column).to(tl.float32)
    # (1 + tanh(z)) / 2 is sigmoid(2z), here with z = sqrt(2/pi) * (x + 0.044715 x³)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    y = y.to(tl.bfloat16).to(tl.float32)
    y *= tl.load(x_ptr + row * 1024 + F + column).to(tl.float32)
    tl.store(out_ptr + row * F + column, y.to(tl.bfloat16))
