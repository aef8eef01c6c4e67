# qkv(N=4, K=2, D=64, dtype=bf16, R=64, interleaved=False, in_place=True, q_norm=rms, q_over=head, q_per_head=False, q_weight=True, q_bias=False, q_eps=1e-06, k_norm=rms, k_over=head, k_per_head=False, k_weight=True, k_bias=False, k_eps=1e-06, q_block=4, k_block=2, v_block=2, q_tiles=1, k_tiles=1, tiles=3, num_warps=1, launch_pdl=True) for triton
# qwen3 on sm_90, weights in bf16
# num_warps=1
# launch_pdl=True
# qkv: out bf16
# q_norm_weight: in bf16
# k_norm_weight: in bf16
# cos_sin: in fp32
# positions: in i32
# k_cache: out bf16
# v_cache: out bf16
# slots: in i64

import triton
import triton.language as tl

N = tl.constexpr(4)  # query heads
K = tl.constexpr(2)  # KV heads
D = tl.constexpr(64)  # features of a head
Q_TILES = tl.constexpr(1)  # programs that share a token's queries
K_TILES = tl.constexpr(1)  # those that share its keys


@triton.jit
def qkv_n4_k2_d64_bf16_r64_in_place_rms_head_q_weight_q_eps1e_06_rms_head_k_weight_k_eps1e_06_q_block4_k_block2_v_block2_q_t(qkv_ptr, q_norm_weight_ptr, k_norm_weight_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr, slots_ptr):
    """A tile of heads of one token, queries, keys or values: a grid of [T, 3].

    qkv [T, N + 2K, D]; a slot of the caches [K, D].
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_ptr = qkv_ptr + token * ((N + 2 * K) * D)
    if tile < Q_TILES:
        q_row = tile * 4 + tl.arange(0, 4)[:, None]

        q_first = tl.load(token_ptr + q_row * D + tl.arange(0, 32)[None, :]).to(tl.float32)
        q_second = tl.load(token_ptr + q_row * D + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

        q_squares = tl.sum(q_first * q_first, 1, keep_dims=True) + tl.sum(q_second * q_second, 1, keep_dims=True)
        q_scale = tl.rsqrt(q_squares / 64 + 1e-06)
        q_weight_first = tl.load(q_norm_weight_ptr + tl.arange(0, 32)[None, :]).to(tl.float32)
        q_weight_second = tl.load(q_norm_weight_ptr + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

        q_first = (q_first * q_scale).to(tl.bfloat16).to(tl.float32)
        q_first *= q_weight_first
        q_first = q_first.to(tl.bfloat16).to(tl.float32)
        q_second = (q_second * q_scale).to(tl.bfloat16).to(tl.float32)
        q_second *= q_weight_second
        q_second = q_second.to(tl.bfloat16).to(tl.float32)

        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 64 + tl.arange(0, 32)[None, :]
        cos = tl.load(angle_ptr)
        sin = tl.load(angle_ptr + 32)
        q_first, q_second = (
            q_first * cos - q_second * sin,
            q_second * cos + q_first * sin,
        )

        tl.debug_barrier()  # every thread has read what is now overwritten
        tl.store(token_ptr + q_row * D + tl.arange(0, 32)[None, :], q_first.to(tl.bfloat16))
        tl.store(token_ptr + q_row * D + 32 + tl.arange(0, 32)[None, :], q_second.to(tl.bfloat16))

    elif tile < Q_TILES + K_TILES:
        k_row = (tile - Q_TILES) * 2 + tl.arange(0, 2)[:, None]

        k_first = tl.load(token_ptr + N * D + k_row * D + tl.arange(0, 32)[None, :]).to(tl.float32)
        k_second = tl.load(token_ptr + N * D + k_row * D + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

        k_squares = tl.sum(k_first * k_first, 1, keep_dims=True) + tl.sum(k_second * k_second, 1, keep_dims=True)
        k_scale = tl.rsqrt(k_squares / 64 + 1e-06)
        k_weight_first = tl.load(k_norm_weight_ptr + tl.arange(0, 32)[None, :]).to(tl.float32)
        k_weight_second = tl.load(k_norm_weight_ptr + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

        k_first = (k_first * k_scale).to(tl.bfloat16).to(tl.float32)
        k_first *= k_weight_first
        k_first = k_first.to(tl.bfloat16).to(tl.float32)
        k_second = (k_second * k_scale).to(tl.bfloat16).to(tl.float32)
        k_second *= k_weight_second
        k_second = k_second.to(tl.bfloat16).to(tl.float32)

        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 64 + tl.arange(0, 32)[None, :]
        cos = tl.load(angle_ptr)
        sin = tl.load(angle_ptr + 32)
        k_first, k_second = (
            k_first * cos - k_second * sin,
            k_second * cos + k_first * sin,
        )

        k_slot_ptr = k_cache_ptr + tl.load(slots_ptr + token) * (K * D)
        tl.store(k_slot_ptr + k_row * D + tl.arange(0, 32)[None, :], k_first.to(tl.bfloat16))
        tl.store(k_slot_ptr + k_row * D + 32 + tl.arange(0, 32)[None, :], k_second.to(tl.bfloat16))

    else:
        v_row = (tile - Q_TILES - K_TILES) * 2 + tl.arange(0, 2)[:, None]

        v = tl.load(token_ptr + (N + K) * D + v_row * D + tl.arange(0, 64)[None, :]).to(tl.float32)

        v_slot_ptr = v_cache_ptr + tl.load(slots_ptr + token) * (K * D)
        tl.store(v_slot_ptr + v_row * D + tl.arange(0, 64)[None, :], v.to(tl.bfloat16))

