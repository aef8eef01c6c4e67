# moe_combine(H=256, K=2, dtype=bf16, block=256, num_warps=1) for triton

import triton
import triton.language as tl

H = tl.constexpr(256)
K = tl.constexpr(2)
BLOCK = tl.constexpr(256)
PIECES = tl.constexpr(1)


@triton.jit
def moe_combine_h256_k2_bf16_block256(outputs_ptr, weights_ptr, out_ptr):
    """The weighted sum, in fp32 and in the order of the choices, of one token's K rows: BLOCK of H features."""
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    feature = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    inside = feature < H
    total = tl.full([BLOCK], 0.0, tl.float32)
    for place in tl.static_range(K):
        made = tl.load(outputs_ptr + (token * K + place) * H + feature, inside, 0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * K + place) * made
    tl.store(out_ptr + token * H + feature, total.to(tl.bfloat16), inside)
