// A row of scores, read by groups of vectors and by slices.
#pragma once
#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vector_math.h"

#ifndef FASTGEN_SLICE  // as an editor reads this file
#define FASTGEN_SLICE 32768
#define FASTGEN_MAX_SLICES 64
#endif
constexpr int64_t SLICE = FASTGEN_SLICE;  // tokens; a multiple of BLOCK
constexpr int64_t MAX_SLICES = FASTGEN_MAX_SLICES;
constexpr int64_t GROUP = 4 * LANES;  // tokens looked at together: as many as LANES random blocks serve
constexpr int64_t BLOCK = 64 * LANES;  // tokens of which each lane has its maximum kept
constexpr float LARGEST = 3.4028234663852886e38f;  // of finite numbers
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

struct Group {
    f32v part[4];
};

// Scores from a place on; behind the last of them -inf.
INLINE Group load_group(const float* from, int64_t count) {
    float some[GROUP];
    if (count < GROUP) {
        for (int64_t i = 0; i < GROUP; ++i) some[i] = i < count ? from[i] : -INFINITE;
        from = some;
    }
    Group group;
    for (int j = 0; j < 4; ++j) group.part[j] = load<f32v>(from + j * LANES);
    return group;
}
INLINE f32v largest_parts(const Group& group) {
    return larger(larger(group.part[0], group.part[1]), larger(group.part[2], group.part[3]));
}

// Calls work(group, its place) for the groups whose largest score is not below `floor`.
template <class Work>
INLINE void for_groups(float floor, const float* scores, int64_t count, const Work& work) {
    for (int64_t i = 0; i < count; i += GROUP) {
        const Group group = load_group(scores + i, count - i);
        if (largest_of(largest_parts(group)) >= floor) work(group, i);
    }
}

// A sum of many numbers: by lanes in fp32, every so often on to fp64.
struct Sum {
    f32v part = {};
    double sum = 0;
    int num_added = 0;
    ALWAYS_INLINE void add(f32v x) {
        part += x;
        if (++num_added == 32) total();
    }
    ALWAYS_INLINE double total() {
        sum += sum_of(part);
        part = f32v{};
        num_added = 0;
        return sum;
    }
};

// The results of a step for a slice.
struct Slice {
    bool is_sound;  // neither NaN nor +inf
    float peak;  // the largest, or what was drawn
    int64_t id;  // the peak's, the lowest among equals
    double mass;
    int64_t count;
};

struct Row {
    const float* scores;
    int64_t size;
    float *adjusted, *list, *other, *maxima;  // workspaces
    Slice slices[MAX_SLICES];

    int64_t num_slices() const { return (size + SLICE - 1) / SLICE; }

    // work(slice, its scores, how many, the id of the first)
    template <class Work>
    void for_slices(const Work& work) {
        parallel_for(num_slices(), [this, &work](int64_t i) {
            work(slices[i], scores + i * SLICE, std::min(SLICE, size - i * SLICE), i * SLICE);
        });
    }
    // The one with the largest peak; among equals the first, which has the lowest ids.
    const Slice& best() const {
        const Slice* best = slices;
        for (int64_t i = 1; i < num_slices(); ++i) best = slices[i].peak > best->peak ? slices + i : best;
        return *best;
    }
    double mass() const {
        double sum = 0;
        for (int64_t i = 0; i < num_slices(); ++i) sum += slices[i].mass;
        return sum;
    }
};

// The largest score of each slice, and in row.maxima that of each 64 tokens of a lane. False where there is NaN or +inf.
bool scan(Row& row) {
    row.for_slices([&row](Slice& slice, const float* scores, int64_t count, int64_t first) {
        const f32v limit = all_lanes(LARGEST);
        i32v is_sound = all_lanes(int32_t(-1));
        float peak = -INFINITE;
        int64_t at = 0;
        for (int64_t block = 0; block < count; block += BLOCK) {
            f32v most = all_lanes(-INFINITE);
            for (int64_t i = block; i < std::min(count, block + BLOCK); i += GROUP) {
                const Group x = load_group(scores + i, count - i);
                is_sound &= (x.part[0] <= limit) & (x.part[1] <= limit) & (x.part[2] <= limit) & (x.part[3] <= limit);
                most = larger(largest_parts(x), most);
            }
            store(row.maxima + (first + block) / 64, most);
            const float block_peak = largest_of(most);
            if (block_peak > peak) {
                peak = block_peak;
                at = block;
            }
        }
        slice.is_sound = sum_of(to_float(is_sound)) == -LANES;
        slice.peak = peak;
        while (slice.is_sound && scores[at] != peak) ++at;
        slice.id = first + at;
    });
    bool is_sound = true;
    for (int64_t i = 0; i < row.num_slices(); ++i) is_sound &= row.slices[i].is_sound;
    return is_sound;
}

}  // namespace
