// The arithmetic of a strip of int4, whose groups of 32 weights have a scale each: a tile has the dot products of one group,
// which vectors scale and add, while the next group's are multiplied.
#pragma once
#include "linear_strips.h"

constexpr bool SUMS_STAY_IN_TILES = false;

// One group of a panel's weights, unpacked: of each half of the panel a tile of codes from 0 to 15; the scales.
struct Group {
    alignas(64) uint8_t codes[2][TILE_K / 4][64];
    float scales[2][LANES];
};

// All rows of a block use what is unpacked once.
struct StripWeights {
    Group groups[STRIP_STEPS];

    const uint8_t* take(const uint8_t* weights, int64_t num_steps) {
        for (int64_t step = 0; step < num_steps; ++step, weights += WEIGHT_TILE_BYTES) {
            Group& group = groups[step];
            for (int half = 0; half < 2; ++half) {
                store(group.scales[half], widen_fp16(weights + half * LANES * 2));
                for (int quad = 0; quad < 4; ++quad) {
                    const u32v both = load<u32v>(weights + 2 * PANEL + (4 * half + quad) * LANES * 4);
                    store(group.codes[half][quad], both & 0x0f0f0f0fu);
                    store(group.codes[half][quad + 4], both >> 4 & 0x0f0f0f0fu);
                }
            }
        }
        return reinterpret_cast<const uint8_t*>(groups);
    }
};

// The dot products of 16 rows with half of a group's weights.
template <int SUMS, int X, int WEIGHTS>
INLINE void multiply_group(const uint8_t* x, int64_t x_stride, const uint8_t (*codes)[64], int32_t (*dots)[LANES]) {
    zero_tile<SUMS>();
    load_tile<X>(x, x_stride);
    load_tile<WEIGHTS>(codes, 64);
    dot_i8_u8<SUMS, X, WEIGHTS>();
    store_tile<SUMS>(dots, 64);
}

// The tile of rows from `rows` on with half of a panel. Sums stay in vectors.
static void multiply_half(const Strip& strip, const uint8_t* rows, int half, float* sums) {
    const Group* groups = reinterpret_cast<const Group*>(strip.weights);
    alignas(64) int32_t dots[2][TILE_ROWS][LANES];  // of even and of odd groups
    const auto multiply_step = [&](int64_t step) {
        const uint8_t* x = rows + step * X_TILE_BYTES;
        if (step % 2 == 0) {
            multiply_group<0, 4, 6>(x, strip.x_stride, groups[step].codes[half], dots[0]);
        } else {
            multiply_group<1, 5, 7>(x, strip.x_stride, groups[step].codes[half], dots[1]);
        }
    };
    f32v total[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) total[r] = strip.begins ? f32v{} : load<f32v>(sums + r * PANEL);
    multiply_step(0);
    for (int64_t step = 0; step < strip.num_steps; ++step) {
        if (step + 1 < strip.num_steps) multiply_step(step + 1);
        const f32v w_scale = load<f32v>(groups[step].scales[half]);
        const uint8_t* x = rows + step * X_TILE_BYTES + TILE_K;  // what sums of products start from, and the scale
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; ++r) {
            const u32v start = u32v(all_lanes(load<int32_t>(x + r * strip.x_stride)));
            const f32v x_scale = all_lanes(load<float>(x + r * strip.x_stride + 4));
            const i32v dot = i32v(load<u32v>(dots[step % 2][r]) + start);
            total[r] = fma(to_float(dot), w_scale * x_scale, total[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) store(sums + r * PANEL, total[r]);
}

template <Second SECOND>
static void multiply_strip(const Strip& strip) {
    static_assert(SECOND != NEXT_PANEL, "sums do not stay in tiles");
    for (int64_t step = 0; step < strip.num_steps; ++step) {
        strip.prefetch_step<SECOND>(step);
        strip.finished->write_rows(strip.num_late);
    }
    for (int tile = 0; tile < (SECOND == MORE_ROWS ? 2 : 1); ++tile) {
        for (int half = 0; half < 2; ++half) {
            const int64_t row = tile * TILE_ROWS;
            multiply_half(strip, strip.x + row * strip.x_stride, half, strip.sums + row * PANEL + half * LANES);
        }
    }
}
