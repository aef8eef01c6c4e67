# attention(kind=chunks, N=4, K=2, D=64, DV=64, P=16, dtype=bf16, softcap=50.0, sinks=False, block_m=128, block_n=64, d_high=64, v_high=64, v_is_k=False, ahead=False, persistent=True, v_stride=64, q_stride=512, scale=0.125, num_warps=8, num_stages=5, maxnreg=255, launch_pdl=True) for triton
# gemma2 on sm_90, weights in bf16
# num_warps=8
# num_stages=5
# maxnreg=255
# launch_pdl=True
# q: in bf16
# k_cache: in bf16
# v_cache: in bf16
# block_tables: in i32
# cu_seqlens_q: in i32
# seq_lens: in i32
# chunk_tiles: in i32
# counts: in i32
# out: out bf16
# max_blocks: scalar i32

import triton
import triton.language as tl

# T tokens, S sequences, B blocks. q [T, N, D], K cache [B, P, K, D], V cache [B, P, K, DV], block tables [S, max_blocks].
# A query tile has BLOCK_M rows, one for each (query, head) of one sequence and one KV head: row r is head r % G of query
# r // G. A KV tile has BLOCK_N keys, the first at a position that is a multiple of BLOCK_N.
N = tl.constexpr(4)  # query heads
K = tl.constexpr(2)  # KV heads
G = tl.constexpr(2)  # query heads that share a KV head
D = tl.constexpr(64)  # features of a query and of a key
DV = tl.constexpr(64)  # features of a value
P = tl.constexpr(16)  # tokens of a block
BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(64)
Q_STRIDE = tl.constexpr(512)  # from a token's queries to the next token's
V_STRIDE = tl.constexpr(64)  # from a head's value to the next one's
SOFTCAP = tl.constexpr(50.0)
SCALE = tl.constexpr(0.125)
LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with powers of 2
LOWEST = tl.constexpr(-1.0e30)  # below every score, but finite: a row that has seen no key sums to 0, not NaN


@triton.jit
def attend(
    q, acc, best, total, query_pos,
    k_ptr, v_ptr, table_ptr, begin, end, num_keys, MASKED: tl.constexpr,
):
    """Takes KV tiles ``begin … end − 1`` into a query tile's softmax: ``acc`` and ``total`` are relative to ``best``.

    Unless MASKED, every row sees every key of these tiles. With MASKED, what no row may see takes no part: it may be
    another sequence's, or anything at all.
    """
    in_tile = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        key = tile * BLOCK_N + in_tile
        real = key < num_keys
        # The tile's keys are in several blocks.
        if MASKED:
            block = tl.load(table_ptr + key // P, real, 0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // P).to(tl.int64)
        slot = block * P + key % P
        k_row = k_ptr + slot * (K * D)
        v_row = v_ptr + slot * (K * V_STRIDE)

        if MASKED:
            k = tl.load(k_row[:, None] + tl.arange(0, 64)[None, :], real[:, None], 0.0)
        else:
            k = tl.load(k_row[:, None] + tl.arange(0, 64)[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score *= SCALE
        score = SOFTCAP - 2 * SOFTCAP / (tl.exp2(score * (2 * LOG2E / SOFTCAP)) + 1)  # SOFTCAP * tanh(score / SOFTCAP)
        score *= LOG2E
        if MASKED:
            visible = key[None, :] <= query_pos[:, None]
            score = tl.where(visible, score, float("-inf"))

        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
        if MASKED:
            v = tl.load(v_row[:, None] + tl.arange(0, 64)[None, :], real[:, None], 0.0)
        else:
            v = tl.load(v_row[:, None] + tl.arange(0, 64)[None, :])
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, best, total


@triton.jit(do_not_specialize=['max_blocks'])
def attention_chunks_n4_k2_d64_dv64_p16_bf16_softcap50_0_block_m128_block_n64_d_high64_v_high64_persistent_v_stride64_q_stri(q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, cu_seqlens_q_ptr, seq_lens_ptr, chunk_tiles_ptr, counts_ptr, out_ptr, max_blocks):
    """Attention of prompt chunks: a program takes query tiles and KV heads in turn, the longest first."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    # What does not change between tiles is computed for each: kept in registers, it would leave the inner loop too few.
    for passed in tl.range(0, tl.load(counts_ptr) * K - program, tl.num_programs(0), disable_licm=True):
        kv_head = (program + passed) % K
        index = (program + passed) // K
        seq = tl.load(chunk_tiles_ptr + index * 2)
        first_row = tl.load(chunk_tiles_ptr + index * 2 + 1)
        start = tl.load(cu_seqlens_q_ptr + seq)
        num_queries = tl.load(cu_seqlens_q_ptr + seq + 1) - start
        seq_len = tl.load(seq_lens_ptr + seq)
        k_head_ptr = k_cache_ptr + kv_head * D
        v_head_ptr = v_cache_ptr + kv_head * V_STRIDE

        num_cached = seq_len - num_queries
        row = first_row + tl.arange(0, BLOCK_M)
        query = tl.minimum(row // G, num_queries - 1)  # rows after the last repeat it, and are not stored
        is_row = row < num_queries * G
        query_pos = num_cached + query
        head = kv_head * G + row % G
        token = (start + query).to(tl.int64)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * max_blocks
        q = tl.load(q_ptr + (token * Q_STRIDE + head * D)[:, None] + tl.arange(0, 64)[None, :])

        # KV tiles begin … end have all keys that any row sees; full_begin … full_end those that every row sees completely.
        first_pos = num_cached + first_row // G
        last_pos = num_cached + tl.minimum((first_row + BLOCK_M - 1) // G, num_queries - 1)
        end = last_pos // BLOCK_N + 1
        full_end = (first_pos + 1) // BLOCK_N
        begin = 0

        acc = tl.full([BLOCK_M, 64], 0.0, tl.float32)
        best = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc, best, total = attend(
            q, acc, best, total, query_pos, k_head_ptr, v_head_ptr, table_ptr,
            begin, full_end, seq_len, MASKED=False,
        )
        acc, best, total = attend(
            q, acc, best, total, query_pos, k_head_ptr, v_head_ptr, table_ptr,
            tl.maximum(begin, full_end), end, seq_len, MASKED=True,
        )

        out = (acc / total[:, None]).to(tl.bfloat16)
        tl.store(out_ptr + (token * (N * DV) + head * DV)[:, None] + tl.arange(0, 64)[None, :], out, is_row[:, None])
