# attention(kind=decodes, N=4, K=4, D=64, DV=64, P=16, dtype=bf16, sinks=False, block_m=16, block_n=64, d_high=64, v_high=64, v_is_k=False, ahead=False, persistent=False, v_stride=64, q_stride=768, scale=0.125, parts=8, rows=1, tile_numbers=7, early_lists=True, num_warps=4, num_stages=2, maxnreg=255) for triton
# llama on gfx942, weights in bf16
# num_warps=4
# num_stages=2
# maxnreg=255
# q: in bf16
# k_cache: in bf16
# v_cache: in bf16
# block_tables: in i32
# cu_seqlens_q: in i32
# decode_tiles: in i32
# shares: in i32
# counts: in i32
# out: out bf16
# part: out fp32
# part_best: out fp32
# part_total: out fp32
# arrivals: out i32
# max_blocks: scalar i32
# num_seqs: scalar i32
# num_tokens: scalar i32

import triton
import triton.language as tl

# T tokens, S sequences, B blocks. q [T, N, D], K cache [B, P, K, D], V cache [B, P, K, DV], block tables [S, max_blocks].
# A query tile has BLOCK_M rows, one for each (query, head) of one sequence and one KV head: row r is head r % G of query
# r // G. A KV tile has BLOCK_N keys, the first at a position that is a multiple of BLOCK_N.
N = tl.constexpr(4)  # query heads
K = tl.constexpr(4)  # KV heads
G = tl.constexpr(1)  # query heads that share a KV head
D = tl.constexpr(64)  # features of a query and of a key
DV = tl.constexpr(64)  # features of a value
P = tl.constexpr(16)  # tokens of a block
BLOCK_M = tl.constexpr(16)
BLOCK_N = tl.constexpr(64)
Q_STRIDE = tl.constexpr(768)  # from a token's queries to the next token's
V_STRIDE = tl.constexpr(64)  # from a head's value to the next one's
SCALE = tl.constexpr(0.125)
LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with powers of 2
LOWEST = tl.constexpr(-1.0e30)  # below every score, but finite: a row that has seen no key sums to 0, not NaN
PARTS = tl.constexpr(8)  # of a query tile, joined at once
ROWS = tl.constexpr(1)  # of a query tile, joined at once
BLOCK_D = tl.constexpr(64)
BLOCK_ZEROS = tl.constexpr(1024)
TILE = tl.constexpr(7)  # numbers that describe a query tile
NO_BLOCK = tl.constexpr(-(2**31))


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
        if MASKED:
            visible = key[None, :] <= query_pos[:, None]
            score = tl.where(visible, score, float("-inf"))

        new_best = tl.maximum(best, tl.max(score, 1) * (SCALE * LOG2E))
        weight = tl.exp2(score * (SCALE * LOG2E) - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
        if MASKED:
            v = tl.load(v_row[:, None] + tl.arange(0, 64)[None, :], real[:, None], 0.0)
        else:
            v = tl.load(v_row[:, None] + tl.arange(0, 64)[None, :])
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, best, total


@triton.jit
def query_tile(tile_ptr, is_there):
    """Returns what the plan says of a query tile: its sequence, its first row, the KV tiles before it and its own, and
    the sequence's first token, new tokens and length.
    """
    seq = tl.load(tile_ptr, is_there, 0)
    first_row = tl.load(tile_ptr + 1, is_there, 0)
    first_work = tl.load(tile_ptr + 2, is_there, 0)
    kv_tiles = tl.load(tile_ptr + 3, is_there, 0)
    start = tl.load(tile_ptr + 4, is_there, 0)
    num_queries = tl.load(tile_ptr + 5, is_there, 0)
    seq_len = tl.load(tile_ptr + 6, is_there, 0)
    return seq, first_row, first_work, kv_tiles, start, num_queries, seq_len


@triton.jit
def join(
    part_ptr, part_best_ptr, part_total_ptr, arrivals_ptr, out_ptr,
    part, num_parts, first_program, kv_head, start, first_row, num_rows,
):
    """Joins the parts of a query tile, of which this program has just stored one.

    PARTS neighbouring parts become one, in the place of the first of them, and so on until one is left: the output.
    This is done by whichever program arrives last. Which parts are added, and in which order, depends on their places
    alone, so the sums are the same in any order of arrival. An arrival releases what all threads of a program stored,
    and acquires what the others did. The plan makes the arrivals zero, and each layer adds as many as there are parts.
    """
    arrival_ptr = arrivals_ptr + kv_head
    apart = 1  # programs from one part to the next
    while num_parts > 1:
        first = part // PARTS * PARTS
        count = tl.minimum(num_parts - first, PARTS)
        program = first_program + first * apart
        # A lone part waits for no other. Its counter may belong to another query tile, which begins here.
        is_last = count == 1
        if count > 1:
            tl.debug_barrier()
            is_last = tl.atomic_add(arrival_ptr + program * K, 1, sem="acq_rel", scope="gpu") % count == count - 1
        if is_last:
            num_parts = (num_parts + PARTS - 1) // PARTS
            feature = tl.arange(0, BLOCK_D)
            for begin in range(0, num_rows, ROWS):
                row = begin + tl.arange(0, ROWS)
                is_row = row < num_rows
                is_feature = is_row[:, None] & (feature < DV)[None, :]
                # All parts are requested before the first is used. Those behind the last weigh nothing.
                slot = (program + 0 * apart) * 2 + (first == 0).to(tl.int32)
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 0, num_rows, 0)
                best_0 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_0 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_0 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 1 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 1, num_rows, 0)
                best_1 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_1 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_1 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 2 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 2, num_rows, 0)
                best_2 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_2 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_2 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 3 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 3, num_rows, 0)
                best_3 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_3 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_3 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 4 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 4, num_rows, 0)
                best_4 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_4 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_4 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 5 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 5, num_rows, 0)
                best_5 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_5 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_5 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 6 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 6, num_rows, 0)
                best_6 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_6 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_6 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                slot = (program + 7 * apart) * 2
                place = (slot * K + kv_head).to(tl.int64) * BLOCK_M + row
                is_there = row < tl.where(count > 7, num_rows, 0)
                best_7 = tl.load(part_best_ptr + place, is_there, LOWEST)
                total_7 = tl.load(part_total_ptr + place, is_there, 0.0)
                acc_7 = tl.load(part_ptr + (place * DV)[:, None] + feature[None, :], is_there[:, None] & (feature < DV)[None, :], 0.0)
                best = best_0
                best = tl.maximum(best, best_1)
                best = tl.maximum(best, best_2)
                best = tl.maximum(best, best_3)
                best = tl.maximum(best, best_4)
                best = tl.maximum(best, best_5)
                best = tl.maximum(best, best_6)
                best = tl.maximum(best, best_7)
                weight = tl.exp2(best_0 - best)
                total = weight * total_0
                acc = weight[:, None] * acc_0
                weight = tl.exp2(best_1 - best)
                total += weight * total_1
                acc += weight[:, None] * acc_1
                weight = tl.exp2(best_2 - best)
                total += weight * total_2
                acc += weight[:, None] * acc_2
                weight = tl.exp2(best_3 - best)
                total += weight * total_3
                acc += weight[:, None] * acc_3
                weight = tl.exp2(best_4 - best)
                total += weight * total_4
                acc += weight[:, None] * acc_4
                weight = tl.exp2(best_5 - best)
                total += weight * total_5
                acc += weight[:, None] * acc_5
                weight = tl.exp2(best_6 - best)
                total += weight * total_6
                acc += weight[:, None] * acc_6
                weight = tl.exp2(best_7 - best)
                total += weight * total_7
                acc += weight[:, None] * acc_7

                if num_parts == 1:
                    tile_row = first_row + row
                    token = (start + tile_row // G).to(tl.int64)
                    head = kv_head * G + tile_row % G
                    out = (acc / total[:, None]).to(tl.bfloat16)
                    tl.store(out_ptr + (token * (N * DV) + head * DV)[:, None] + feature[None, :], out, is_feature)
                else:
                    part_row = ((program * 2 + (first == 0).to(tl.int32)) * K + kv_head).to(tl.int64) * BLOCK_M + row
                    tl.debug_barrier()  # all threads have read what is overwritten here
                    tl.store(part_best_ptr + part_row, best, is_row)
                    tl.store(part_total_ptr + part_row, total, is_row)
                    tl.store(part_ptr + (part_row * DV)[:, None] + feature[None, :], acc, is_feature)
            part = part // PARTS
            apart *= PARTS
            arrival_ptr += tl.num_programs(0)
        else:
            num_parts = 0


@triton.jit(do_not_specialize=['max_blocks', 'num_seqs', 'num_tokens'])
def attention_decodes_n4_k4_d64_dv64_p16_bf16_block_m16_block_n64_d_high64_v_high64_v_stride64_q_stride768_scale0_125_parts8(q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, cu_seqlens_q_ptr, decode_tiles_ptr, shares_ptr, counts_ptr, out_ptr, part_ptr, part_best_ptr, part_total_ptr, arrivals_ptr, max_blocks, num_seqs, num_tokens):
    """Attention of decodes: each program takes its share of all KV tiles in the order of the work list.

    A query tile within one share is finished here. Of one that continues in other programs' shares, this program
    leaves its part, in slot 2i + 1 where the tile begins in program i and in slot 2i where it began earlier; the last
    of them joins the parts. Rows of no sequence become zero.
    """
    # All at once, so that none waits for another. For that a share repeats the entry of its first query tile.
    kv_head = tl.program_id(0) % K
    program = tl.program_id(0) // K
    share_ptr = shares_ptr + program * (2 + TILE)
    used = tl.load(cu_seqlens_q_ptr + num_seqs).to(tl.int64) * (N * DV)
    total_work = tl.load(counts_ptr + 1)
    share = tl.load(counts_ptr + 2)
    first_index = tl.load(share_ptr)
    end_index = tl.load(share_ptr + 1) + 1
    seq, first_row, first_work, kv_tiles, start, num_queries, seq_len = query_tile(share_ptr + 2, True)

    end_zeros = num_tokens.to(tl.int64) * (N * DV)
    zero = tl.full([BLOCK_ZEROS], 0.0, tl.bfloat16)
    for first_zero in range(used + tl.program_id(0) * BLOCK_ZEROS, end_zeros, tl.num_programs(0) * BLOCK_ZEROS):
        place = first_zero + tl.arange(0, BLOCK_ZEROS)
        tl.store(out_ptr + place, zero, place < end_zeros)

    if program * share >= total_work:
        return
    k_head_ptr = k_cache_ptr + kv_head * D
    v_head_ptr = v_cache_ptr + kv_head * V_STRIDE
    for index in tl.range(first_index, end_index, disable_licm=True):
        next_ptr = decode_tiles_ptr + (index + 1) * TILE
        next_seq, next_row, next_work, next_kv_tiles, next_start, next_queries, next_len = query_tile(
            next_ptr, index + 1 < end_index
        )
        my_begin = tl.maximum(program * share - first_work, 0)
        my_end = tl.minimum(program * share + share - first_work, kv_tiles)

        num_cached = seq_len - num_queries
        row = first_row + tl.arange(0, BLOCK_M)
        query = tl.minimum(row // G, num_queries - 1)  # rows after the last repeat it, and are not stored
        is_row = row < num_queries * G
        query_pos = num_cached + query
        head = kv_head * G + row % G
        token = (start + query).to(tl.int64)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * max_blocks
        q = tl.load(q_ptr + (token * Q_STRIDE + head * D)[:, None] + tl.arange(0, 64)[None, :])

        # KV tiles begin … end have all keys that any row sees.
        first_pos = num_cached + first_row // G
        last_pos = num_cached + tl.minimum((first_row + BLOCK_M - 1) // G, num_queries - 1)
        end = last_pos // BLOCK_N + 1

        begin = my_begin
        limit = my_end
        end = tl.minimum(end, limit)
        # The first block's number is requested beside the queries, and the loop finds it in the cache. It is used, or the
        # compiler would drop it: no block has the lowest number of all.
        first_block = tl.load(table_ptr + begin * BLOCK_N // P)
        end = tl.where(first_block == NO_BLOCK, begin, end)
        acc = tl.full([BLOCK_M, 64], 0.0, tl.float32)
        best = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        # In one loop, so that all tiles are fetched ahead: masks cost less than a second loop's first fetch.
        acc, best, total = attend(
            q, acc, best, total, query_pos, k_head_ptr, v_head_ptr, table_ptr,
            begin, end, seq_len, MASKED=True,
        )

        if (my_begin == 0) & (my_end == kv_tiles):
            out = (acc / total[:, None]).to(tl.bfloat16)
            tl.store(out_ptr + (token * (N * DV) + head * DV)[:, None] + tl.arange(0, 64)[None, :], out, is_row[:, None])
        else:
            slot = program * 2 + (my_begin == 0).to(tl.int32)
            part_row = (slot * K + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_best_ptr + part_row, best, is_row)
            tl.store(part_total_ptr + part_row, total, is_row)
            tl.store(part_ptr + (part_row * DV)[:, None] + tl.arange(0, 64)[None, :], acc, is_row[:, None])
            first_program = first_work // share
            num_parts = (first_work + kv_tiles - 1) // share - first_program + 1
            num_rows = tl.minimum(num_queries * G - first_row, BLOCK_M)
            join(
                part_ptr, part_best_ptr, part_total_ptr, arrivals_ptr, out_ptr,
                program - first_program, num_parts, first_program, kv_head, start, first_row, num_rows,
            )
        seq, first_row, first_work, kv_tiles = next_seq, next_row, next_work, next_kv_tiles
        start, num_queries, seq_len = next_start, next_queries, next_len
