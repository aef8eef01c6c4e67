# rms_norm(H=256, dtype=bf16, eps=1e-05, weight=True, bias=False, residual=False, num_warps=1, launch_pdl=True) for triton
# granite on sm_90, weights in bf16
# num_warps=1
# launch_pdl=True
# x: in bf16
# weight: in bf16
# out: out bf16

import triton
import triton.language as tl


@triton.jit
def rms_norm_h256_bf16_eps1e_05_weight(x_ptr, weight_ptr, out_ptr):
    """RMS norm of rows of H features; one program a row."""
    H: tl.constexpr = 256
    BLOCK: tl.constexpr = 256
    row = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = tl.full([BLOCK], True, tl.int1)
    weight = tl.load(weight_ptr + column, inside, 0.0)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row + column, inside, 0.0)
    x = x.to(tl.float32)

    normed = x * tl.rsqrt(tl.sum(x * x) / H + 1e-05)
    normed = normed.to(tl.bfloat16).to(tl.float32)
    normed *= weight.to(tl.float32)
    tl.store(out_ptr + row + column, normed.to(tl.bfloat16), inside)
