// The arithmetic of a strip whose sums stay in tiles: those of bf16, or of bytes with one scale for all of K. A panel's
// weights are tiles as they lie, so one packed weight serves any number of rows.
#pragma once
#include "linear_strips.h"

constexpr bool SUMS_STAY_IN_TILES = true;

struct StripWeights {
    const uint8_t* take(const uint8_t* weights, int64_t) { return weights; }
};

template <Second SECOND>
static void multiply_strip(const Strip& strip) {
    constexpr int64_t SUMS_STRIDE = PANEL * sizeof(float), PANEL_STRIDE = PANEL * 4;
    float *first = strip.sums, *second = strip.sums + TILE_ROWS * PANEL;
    if (strip.begins) {
        zero_tile<0>(), zero_tile<1>();
        if constexpr (SECOND != NOTHING) zero_tile<2>(), zero_tile<3>();
    } else {
        load_tile<0>(first, SUMS_STRIDE), load_tile<1>(first + 16, SUMS_STRIDE);
        if constexpr (SECOND != NOTHING) load_tile<2>(second, SUMS_STRIDE), load_tile<3>(second + 16, SUMS_STRIDE);
    }
    const uint8_t *x = strip.x, *weights = strip.weights;
    for (int64_t step = 0; step < strip.num_steps; ++step, x += X_TILE_BYTES, weights += WEIGHT_TILE_BYTES) {
        strip.prefetch_step<SECOND>(step);
        strip.finished->write_rows(strip.num_late);
#pragma GCC unroll 3
        for (int part = 0; part < X_PARTS; ++part) {
            const uint8_t* rows = x + part * TILE_X_BYTES;
            if constexpr (SECOND == MORE_ROWS) {
                // The rows of x are read from the second cache, and leave the first to the weights.
                stream_tile<4>(rows, strip.x_stride), stream_tile<5>(rows + TILE_ROWS * strip.x_stride, strip.x_stride);
            } else {
                load_tile<4>(rows, strip.x_stride);
            }
            if (part == 0 || SECOND == NEXT_PANEL) load_tile<6>(weights, PANEL_STRIDE);
            multiply_tiles<0, 4, 6>();
            if constexpr (SECOND == MORE_ROWS) multiply_tiles<2, 5, 6>();
            if (part == 0 || SECOND == NEXT_PANEL) load_tile<7>(weights + 64, PANEL_STRIDE);
            multiply_tiles<1, 4, 7>();
            if constexpr (SECOND == MORE_ROWS) multiply_tiles<3, 5, 7>();
            if constexpr (SECOND == NEXT_PANEL) {
                load_tile<6>(weights + strip.next_panel, PANEL_STRIDE), multiply_tiles<2, 4, 6>();
                load_tile<7>(weights + strip.next_panel + 64, PANEL_STRIDE), multiply_tiles<3, 4, 7>();
            }
        }
    }
    store_tile<0>(first, SUMS_STRIDE), store_tile<1>(first + 16, SUMS_STRIDE);
    if constexpr (SECOND != NOTHING) store_tile<2>(second, SUMS_STRIDE), store_tile<3>(second + 16, SUMS_STRIDE);
}
