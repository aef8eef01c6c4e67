# qkv(N=4, K=1, D=64, dtype=bf16, R=64, interleaved=False, in_place=True, q_block=4, k_block=1, v_block=1, q_tiles=1, k_tiles=1, tiles=3, num_warps=1) for triton

import triton
import triton.language as tl

N = tl.constexpr(4)  # query heads
K = tl.constexpr(1)  # KV heads
D = tl.constexpr(64)  # features of a head
Q_TILES = tl.constexpr(1)  # programs that share a token's queries
K_TILES = tl.constexpr(1)  # those that share its keys


@triton.jit
def qkv_n4_k1_d64_bf16_r64_in_place_q_block4_k_block1_v_block1_q_tiles1_k_tiles1_tiles3(qkv_ptr, cos_sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr, slots_ptr):
    """A tile of heads of one token, queries, keys or values: a grid of [T, 3].

    qkv [T, N + 2K, D]; a slot of the caches [K, D].
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_ptr = qkv_ptr + token * ((N + 2 * K) * D)
    if tile < Q_TILES:
        q_row = tile * 4 + tl.arange(0, 4)[:, None]

        q_first = tl.load(token_ptr + q_row * D + tl.arange(0, 32)[None, :]).to(tl.float32)
        q_second = tl.load(token_ptr + q_row * D + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

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
        k_row = (tile - Q_TILES) * 1 + tl.arange(0, 1)[:, None]

        k_first = tl.load(token_ptr + N * D + k_row * D + tl.arange(0, 32)[None, :]).to(tl.float32)
        k_second = tl.load(token_ptr + N * D + k_row * D + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)

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
        v_row = (tile - Q_TILES - K_TILES) * 1 + tl.arange(0, 1)[:, None]

        v = tl.load(token_ptr + (N + K) * D + v_row * D + tl.arange(0, 64)[None, :]).to(tl.float32)

        v_slot_ptr = v_cache_ptr + tl.load(slots_ptr + token) * (K * D)
        tl.store(v_slot_ptr + v_row * D + tl.arange(0, 64)[None, :], v.to(tl.bfloat16))

