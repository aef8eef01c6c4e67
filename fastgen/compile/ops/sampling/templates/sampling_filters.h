// Which scores top-k and top-p keep, without sorting.
#pragma once
#include "sampling_noise.h"
#include "sampling_rows.h"

namespace {

// From a score to what filters compare: divided by the temperature. Only where that would overflow it is taken relative
// to the largest, which costs a rounding. It never falls as the score rises.
struct Tempered {
    float temperature, shift;
    Tempered(float given, float peak) : temperature(given), shift(std::isinf(peak / given) ? peak : 0.0f) {}
    template <class Number>
    ALWAYS_INLINE Number operator()(Number score) const { return (score - shift) / temperature + 0.0f; }  // never -0
    float inverse(float y) const { return y * temperature + shift; }
};

// From a logit to its log-probability.
struct LogProbability {
    float peak, log_sum;
    template <class Number>
    ALWAYS_INLINE Number operator()(Number logit) const { return (logit - peak) - log_sum + 0.0f; }
    float inverse(float y) const { return (y + log_sum) + peak; }
};

// A score that comes out below y, and so do all that are smaller; not far below.
template <class Function>
float floor_of(const Function& function, float y) {
    const float about = function.inverse(y), slack = 1e-5f * (std::fabs(about) + std::fabs(function.inverse(0)));
    return function(about - slack) < y ? about - slack : -INFINITE;
}

// Appends the lanes of x that are kept; may write a full vector.
INLINE float* append(float* to, f32v x, i32v is_kept) {
#if FASTGEN_LANES == 16
    const __mmask16 mask = _mm512_movepi32_mask(__m512i(is_kept));
    store(to, f32v(_mm512_maskz_compress_ps(mask, x)));
    return to + __builtin_popcount(mask);
#else
    float all[LANES];
    store(all, x);
    for (int lane = 0; lane < LANES; ++lane) {
        *to = all[lane];
        to -= is_kept[lane];
    }
    return to;
#endif
}

INLINE i32v lanes_below(int64_t count) { return LANE < all_lanes(int32_t(std::min(count, int64_t(LANES)))); }

// An integer that orders as numbers do, and back.
INLINE int32_t key_of(float x) {
    const int32_t bits = bits_of<int32_t>(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
INLINE float number_of(int32_t key) { return bits_of<float>(key < 0 ? key ^ 0x7fffffff : key); }

// To row.list go the row's values from `limit` on, in no order that matters; returns how many. Where they are `WEIGHED`,
// *below is what the others weigh: e to their distance from `peak`.
template <bool WEIGHED, class Function>
int64_t gather(Row& row, const Function& function, float limit, float peak = 0, double* below = nullptr) {
    const float floor = WEIGHED ? -INFINITE : floor_of(function, limit);
    row.for_slices([&, floor](Slice& slice, const float* scores, int64_t count, int64_t first) {
        float *const begin = row.list + first + first / SLICE * GROUP, *end = begin;
        Sum others;
        for_groups(floor, scores, count, [&](const Group& group, int64_t) {
            for (int j = 0; j < 4; ++j) {
                const f32v y = function(group.part[j]);
                const i32v is_kept = y >= all_lanes(limit);
                end = append(end, y, is_kept);
                if (WEIGHED) others.add(select(is_kept, f32v{}, exp(y - all_lanes(peak))));
            }
        });
        slice.count = end - begin;
        slice.mass = others.total();
    });
    int64_t count = 0;
    for (int64_t i = 0; i < row.num_slices(); ++i) {
        std::memmove(row.list + count, row.list + i * (SLICE + GROUP), row.slices[i].count * sizeof(float));
        count += row.slices[i].count;
    }
    if (WEIGHED) *below = row.mass();
    return count;
}

struct Found {
    float value;
    int64_t count;  // of values equal to it
    double below;  // what those below it weigh
};

// Finds in row.list, with values of weight `below` below it, the smallest value up to which the sum of weights exceeds
// `target`; the largest value where no sum does. The list is partitioned around a pivot, and the part with the result is
// partitioned again, until it holds equal values only. Pivots are midway between the part's ends, of numbers and of
// their bits in turn: the first is fast where numbers are evenly distributed, the second ends soon for any numbers.
template <class Weigh>
Found find(Row& row, int64_t count, double below, double target, const Weigh& weigh) {
    float *list = row.list, *other = row.other;
    f32v most = all_lanes(-INFINITE), least = all_lanes(-INFINITE);  // its negative
    for (int64_t i = 0; i < count; i += LANES) {
        const f32v x = load<f32v>(list + i);
        most = select(lanes_below(count - i), larger(x, most), most);
        least = select(lanes_below(count - i), larger(-x, least), least);
    }
    float low = -largest_of(least), high = largest_of(most);
    for (int turn = 0; low < high; ++turn) {
        float pivot = low / 2 + high / 2;
        if (turn % 2 == 1) pivot = number_of(int32_t((int64_t(key_of(low)) + key_of(high)) >> 1));
        if (!(pivot >= low && pivot < high)) pivot = low;
        float *lower = list, *upper = other;
        Sum sum;
        most = least = all_lanes(-INFINITE);
        for (int64_t i = 0; i < count; i += LANES) {
            const f32v x = load<f32v>(list + i);
            const i32v is_there = lanes_below(count - i), is_lower = (x <= all_lanes(pivot)) & is_there;
            const i32v is_upper = ~is_lower & is_there;
            sum.add(select(is_lower, weigh(x), f32v{}));
            most = select(is_lower, larger(x, most), most);
            least = select(is_upper, larger(-x, least), least);
            lower = append(lower, x, is_lower);
            upper = append(upper, x, is_upper);
        }
        const double up_to_pivot = below + sum.total();
        if (up_to_pivot > target) {
            count = lower - list;
            high = largest_of(most);
        } else {
            below = up_to_pivot;
            count = upper - other;
            low = -largest_of(least);
            std::swap(list, other);
        }
    }
    return {low, count, below};
}

// The num_best-th best value of the row that was scanned last; -inf where fewer are finite.
template <class Function>
float value_of_best(Row& row, const Function& function, int64_t num_best) {
    float bound = -LARGEST;
    const int64_t num_maxima = (row.size + BLOCK - 1) / BLOCK * LANES;
    if (num_best <= num_maxima) {  // as many scores are no smaller than that many maxima
        float *const nth = row.maxima + num_best - 1, *const end = row.maxima + num_maxima;
        std::nth_element(row.maxima, nth, end, [](float a, float b) { return a > b; });
        bound = std::max(function(*nth), bound);
    }
    const int64_t count = gather<false>(row, function, bound);
    if (count < num_best) return -INFINITE;
    return find(row, count, 0, double(count - num_best), [](f32v) { return all_lanes(1.0f); }).value;
}

// The lowest value that is kept, and of those equal to it the last id.
struct Cut {
    float value;
    int64_t id;
};

// By top-k (0: all) and top-p, which cuts off a `tail`; what lies more than `-least` below `peak` is cut anyway.
Cut cut(Row& row, const Tempered& tempered, float peak, int64_t top_k, float tail, float least) {
    Cut cut{-LARGEST, row.size};
    if (top_k > 0 && top_k < row.size) cut.value = std::max(value_of_best(row, tempered, top_k), cut.value);
    if (tail == 0) return cut;
    const auto weigh = [peak](f32v y) { return exp(y - all_lanes(peak)); };
    double below = 0;
    int64_t count;
    if (cut.value > -LARGEST) {
        count = gather<false>(row, tempered, cut.value);
    } else {
        // All that lie below the first of these bounds weigh less together than the tail.
        const float bound = std::max(std::log(tail / float(row.size)), least) - 0.01f;
        count = gather<true>(row, tempered, std::max(peak + bound, -LARGEST), peak, &below);
    }
    Sum listed;
    for (int64_t i = 0; i < count; i += LANES) {
        listed.add(select(lanes_below(count - i), weigh(load<f32v>(row.list + i)), f32v{}));
    }
    const double target = double(tail) * (below + listed.total());
    const Found found = find(row, count, below, target, weigh);
    cut.value = found.value;
    // Equals are cut off from the highest id on, as many as weigh no more than the target.
    const double fitting = (target - found.below) / weigh(all_lanes(found.value))[0];
    int64_t num_kept = found.count;
    if (fitting >= 1) num_kept -= std::min(found.count - 1, int64_t(std::min(fitting, double(found.count))));
    if (num_kept == found.count) return cut;
    for_groups(floor_of(tempered, cut.value), row.scores, row.size, [&](const Group& group, int64_t place) {
        for (int j = 0; j < 4; ++j) {
            const i32v is_equal = tempered(group.part[j]) == all_lanes(cut.value);
            for (int lane = 0; lane < LANES; ++lane) {
                if (is_equal[lane] && --num_kept == 0) cut.id = place + j * LANES + lane;
            }
        }
    });
    return cut;
}

}  // namespace
