// The part of attention over one tile of keys: scores, weights, sums of values.
#pragma once
#include "attention_keys.h"

namespace {

// The state of a row after some keys: `best` the largest logarithm, to base 2, of a weight; `total`, lane by lane, the
// sum of 2^(logarithm - best); `mixed` the sum of 2^(logarithm - best) * value.
struct State {
    float best;
    f32v total;
    float mixed[DV_LANES];

    void clear() {
        best = -INFINITE;
        total = f32v{};
        std::memset(mixed, 0, sizeof mixed);
    }
};

// What one thread works on.
struct Scratch {
    alignas(64) std::atomic<uint32_t> taken;  // 1 while a thread works on it
    alignas(64) float q[MAX_TASK_ROWS][D];  // as states: row r of head h of the task is h * num_rows + r
    State all[MAX_TASK_ROWS], segment[MAX_TASK_ROWS];
    alignas(64) float weights[MAX_TASK_ROWS][TILE];  // dot products at first; in the end pairs with BF16_DOT
    float keep[MAX_TASK_ROWS + LANES];
    Buffers buffers;
};

// 2 to the x, for x <= 0; exactly 0 from -127 down. x = n + f with |f| <= 1/2; a polynomial for 2 to the f, the one of
// its degree that is nearest relative to it (within 1e-7), and n into the exponent.
INLINE f32v power_of_2(f32v x) {
    const f32v within = larger(all_lanes(-127.0f), x);  // x where it is no number
    // Adding 1.5 * 2^23 leaves the nearest integer, in the low bits.
    const f32v shifted = within + all_lanes(12582912.0f);
    const f32v f = within - (shifted - all_lanes(12582912.0f));
    f32v p = all_lanes(1.3264727253e-3f);
    p = fma(p, f, all_lanes(9.6715127859e-3f));
    p = fma(p, f, all_lanes(5.5507337445e-2f));
    p = fma(p, f, all_lanes(2.4022242083e-1f));
    p = fma(p, f, all_lanes(6.9314697760e-1f));
    p = fma(p, f, all_lanes(1.0f));
    return bits_of<f32v>(bits_of<u32v>(p) + (bits_of<u32v>(shifted) << 23));
}

// A number to subtract from logarithms: while all keys are masked, weights are 2 to the minus infinity.
INLINE float finite(float best) { return best == -INFINITE ? 0.0f : best; }

INLINE f32v to_bf16(f32v x) {  // to the nearest, ties to even
    const u32v bits = bits_of<u32v>(x);
    return bits_of<f32v>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// a * b + sum, or with BF16_DOT the sum of the two products of each lane.
INLINE f32v multiply_add(f32v a, f32v b, f32v sum) {
#if FASTGEN_BF16_DOT
    return dot2(a, b, sum);
#else
    return fma(a, b, sum);
#endif
}

// Dot products of R queries with the keys of a tile's first C vectors. Meanwhile the next tile's keys are prefetched.
template <int R, int C, class E>
void dot(const float (*q)[D], const Tile<E>& tile, const Place* next, float (*products)[TILE]) {
    f32v sum[R][C] = {};
    for (int64_t d = 0; d < D; d += STEP) {
        f32v keys[C];
        for (int c = 0; c < C; ++c) keys[c] = keys_of(tile, c, d);
        if (next && d * P * sizeof(T) % 64 < STEP * P * sizeof(T)) {
            for (int g = 0; g < GROUPS; ++g) prefetch(next->k[g] + d * P);
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(all_lanes(q[r][d / STEP]), keys[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(products[r] + c * LANES, sum[r][c]);
    }
}

// Whether dot products become scores by more than the scale, which else is part of LOG2_OF_SCORE.
constexpr bool IS_ADJUSTED = ALIBI != NONE || SOFTCAP != 0;
constexpr double LOG2_E = 1.4426950408889634;
// Times a score this is a weight's logarithm to base 2.
constexpr float LOG2_OF_SCORE = IS_ADJUSTED ? LOG2_E : SCALE * LOG2_E;

// From dot products of one row to scores: scale, bias and cap where there are any, and a mask.
INLINE void finish_scores(const Batch& batch, const Task& task, int64_t head, int64_t r, int64_t first_key,
                          float* scores) {
    for (int g = 0; IS_ADJUSTED && g < GROUPS; ++g) {
        f32v score = load<f32v>(scores + g * LANES);
        if constexpr (ALIBI == NONE) {
            score = score * all_lanes(float(SCALE));
        } else {
            const f32v position = to_float(LANE + int32_t(first_key + g * LANES));
            const f32v slope = all_lanes(batch.slopes[task.query_head(head, r)]);
            const f32v bias = ALIBI_IN_BF16 ? to_bf16(slope * to_bf16(position)) : slope * position;
            score = ALIBI == SCALED ? (score + bias) * all_lanes(float(SCALE)) : score * all_lanes(float(SCALE)) + bias;
        }
        if constexpr (SOFTCAP != 0) {
            score = all_lanes(float(SOFTCAP)) * tanh(score / all_lanes(float(SOFTCAP)));
        }
        store(scores + g * LANES, score);
    }
    const int64_t last = task.position(r), first = task.first_key(r);
    if (first_key + TILE <= last + 1 && first_key >= first) return;
    for (int g = 0; g < GROUPS; ++g) {
        const i32v position = LANE + int32_t(first_key + g * LANES);
        const i32v seen = (position <= all_lanes(int32_t(last))) & (position >= all_lanes(int32_t(first)));
        store(scores + g * LANES, select(seen, load<f32v>(scores + g * LANES), all_lanes(-INFINITE)));
    }
}

// Turns dot products of `count` rows of a head, from row r0 of the task on, into weights, and into factors `keep` for
// the states so far.
INLINE void weigh(const Batch& batch, const Task& task, int64_t head, int64_t r0, int64_t count, int64_t first_key,
                  float (*weights)[TILE], float* keep, State* states) {
#if FASTGEN_BF16_DOT
    const f32v ONES = bits_of<f32v>(all_lanes(0x3f803f80));  // in pairs
#endif
    float before[LANES] = {}, origin[LANES] = {};
    for (int64_t r = 0; r < count; ++r) {
        finish_scores(batch, task, head, r0 + r, first_key, weights[r]);
        f32v best = load<f32v>(weights[r]);
        for (int g = 1; g < GROUPS; ++g) best = larger(best, load<f32v>(weights[r] + g * LANES));
        before[r] = states[r].best;
        states[r].best = std::max(before[r], largest_of(best) * LOG2_OF_SCORE);
        origin[r] = finite(states[r].best);
    }
    store(keep, power_of_2(load<f32v>(before) - load<f32v>(origin)));
    for (int64_t r = 0; r < count; ++r) {
        f32v sum = {};
        const auto weight_of = [&](int g) {
            const f32v score = load<f32v>(weights[r] + g * LANES);
            return power_of_2(fma(score, all_lanes(LOG2_OF_SCORE), all_lanes(-origin[r])));
        };
        for (int g = 0; g < GROUPS; g += STEP) {
#if FASTGEN_BF16_DOT
            const f32v pairs = narrow_to_bf16(weight_of(g), weight_of(g + 1));
            store(weights[r] + g * LANES / 2, pairs);  // overwrites scores that have been read
            sum = dot2(pairs, ONES, sum);  // of the weights as they are rounded, so that the mean of equal values is that value
#else
            const f32v weight = weight_of(g);
            store(weights[r] + g * LANES, weight);
            sum += weight;
#endif
        }
        states[r].total = states[r].total * all_lanes(keep[r]) + sum;
    }
}

// state.mixed = state.mixed * keep + weights * values, for C vectors of features of R rows. The values of all groups of
// keys are read side by side, which memory serves fastest; meanwhile the next tile's are prefetched.
template <int R, int C, class E>
INLINE void mix_some(const float (*weights)[TILE], const float* keep, const Tile<E>& tile, const Place* next,
                     int64_t first, State* states) {
    f32v sum[R][C];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) sum[r][c] = load<f32v>(states[r].mixed + first + c * LANES) * all_lanes(keep[r]);
    }
    for (int64_t i = 0; i < LANES; i += STEP) {
        for (int g = 0; g < GROUPS; ++g) {
            if (g * LANES + i >= tile.num_keys) break;
            // 0 times what is no number would be none.
            if (WINDOW > 0 && g * LANES + i + STEP <= tile.first_seen) continue;
            f32v values[C];
            for (int c = 0; c < C; ++c) values[c] = values_of(tile, g, i, first + c * LANES);
            if (!VALUES_IN_KEYS && next) prefetch_numbers(next->v[g] + i * DV + STEP * first, STEP * C * LANES);
            for (int r = 0; r < R; ++r) {
                const f32v weight = all_lanes(weights[r][(g * LANES + i) / STEP]);
                for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(weight, values[c], sum[r][c]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(states[r].mixed + first + c * LANES, sum[r][c]);
    }
}

// For all features, in as few passes over the values as there are registers for.
template <int R, class E>
void mix(const float (*weights)[TILE], const float* keep, const Tile<E>& tile, const Place* next, State* states) {
    constexpr int MOST = GROUPS * MAX_ROWS / R, PASSES = (DV_VECTORS + MOST - 1) / MOST;
    constexpr int C = (DV_VECTORS + PASSES - 1) / PASSES, REST = DV_VECTORS - (PASSES - 1) * C;
    for (int pass = 0; pass < PASSES - 1; ++pass) mix_some<R, C>(weights, keep, tile, next, pass * C * LANES, states);
    mix_some<R, REST>(weights, keep, tile, next, (PASSES - 1) * C * LANES, states);
}

// Calls run(R) with a number of rows as a type.
template <int R = MAX_ROWS, class Run>
INLINE void with_rows(int64_t num_rows, Run&& run) {
    if (num_rows == R) return run(std::integral_constant<int, R>());
    if constexpr (R > 1) with_rows<R - 1>(num_rows, run);
}

// Calls visit(R, first row) for each part of the rows that sees some of a tile's keys, the first of which is given.
template <class Visit>
INLINE void visit_rows(const Task& task, int64_t first_key, Visit&& visit) {
    const int64_t num_parts = task.num_parts();
    for (int64_t part = 0, row = 0, end; part < num_parts; ++part, row = end) {
        end = task.num_rows * (part + 1) / num_parts;
        if (first_key > task.position(end - 1) || first_key + TILE <= task.first_key(row)) continue;
        with_rows(end - row, [&](auto R) { visit(R, row); });
    }
}

// Folds a tile into the states of all rows of a head: dot products, then weights, then sums of values. So first the
// keys and then the values stay in the L1 cache while all parts of the rows use them. The first prefetches the next tile.
template <class E>
void attend_all(const Batch& batch, const Task& task, int64_t head, const float (*q)[D], const Tile<E>& tile,
                const Place* next, Scratch& scratch, State* states) {
    const Place* ahead = next;
    visit_rows(task, tile.first, [&](auto R, int64_t row) {
        if (tile.num_keys <= LANES) {
            dot<R, 1>(q + row, tile, ahead, scratch.weights + row);
        } else {
            dot<R, GROUPS>(q + row, tile, ahead, scratch.weights + row);
        }
        ahead = nullptr;
    });
    for (int64_t row = 0; row < task.num_rows; row += LANES) {
        const int64_t count = std::min<int64_t>(LANES, task.num_rows - row);
        weigh(batch, task, head, row, count, tile.first, scratch.weights + row, scratch.keep + row, states + row);
    }
    ahead = next;
    visit_rows(task, tile.first, [&](auto R, int64_t row) {
        mix<R>(scratch.weights + row, scratch.keep + row, tile, ahead, states + row);
        ahead = nullptr;
    });
}

void attend_tile(const Batch& batch, const Task& task, int64_t head, const float (*q)[D], const Place& here,
                 const Place& next, Scratch& scratch, State* states) {
    const Place* ahead = WHOLE_VECTORS ? &next : nullptr;
#if FASTGEN_BF16_DOT
    constexpr bool VALUES_STAY = WHOLE_VECTORS && DV % LANES == 0;
    const Tile<Copied> tile = pairs_of(batch, task, head, here, scratch.buffers, VALUES_STAY);
    attend_all(batch, task, head, q, tile, ahead, scratch, states);
#else
    constexpr bool IS_FLOAT = std::is_same_v<T, float>;
    if constexpr (CAN_USE_IN_PLACE) {
        if (IS_FLOAT || task.num_parts() <= 2) {
            return attend_all(batch, task, head, q, in_place(task, here), ahead, scratch, states);
        }
    }
    if constexpr (!CAN_USE_IN_PLACE || !IS_FLOAT) {
        const Tile<Copied> tile = copy_together(batch, task, head, here, scratch.buffers);
        attend_all(batch, task, head, q, tile, ahead, scratch, states);
    }
#endif
}

}  // namespace
