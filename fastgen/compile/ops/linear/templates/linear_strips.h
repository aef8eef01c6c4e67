// What one pass of the matrix unit over weights is: some tiles of rows with a strip of a panel; see linear_tiles.h.
#pragma once
#include "tiles.h"

#ifndef FASTGEN_ROUTED  // as an editor reads this file
#include "linear_loops.h"
constexpr int TILE_K = 32;
constexpr int TILE_X_BYTES = 64;
constexpr int X_PARTS = 1;
constexpr int MANY_ROWS = 5;
struct Arithmetic {};
template <int SUMS, int X, int WEIGHTS>
INLINE void multiply_tiles();
INLINE f32v finish(const Call& call, const uint8_t* x, int64_t output, const float* sums);
#endif

constexpr int TILE_ROWS = 16;
constexpr int64_t X_TILE_BYTES = TILE_K / K_STEP * X_BYTES_PER_STEP;  // from one tile of a row, or its X_PARTS, to the next
constexpr int64_t WEIGHT_TILE_BYTES = TILE_K / K_STEP * PANEL_BYTES_PER_STEP;  // of a panel
constexpr int64_t STRIP_STEPS = 16, STEPS_AHEAD = 2;

// Panels of a block whose sums are complete. Their outputs are written row by row while the next panels are multiplied: the
// matrix unit would have nothing to do while they were written at once.
struct FinishedPanels {
    const Call& call;
    const uint8_t* x;  // the block's first row
    int64_t x_stride, first_row, num_rows;
    int64_t panel = 0, num_panels = 0, row = 0;  // what is written next; no panels: nothing
    const float* sums = nullptr;                 // of `panel`: [num_rows][PANEL]; those of the next one lie a tile behind

    void begin(int64_t first_panel, int64_t count, const float* of_panels) {
        panel = first_panel, num_panels = count, row = 0, sums = of_panels;
    }

    void write_row() {
        float outputs[PANEL];
        const float* of_row = sums + row * PANEL;
        for (int v = 0; v < PANEL; v += LANES) {
            store(outputs + v, finish(call, x + row * x_stride, panel * PANEL + v, of_row + v));
        }
        float* y = call.y_row(first_row + row) + panel * PANEL;
        const int64_t num_outputs = smaller(PANEL, call.N - panel * PANEL);
        if (num_outputs == PANEL) {
            std::memcpy(y, outputs, sizeof outputs);
        } else {
            std::memcpy(y, outputs, num_outputs * sizeof(float));
        }
        if (++row == num_rows) row = 0, ++panel, --num_panels, sums += TILE_ROWS * PANEL;
    }

    void write_rows(int64_t count) {
        for (; count > 0 && num_panels > 0; --count) write_row();
    }
};

// A strip with one tile of rows, with two, or with one tile of rows and the same strip of the next panel.
enum Second { NOTHING, MORE_ROWS, NEXT_PANEL };
struct Strip {
    const uint8_t* x;  // rows x_stride bytes apart
    int64_t x_stride, num_steps;
    const uint8_t* weights;  // as `StripWeights` gives them
    int64_t next_panel;      // bytes to the next panel's
    bool begins;             // sums, with zeros
    float* sums;             // [32][PANEL]: 16 rows, then 16 of the second tile of rows or of the next panel
    const uint8_t* ahead;    // weights to prefetch, num_ahead cache lines at each step
    int64_t num_ahead;
    FinishedPanels* finished;  // num_late rows of these are written at each step
    int64_t num_late;

    template <Second SECOND>
    void prefetch_step(int64_t step) const {
        for (int64_t line = step * num_ahead; line < (step + 1) * num_ahead; ++line) {
            prefetch(ahead + 64 * line);
            if (SECOND == NEXT_PANEL) prefetch(ahead + next_panel + 64 * line);
        }
    }
};

// Tiles 0 to 3 are sums: those of the first tile of rows with both halves of a panel, then those of the second. 4 and 5
// are of x, 6 and 7 of weights.
static TileShapes tile_shapes() {
    TileShapes shapes;
    for (int sums : {0, 1, 2, 3}) shapes.set(sums, TILE_ROWS, 64);
    for (int x : {4, 5}) shapes.set(x, TILE_ROWS, TILE_X_BYTES);
    for (int weights : {6, 7}) shapes.set(weights, TILE_X_BYTES / 4, 64);
    return shapes;
}
