// A token for each row of logits.
//
//   scan    is the row finite; its largest score                all that a greedy row needs, in one read
//   adjust  a copy, where lists or a mask say so; scanned again
//   cut     the lowest score that top-k and top-p keep          by partitioning a list around pivots, without sorting
//   draw    the largest of score and noise, of what is kept     noise only where it can still win
//
// Threads take rows; or the slices of a row, where there are few rows. Results of slices are combined in their order,
// so a result does not depend on the threads or on other rows.
#pragma once
#include <atomic>

#include "sampling_filters.h"

#ifndef FASTGEN_NOT_FINITE  // as an editor reads this file
#define FASTGEN_NOT_FINITE 1
#define FASTGEN_NOTHING_LEFT 2
#endif

namespace {

constexpr float MOST_NOISE = 16.64f, LEAST_NOISE = -2.82f;  // of 23 bits

// The columns of `reals` and of `integers`.
enum { TEMPERATURE, TAIL, LEAST, REPETITION, PRESENCE, FREQUENCY, NUM_REALS };
enum {
    TOP_K, SEED, POSITION, SEQUENCE_INDEX,
    FIRST_USE, NUM_USES, FIRST_BIAS, NUM_BIASES, FIRST_MASK,
    NUM_TOP, FIRST_LOGPROB,
    NUM_INTEGERS
};

// The token whose score and noise together are largest, of those kept.
int64_t draw(Row& row, const Tempered& tempered, float peak, const Cut& cut, float least, const Stream& stream) {
    // The peak is kept, and noise is bounded: nothing further below it can win.
    const float reach = std::max(least, LEAST_NOISE - MOST_NOISE);
    const float floor = std::max(floor_of(tempered, cut.value), floor_of(tempered, peak + reach - 0.01f));
    row.for_slices([&, reach, floor](Slice& slice, const float* scores, int64_t count, int64_t first) {
        float best = -INFINITE, needed = reach;
        int64_t best_id = first;
        for_groups(floor, scores, count, [&](const Group& group, int64_t place) {
            Group x;
            for (int j = 0; j < 4; ++j) {
                const f32v y = tempered(group.part[j]), relative = y - all_lanes(peak);
                const i32v is_early = LANE <= all_lanes(int32_t(cut.id - (first + place + j * LANES)));
                const i32v is_equal = y == all_lanes(cut.value), is_above = y > all_lanes(cut.value);
                const i32v is_kept = (is_above | (is_equal & is_early)) & (relative >= all_lanes(least));
                x.part[j] = select(is_kept, relative, all_lanes(-INFINITE));
            }
            if (!(largest_of(largest_parts(x)) >= needed)) return;
            f32v noise[4];
            stream.gumbel((first + place) / 4, noise);
            for (int j = 0; j < 4; ++j) x.part[j] += noise[j];
            const float most = largest_of(largest_parts(x));
            if (!(most > best)) return;
            float all[GROUP];
            std::memcpy(all, x.part, sizeof all);
            best = most;
            best_id = first + place + (std::find(all, all + GROUP, most) - all);
            needed = std::max(reach, best - MOST_NOISE);
        });
        slice.peak = best;
        slice.id = best_id;
    });
    return row.best().id;
}

// The log-probabilities of a token, and behind it of the num_top likeliest, likeliest first; and their ids.
void log_probabilities(Row& row, int64_t token, int64_t num_top, float* values, int64_t* ids) {
    scan(row);
    const float peak = row.best().peak;
    row.for_slices([peak](Slice& slice, const float* scores, int64_t count, int64_t) {
        Sum sum;
        for_groups(-LARGEST, scores, count, [&](const Group& group, int64_t) {
            for (int j = 0; j < 4; ++j) sum.add(exp(group.part[j] - all_lanes(peak)));
        });
        slice.mass = sum.total();
    });
    const LogProbability function{peak, float(std::log(row.mass()))};
    values[0] = function(row.scores[token]);
    ids[0] = token;
    if (num_top == 0) return;
    const float last = value_of_best(row, function, num_top);
    // Ids below what they are sorted by. Those as likely as the last are not, and come behind the others.
    int64_t *const begin = ids + 1, *end = begin;
    const auto collect = [&](bool likelier) {
        for_groups(floor_of(function, last), row.scores, row.size, [&](const Group& group, int64_t place) {
            float all[GROUP];
            for (int j = 0; j < 4; ++j) store(all + j * LANES, function(group.part[j]));
            for (int64_t i = 0; i < std::min(GROUP, row.size - place); ++i) {
                if ((likelier ? all[i] > last : all[i] == last) && end < begin + num_top) {
                    *end++ = int64_t(uint64_t(uint32_t(~key_of(all[i]))) << 32 | uint64_t(place + i));
                }
            }
        });
    };
    collect(true);
    std::sort(begin, end);
    collect(false);
    for (int64_t i = 1; i <= num_top; ++i) {
        values[i] = number_of(~int32_t(ids[i] >> 32));
        ids[i] &= 0xffffffff;
    }
}

// Sets the scores of tokens whose bit is 0 to -inf.
void forbid(float* scores, int64_t size, const int32_t* mask) {
    for (int64_t begin = 0; begin < size; begin += 32) {
        const uint32_t word = uint32_t(mask[begin / 32]);
        if (word == ~0u) continue;
        for (int64_t i = begin; i < std::min(begin + 32, size); ++i) {
            if ((word >> (i - begin) & 1) == 0) scores[i] = -INFINITE;
        }
    }
}

// A token, or minus the status of the row.
int64_t choose(Row& row, const float* reals, const int64_t* integers, const int32_t* use_ids, const int32_t* uses,
               const int32_t* bias_ids, const float* biases, const int32_t* masks) {
    if (!scan(row)) return -FASTGEN_NOT_FINITE;
    const bool is_masked = integers[FIRST_MASK] >= 0;
    if ((integers[NUM_USES] + integers[NUM_BIASES] > 0 || is_masked) && row.best().peak > -INFINITE) {
        std::memcpy(row.adjusted, row.scores, row.size * sizeof(float));
        for (int64_t i = integers[FIRST_USE]; i < integers[FIRST_USE] + integers[NUM_USES]; ++i) {
            float& score = row.adjusted[use_ids[i]];
            const float count = float(uses[i] >> 1);
            score = score < 0 ? score * reals[REPETITION] : score / reals[REPETITION];
            if (count > 0) score -= reals[PRESENCE];
            score -= reals[FREQUENCY] * count;
            score = std::min(score, LARGEST);  // which a tiny repetition penalty may exceed
        }
        for (int64_t i = integers[FIRST_BIAS]; i < integers[FIRST_BIAS] + integers[NUM_BIASES]; ++i) {
            row.adjusted[bias_ids[i]] += biases[i];
        }
        if (is_masked) forbid(row.adjusted, row.size, masks + integers[FIRST_MASK]);
        row.scores = row.adjusted;
        scan(row);
    }
    const float highest = row.best().peak;
    if (highest == -INFINITE) return -FASTGEN_NOTHING_LEFT;
    if (reals[TEMPERATURE] == 0) return row.best().id;
    const Tempered tempered(reals[TEMPERATURE], highest);
    const float peak = tempered(highest), least = reals[LEAST];
    const Cut kept = cut(row, tempered, peak, integers[TOP_K], reals[TAIL], least);
    const Stream stream{uint64_t(integers[SEED]), uint32_t(integers[POSITION]), uint32_t(integers[SEQUENCE_INDEX])};
    return draw(row, tempered, peak, kept, least, stream);
}

}  // namespace
