// Many rows by the matrix unit: how rows and outputs are divided, and in which order tiles are multiplied. It goes with
// linear_loops.h, which serves few rows.
//
// The including template defines constants and `finish`, which makes outputs of sums; then it includes linear_tile_sums.h
// or linear_tile_groups.h, the arithmetic of a strip.
//
//     tile     16 rows of x, TILE_K of K; or 16 outputs of a panel. All tiles of x are complete: what lies behind the last
//              row is multiplied too, and never stored
//     strip    STRIP_STEPS tiles of a panel's K. Its weights stay in the first cache, while all rows of a block go through
//              it two tiles at a time, and meanwhile the next strip is prefetched. Sums rest in memory between strips. Rows
//              of at most two tiles go through all of K at once
//     block    rows of a group whose x stays in the second cache, for all panels of a chunk. The outputs of a panel are
//              written while the next one is multiplied
//     chunk    a block with a part of the panels
//
// A tile's sums are added in the order of k, whatever the rows, strips and blocks, so nothing else shows in their bits.
#pragma once
#include "linear_strips.h"

constexpr int64_t BLOCK_BYTES = 9 << 17;  // of x, within the bounds of the next line
constexpr int64_t MIN_BLOCK_PAIRS = 3, MAX_BLOCK_PAIRS = 16;  // of tiles of rows
constexpr int64_t MAX_CHUNK_PANELS = 16;

// A chunk: `num_rows` rows of a group, from `row` on, the first of which is `x`, with the panels `begin` to `end`.
static void multiply_block(const Call& call, const uint8_t* x, int64_t x_stride, int64_t row, int64_t num_rows,
                           int64_t begin, int64_t end) {
    constexpr int64_t MAX_SUMS = 2 * MAX_BLOCK_PAIRS * TILE_ROWS * PANEL;
    alignas(64) float sums[2][MAX_SUMS];  // of the panels that are multiplied, and of those that are written meanwhile
    [[maybe_unused]] const Arithmetic as_for_few_rows{};
    StripWeights strip_weights;
    FinishedPanels finished{call, x, x_stride, row, num_rows};
    const TilesInUse tiles(tile_shapes());
    const int64_t num_tiles = divide_up(num_rows, TILE_ROWS), num_pairs = divide_up(num_tiles, 2);
    const bool is_one_pass = SUMS_STAY_IN_TILES && num_pairs == 1;
    const int64_t all_steps = call.K / TILE_K, most_steps = is_one_pass ? all_steps : STRIP_STEPS;
    for (int64_t panel = begin, num_panels, turn = 0; panel < end; panel += num_panels, turn ^= 1) {
        num_panels = SUMS_STAY_IN_TILES && num_tiles == 1 && panel + 1 < end ? 2 : 1;
        const int64_t num_late = divide_up(num_rows * finished.num_panels, all_steps * num_pairs);
        for (int64_t step = 0; step < all_steps; step += most_steps) {
            const uint8_t* weights = call.step(panel, step * TILE_K);
            Strip strip;
            strip.num_steps = smaller(most_steps, all_steps - step);
            strip.weights = strip_weights.take(weights, strip.num_steps);
            strip.next_panel = all_steps * WEIGHT_TILE_BYTES;
            strip.x_stride = x_stride;
            strip.begins = step == 0;
            strip.num_ahead = divide_up(WEIGHT_TILE_BYTES / 64, num_pairs);
            strip.finished = &finished;
            strip.num_late = num_late;
            for (int64_t tile = 0; tile < num_tiles; tile += 2) {
                strip.x = x + tile * TILE_ROWS * x_stride + step * X_TILE_BYTES;
                strip.sums = sums[turn] + tile * TILE_ROWS * PANEL;
                // In one pass what comes soon is prefetched, else each pair's part of the next strip.
                const int64_t next = strip.num_steps + tile / 2 * strip.num_steps / num_pairs;
                strip.ahead = weights + (is_one_pass ? STEPS_AHEAD : next) * WEIGHT_TILE_BYTES;
                if (tile + 1 < num_tiles) {
                    multiply_strip<MORE_ROWS>(strip);
                } else if (num_panels == 1) {
                    multiply_strip<NOTHING>(strip);
                } else if constexpr (SUMS_STAY_IN_TILES) {
                    multiply_strip<NEXT_PANEL>(strip);
                }
            }
        }
        finished.begin(panel, num_panels, sums[turn]);
    }
    finished.write_rows(finished.num_panels * num_rows);
}

// How a group's work is divided into chunks. The panels of a block follow one another, since a thread that continues with
// the next chunk finds the block in its second cache.
struct Blocks {
    Parts pairs;  // of tiles of rows
    Parts panels;

    Blocks(int64_t num_rows, int64_t num_panels, int64_t most_pairs, int64_t num_blocks)
        : pairs(fewest_parts(divide_up(num_rows, 2 * TILE_ROWS), most_pairs)), panels{num_panels, 1} {
        const int64_t of_a_thread = divide_up(num_panels * num_blocks, fastgen_num_threads());
        panels = fewest_parts(num_panels, smaller(larger(of_a_thread / 8, 2), MAX_CHUNK_PANELS));
    }
    int64_t count() const { return pairs.count * panels.count; }
};

// A call whose rows are prepared: group after group, each in the order of its rows.
struct TiledCall {
    Call call;
    const uint8_t* x;
    int64_t x_stride, most_pairs, num_blocks;

    TiledCall(const Call& given, const uint8_t* prepared, int64_t stride)
        : call(given), x(prepared), x_stride(stride), num_blocks(0) {
        int64_t num_pairs = 0;
        for (int64_t group = 0; group < call.num_groups; ++group) num_pairs += pairs_of(group);
        const int64_t cached = BLOCK_BYTES / (2 * TILE_ROWS * x_stride);
        // Every thread gets several chunks, where there are so many.
        const int64_t shared = num_pairs * call.num_panels / (8 * fastgen_num_threads());
        most_pairs = smaller(smaller(larger(cached, MIN_BLOCK_PAIRS), MAX_BLOCK_PAIRS), larger(shared, 1));
        for (int64_t group = 0; group < call.num_groups; ++group) num_blocks += divide_up(pairs_of(group), most_pairs);
    }

    int64_t pairs_of(int64_t group) const { return divide_up(call.num_rows_of(group), 2 * TILE_ROWS); }
    Blocks blocks_of(int64_t group) const { return {call.num_rows_of(group), call.num_panels, most_pairs, num_blocks}; }
#if FASTGEN_ROUTED
    const uint8_t* x_of(int64_t group) const { return x + call.first_rows[group] * x_stride; }
#else
    const uint8_t* x_of(int64_t group) const { return x + group * call.num_rows * x_stride; }
#endif

    int64_t num_chunks() const {
        int64_t count = 0;
        for (int64_t group = 0; group < call.num_groups; ++group) count += blocks_of(group).count();
        return count;
    }

    void run(int64_t chunk) const {
        int64_t group = 0;
        for (; chunk >= blocks_of(group).count(); ++group) chunk -= blocks_of(group).count();
        const Blocks blocks = blocks_of(group);
        const int64_t block = chunk / blocks.panels.count, part = chunk % blocks.panels.count;
        const int64_t row = blocks.pairs.begin(block) * 2 * TILE_ROWS;
        const int64_t num_rows = smaller(blocks.pairs.size(block) * 2 * TILE_ROWS, call.num_rows_of(group) - row);
        multiply_block(call.of(group), x_of(group) + row * x_stride, x_stride, row, num_rows, blocks.panels.begin(part),
                       blocks.panels.begin(part + 1));
    }
};

// Returns whether a group has so many rows that the matrix unit multiplies them faster than vectors do.
static bool has_many_rows(const Call& call) {
    for (int64_t group = 0; group < call.num_groups; ++group) {
        if (call.num_rows_of(group) >= MANY_ROWS) return true;
    }
    return false;
}

// The counterpart of multiply_prepared. Rows are prepared in the order in which groups read them: routed rows once for each
// expert that they chose.
template <class Prepare>
static void multiply_prepared_by_tiles(const Call& call, const float* x, int64_t x_stride, int64_t x_group_stride,
                                       const PreparedRows& rows, Prepare&& prepare_row) {
#if FASTGEN_ROUTED
    const int64_t num_rows = call.first_rows[call.num_groups];
    const auto row = [&](int64_t i) { return x + call.order[i] / call.choices_per_row * x_stride; };
#else
    const int64_t num_rows = call.num_rows * call.num_groups;
    const auto row = [&](int64_t i) { return x + i % call.num_rows * x_stride + i / call.num_rows * x_group_stride; };
#endif
    rows.complete_by(num_rows, call.K, [&](int64_t i, uint8_t* to) { prepare_row(row(i), to); });
    const TiledCall tiled(call, rows.first, rows.row_bytes);
    parallel_for(tiled.num_chunks(), [&](int64_t chunk) { tiled.run(chunk); });
}
