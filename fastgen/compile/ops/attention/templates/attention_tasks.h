// Causal attention of a ragged batch over a paged cache, in one pass with a running maximum (Milakov and Gimelshein,
// 2018).
//
//   N query heads, K KV heads, G = N / K query heads that read one KV head; D features of a key, DV of a value
//   P       tokens in a block. A block holds its keys as [K][D][P], so that a vector of keys gives a vector of scores,
//           and its values as [K][P][DV], or the values are the first DV features of the keys. With BF16_DOT it holds
//           pairs: [K][D / 2][P][2] and [K][P / 2][DV][2]
//   row     one query head of one token; rows that are computed together share what is loaded of keys and values
//   tile    TILE keys, from a multiple of TILE on: GROUPS vectors of scores, which a few rows have registers for
//   segment SEGMENT keys, from a multiple of SEGMENT on
//   pair    with BF16_DOT: two features of a key, or two keys of a value's feature, in the 32 bits of a lane; queries and
//           weights are rounded to bf16 too, and two products are added at once
//
// A segment's tiles are folded in order, and so are a row's segments. So a row's result depends neither on other rows
// nor on the threads that computed its segments.
#pragma once
#include <algorithm>
#include <atomic>

#include "numbers.h"
#include "threads.h"
#include "vector_math.h"

#ifndef FASTGEN_BF16_DOT  // as an editor reads this file
#define FASTGEN_BF16_DOT 0
enum Bias { NONE, PLAIN, SCALED };
using T = bf16;
constexpr int64_t N = 8, K = 2, D = 64, DV = 64, P = 16;
constexpr int64_t WINDOW = 0;  // positions that a query sees, its own included; 0 where it sees all
constexpr bool VALUES_IN_KEYS = false;
constexpr Bias ALIBI = NONE;
constexpr bool ALIBI_IN_BF16 = false;
constexpr double SOFTCAP = 0;  // 0 where scores are not capped
constexpr double SCALE = 0.125;
#endif

constexpr int64_t G = N / K;
constexpr int GROUPS = 4, TILE = GROUPS * LANES;
constexpr bool BF16_DOT = FASTGEN_BF16_DOT;
constexpr int STEP = BF16_DOT ? 2 : 1;  // products that are added at once
constexpr int64_t SEGMENT = 8 * TILE;
constexpr int MAX_ROWS = LANES == 16 ? 6 : LANES == 8 ? 2 : 4;  // with GROUPS vectors each they fit into the registers
constexpr int MAX_TASK_ROWS = 8 * MAX_ROWS;

namespace {

struct Batch {
    const float* q;  // [tokens][N][D], tokens q_stride apart
    const T* k_cache;
    const T* v_cache;  // unused where VALUES_IN_KEYS
    const int32_t* block_tables;  // [sequences][max_blocks]
    const int32_t* cu_seqlens_q;
    const int32_t* seq_lens;
    const float* slopes;  // [N], unused without ALIBI
    float* out;  // [tokens][N][DV]
    int64_t max_blocks, q_stride;
};

// The same rows of one sequence for some KV heads: row r of a head is its query head r % G of new token r / G.
struct Task {
    int64_t sequence, num_new, seq_len;
    int64_t first_row, num_rows, first_head, num_heads;
    int64_t first_state;  // in the workspace, where threads share the segments; else -1

    int64_t size() const { return num_rows * num_heads; }
    int64_t num_parts() const { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }
    int64_t part(int64_t i) const { return num_rows * i / num_parts(); }  // its first row
    int64_t token(int64_t r) const { return (first_row + r) / G; }
    int64_t query_head(int64_t head, int64_t r) const { return head * G + (first_row + r) % G; }
    int64_t position(int64_t r) const { return seq_len - num_new + token(r); }
    int64_t end() const { return position(num_rows - 1) + 1; }
    int64_t first_key(int64_t r) const {
        return WINDOW == 0 ? 0 : std::max<int64_t>(0, position(r) - (WINDOW - 1));
    }
    int64_t first_segment() const { return first_key(0) / SEGMENT; }
    int64_t num_segments() const { return (end() - 1) / SEGMENT + 1 - first_segment(); }
};

}  // namespace
