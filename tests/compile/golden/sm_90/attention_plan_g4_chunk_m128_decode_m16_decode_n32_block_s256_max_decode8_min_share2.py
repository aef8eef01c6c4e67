# attention_plan(G=4, chunk_m=128, decode_m=16, decode_n=32, block_s=256, max_decode=8, min_share=2, num_warps=4) for triton

import triton
import triton.language as tl

# A query tile has rows for some (query, head) pairs of one sequence and one KV head: row r is head r % G of query r // G.
G = tl.constexpr(4)  # query heads that share a KV head
CHUNK_M = tl.constexpr(128)  # rows of a chunk's query tile
DECODE_M = tl.constexpr(16)  # rows of a decode's query tile
DECODE_N = tl.constexpr(32)  # keys of a decode's KV tile
MAX_DECODE = tl.constexpr(8)  # a sequence with more queries is a chunk
MIN_SHARE = tl.constexpr(2)  # KV tiles that are worth a program of their own
BLOCK_S = tl.constexpr(256)  # at least as many as there are sequences
BLOCK_PROGRAMS = tl.constexpr(256)
BLOCK_TILES = tl.constexpr(64)


@triton.jit(do_not_specialize=['num_seqs', 'num_programs'])
def attention_plan_g4_chunk_m128_decode_m16_decode_n32_block_s256_max_decode8_min_share2(cu_seqlens_q_ptr, seq_lens_ptr, chunk_tiles_ptr, decode_tiles_ptr, shares_ptr, counts_ptr, num_seqs, num_programs):
    """The work lists of a step's attention. Program i lists what sequence i needs.

    What it must know of the others, sums over all sequences, it computes by itself: that is cheaper than to be told.
    The decodes' query tiles laid end to end are a line of KV tiles. Each decoding program takes an even share of it,
    wherever one sequence ends and the next begins, so all programs end together whatever the lengths are.
    """
    mine = tl.program_id(0)
    seq = tl.arange(0, BLOCK_S)
    there = seq < num_seqs
    start = tl.load(cu_seqlens_q_ptr + seq, there, 0)
    num_queries = tl.load(cu_seqlens_q_ptr + seq + 1, there, 0) - start
    seq_len = tl.load(seq_lens_ptr + seq, there, 0)
    is_chunk = num_queries > MAX_DECODE

    chunk_tiles = tl.where(is_chunk, (num_queries * G + CHUNK_M - 1) // CHUNK_M, 0)
    decode_tiles = tl.where(is_chunk, 0, (num_queries * G + DECODE_M - 1) // DECODE_M)
    kv_tiles = (seq_len + DECODE_N - 1) // DECODE_N
    work = decode_tiles * kv_tiles
    total_work = tl.sum(work)
    share = tl.maximum((total_work + num_programs - 1) // num_programs, MIN_SHARE)
    if mine == 0:
        tl.store(counts_ptr, tl.sum(chunk_tiles))
        tl.store(counts_ptr + 1, total_work)
        tl.store(counts_ptr + 2, share)

    # A chunk's last tile sees most keys and takes longest: it comes first.
    first_tile = tl.sum(tl.where(seq < mine, chunk_tiles, 0))
    num_tiles = tl.sum(tl.where(seq == mine, chunk_tiles, 0))
    for begin in range(0, num_tiles, BLOCK_TILES):
        tile = begin + tl.arange(0, BLOCK_TILES)
        entry = chunk_tiles_ptr + (first_tile + tile) * 2
        tl.store(entry, mine, tile < num_tiles)
        tl.store(entry + 1, (num_tiles - 1 - tile) * CHUNK_M, tile < num_tiles)

    first_tile = tl.sum(tl.where(seq < mine, decode_tiles, 0))
    num_tiles = tl.sum(tl.where(seq == mine, decode_tiles, 0))
    my_kv_tiles = tl.sum(tl.where(seq == mine, kv_tiles, 0))
    first_work = tl.sum(tl.where(seq < mine, work, 0))
    for begin in range(0, num_tiles, BLOCK_TILES):
        tile = begin + tl.arange(0, BLOCK_TILES)
        entry = decode_tiles_ptr + (first_tile + tile) * 4
        tl.store(entry, mine, tile < num_tiles)
        tl.store(entry + 1, tile * DECODE_M, tile < num_tiles)
        tl.store(entry + 2, first_work + tile * my_kv_tiles, tile < num_tiles)
        tl.store(entry + 3, my_kv_tiles, tile < num_tiles)

    # The query tile in which each program's share begins, and the one in which it ends.
    end_work = first_work + num_tiles * my_kv_tiles
    for begin in range(0, num_programs, BLOCK_PROGRAMS):
        program = begin + tl.arange(0, BLOCK_PROGRAMS)
        first = program * share
        last = tl.minimum(first + share, total_work) - 1
        begins_here = (program < num_programs) & (first >= first_work) & (first < end_work)
        ends_here = (program < num_programs) & (last >= first_work) & (last < end_work) & (first < total_work)
        per_tile = tl.maximum(my_kv_tiles, 1)
        tl.store(shares_ptr + program * 2, first_tile + (first - first_work) // per_tile, begins_here)
        tl.store(shares_ptr + program * 2 + 1, first_tile + (last - first_work) // per_tile, ends_here)
