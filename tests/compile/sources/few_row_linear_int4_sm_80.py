# few_row_linear(OUT=1024, IN=256, dtype=bf16, weight=int4_weight_only, bias=False, out_dtype=bf16, block_m=16, block_n=64, block_k=128, splits=1, share=2, finish=activate, kind=silu, gated=True, num_warps=4, num_stages=4) for triton
# llama on sm_80, weights in int4_weight_only
# num_warps=4
# num_stages=4
# x: in bf16
# weight: in u8
# scale: in fp16
# out: out bf16
# num_rows: scalar i32

import triton
import triton.language as tl

OUT = tl.constexpr(1024)
IN = tl.constexpr(256)
BLOCK_M = tl.constexpr(16)  # rows of x, all of them
BLOCK_N = tl.constexpr(64)  # outputs of a program
BLOCK_K = tl.constexpr(128)  # features in a step
STEPS = tl.constexpr(2)  # steps of all features
SHARE = tl.constexpr(2)  # steps of a program


@triton.jit
def dequantize(codes, scale):
    """codes [BLOCK_N, BLOCK_K / 2], scale [BLOCK_N, BLOCK_K / 32], one for each 16 codes."""
    wide = tl.reshape((codes - 8).to(tl.float32), [BLOCK_N, BLOCK_K // 32, 16]) * scale[:, :, None]
    return tl.reshape(wide, [BLOCK_N, BLOCK_K // 2]).to(tl.bfloat16)


@triton.jit(do_not_specialize=['num_rows'])
def few_row_linear_out1024_in256_bf16_int4_weight_only_bf16_block_m16_block_n64_block_k128_splits1_share2_activate_silu_gate(x_ptr, weight_ptr, scale_ptr, out_ptr, num_rows):
    """x [num_rows, IN] times weights [OUT, IN]: a grid of [16, 1].

    Of the sums act(gate) * up is stored, act is silu.
    Weights are the left operand: of it tensor cores want many rows, and may take it from registers, where it is widened.
    """
    # In the first half the first outputs of pairs, in the other the second ones. Pairs behind the last repeat it.
    pair = tl.program_id(0) * 32 + tl.arange(0, BLOCK_N) % 32
    first_output = pair  # of the gate
    distance = 512
    output = first_output + tl.arange(0, BLOCK_N) // 32 * distance
    row = tl.arange(0, BLOCK_M)
    # Rows behind the last are zeros, without a request to memory. Outputs behind the last repeat it, and are not stored.
    is_row = (row < num_rows)[None, :]
    x_row_ptr = x_ptr + row[None, :] * IN
    # A group of 32 features has 16 bytes: in their low halves features 0 to 15, in the high ones 16 to 31.
    byte = tl.arange(0, BLOCK_K // 2)
    feature = byte // 16 * 32 + byte % 16
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * 128
    scale_row_ptr = scale_ptr + output.to(tl.int64)[:, None] * 8
    sums = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for step in range(STEPS):
        at = feature + step * BLOCK_K
        at_byte = byte + step * (BLOCK_K // 2)
        group = tl.arange(0, BLOCK_K // 32) + step * (BLOCK_K // 32)
        codes = tl.load(weight_row_ptr + at_byte[None, :])
        scale = tl.load(scale_row_ptr + group[None, :]).to(tl.float32)
        x_low = tl.load(x_row_ptr + at[:, None], is_row, 0.0)
        x_high = tl.load(x_row_ptr + at[:, None] + 16, is_row, 0.0)
        sums = tl.dot(dequantize((codes & 15).to(tl.int8), scale), x_low, sums, input_precision="ieee")
        sums = tl.dot(dequantize((codes >> 4).to(tl.int8), scale), x_high, sums, input_precision="ieee")
    out_row = row.to(tl.int64)
    first, second = tl.split(tl.permute(tl.reshape(sums, [2, 32, BLOCK_M]), [1, 2, 0]))
    pair = (tl.program_id(0) * 32 + tl.arange(0, 32))[:, None]
    first_output = pair  # of the gate
    distance = 512
    stored = is_row
    row = out_row[None, :]
    first = first.to(tl.bfloat16).to(tl.float32)
    second = second.to(tl.bfloat16).to(tl.float32)
    activated = first * tl.sigmoid(first)
    activated = activated.to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + row * 512 + pair, (activated * second).to(tl.bfloat16), stored)
