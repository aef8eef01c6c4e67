# latent_kv(N=4, L=128, R=32, nope_dim=32, dtype=bf16, interleaved=True, block=4, tiles=2, kv_norm=rms, kv_weight=True, kv_bias=False, kv_eps=1e-06, num_warps=1) for triton

import triton
import triton.language as tl

N = tl.constexpr(4)  # heads
L = tl.constexpr(128)  # features of the latent
R = tl.constexpr(32)  # rotated features, of the shared key and of each query
Q = tl.constexpr(64)  # features of a query as projected: those that are rotated come last


@triton.jit
def latent_kv_n4_l128_r32_nope_dim32_bf16_interleaved_block4_tiles2_rms_kv_weight_kv_eps1e_06(kv_ptr, kv_norm_weight_ptr, cos_sin_ptr, positions_ptr, cache_ptr, slots_ptr, q_ptr, q_latent_ptr):
    """A tile of queries of one token, or what it leaves in the cache: a grid of [T, 2].

    kv [T, L + R] is normed and rotated into the cache's slots [L + R]; the rotated features of q [T, N, Q] go behind the
    latent ones of q_latent [T, N, L + R].
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tile == 0:
        kv_row_ptr = kv_ptr + token * (L + R)
        slot_ptr = cache_ptr + tl.load(slots_ptr + token) * (L + R)
        latent = tl.load(kv_row_ptr + tl.arange(0, 128)[None, :]).to(tl.float32)

        latent_squares = tl.sum(latent * latent, 1, keep_dims=True)
        latent_scale = tl.rsqrt(latent_squares / 128 + 1e-06)
        latent_weight = tl.load(kv_norm_weight_ptr + tl.arange(0, 128)[None, :]).to(tl.float32)

        latent = (latent * latent_scale).to(tl.bfloat16).to(tl.float32)
        latent *= latent_weight
        latent = latent.to(tl.bfloat16).to(tl.float32)

        tl.store(slot_ptr + tl.arange(0, 128)[None, :], latent.to(tl.bfloat16))

        key_pairs = tl.load(kv_row_ptr + L + tl.arange(0, 32)[None, :]).to(tl.float32)
        key_first, key_second = tl.split(tl.reshape(key_pairs, [1, 16, 2]))

        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 32 + tl.arange(0, 16)[None, :]
        cos = tl.load(angle_ptr)
        sin = tl.load(angle_ptr + 16)
        key_first, key_second = (
            key_first * cos - key_second * sin,
            key_second * cos + key_first * sin,
        )
        key_pairs = tl.interleave(key_first, key_second)
        tl.store(slot_ptr + L + tl.arange(0, 32)[None, :], key_pairs.to(tl.bfloat16))

    else:
        head = (tile - 1) * 4 + tl.arange(0, 4)[:, None]
        query_pairs = tl.load(q_ptr + token * (N * Q) + head * Q + 32 + tl.arange(0, 32)[None, :]).to(tl.float32)
        query_first, query_second = tl.split(tl.reshape(query_pairs, [4, 16, 2]))

        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 32 + tl.arange(0, 16)[None, :]
        cos = tl.load(angle_ptr)
        sin = tl.load(angle_ptr + 16)
        query_first, query_second = (
            query_first * cos - query_second * sin,
            query_second * cos + query_first * sin,
        )
        query_pairs = tl.interleave(query_first, query_second)
        tl.store(q_latent_ptr + token * (N * (L + R)) + head * (L + R) + L + tl.arange(0, 32)[None, :], query_pairs.to(tl.bfloat16))

