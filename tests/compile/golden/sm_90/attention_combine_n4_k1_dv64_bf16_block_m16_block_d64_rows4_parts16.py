# attention_combine(N=4, K=1, DV=64, dtype=bf16, block_m=16, block_d=64, rows=4, parts=16, num_warps=4) for triton

import triton
import triton.language as tl

# T tokens, S sequences; a query tile of a decode has BLOCK_M rows, row r being head r % G of query r // G.
N = tl.constexpr(4)  # query heads
K = tl.constexpr(1)  # KV heads
G = tl.constexpr(4)  # query heads that share a KV head
DV = tl.constexpr(64)  # features of a value
BLOCK_M = tl.constexpr(16)
BLOCK_D = tl.constexpr(64)
ROWS = tl.constexpr(4)  # of a query tile, that one program combines
PARTS = tl.constexpr(16)  # that it reads at once
BLOCK_ZEROS = tl.constexpr(1024)


@triton.jit(do_not_specialize=['num_seqs', 'num_tokens'])
def attention_combine_n4_k1_dv64_bf16_block_m16_block_d64_rows4_parts16(cu_seqlens_q_ptr, decode_tiles_ptr, shares_ptr, counts_ptr, part_ptr, part_best_ptr, part_total_ptr, out_ptr, num_seqs, num_tokens):
    """Combines the parts of query tiles that lie in several programs' shares; gives rows of no sequence zeros.

    A program belongs to the border between two shares. Where no query tile goes on across it, or one that crossed an
    earlier border already, there is nothing to do.
    """
    used = tl.load(cu_seqlens_q_ptr + num_seqs).to(tl.int64)
    zero = tl.full([BLOCK_ZEROS], 0.0, tl.bfloat16)
    end = num_tokens.to(tl.int64) * (N * DV)
    for begin in range(used * (N * DV) + tl.program_id(0) * BLOCK_ZEROS, end, tl.num_programs(0) * BLOCK_ZEROS):
        place = begin + tl.arange(0, BLOCK_ZEROS)
        tl.store(out_ptr + place, zero, place < end)

    first_row = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS
    kv_head = tl.program_id(0) // (BLOCK_M // ROWS) % K
    border = tl.program_id(0) // (BLOCK_M // ROWS) // K + 1
    share = tl.load(counts_ptr + 2)
    if border * share >= tl.load(counts_ptr + 1):
        return
    entry = decode_tiles_ptr + tl.load(shares_ptr + border * 2) * 4
    seq = tl.load(entry)
    tile_row = tl.load(entry + 1)
    first_work = tl.load(entry + 2)
    end_work = first_work + tl.load(entry + 3)
    first_program = border - 1
    if (first_work == border * share) | (first_work // share != first_program):
        return
    num_parts = (end_work - 1) // share - first_program + 1

    row = first_row + tl.arange(0, ROWS)
    feature = tl.arange(0, BLOCK_D)
    best = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    for begin in range(0, num_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        is_part = part < num_parts
        slot = (first_program + part) * 2 + (part == 0).to(tl.int32)
        place = (slot * K + kv_head).to(tl.int64)[:, None] * BLOCK_M + row[None, :]
        part_best = tl.load(part_best_ptr + place, is_part[:, None], -1.0e30)
        part_total = tl.load(part_total_ptr + place, is_part[:, None], 0.0)
        inside = is_part[:, None, None] & (feature < DV)[None, None, :]
        part_acc = tl.load(part_ptr + place[:, :, None] * DV + feature[None, None, :], inside, 0.0)
        new_best = tl.maximum(best, tl.max(part_best, 0))
        weight = tl.exp2(part_best - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight * part_total, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part_acc, 0)
        best = new_best

    start = tl.load(cu_seqlens_q_ptr + seq)
    num_queries = tl.load(cu_seqlens_q_ptr + seq + 1) - start
    row = tile_row + row
    token = (start + row // G).to(tl.int64)
    head = kv_head * G + row % G
    inside = (row < num_queries * G)[:, None] & (feature < DV)[None, :]
    out = (acc / total[:, None]).to(tl.bfloat16)
    tl.store(out_ptr + (token * (N * DV) + head * DV)[:, None] + feature[None, :], out, inside)
