// The part of attention over one tile of keys by the matrix unit, for all rows: 16 of them at a time.
//
// The unit adds the products of 32 features, or of 32 keys, in an order of its own, and takes denormal numbers for zero. So
// every row takes this way, also that of a decode, and its bits depend on no other row.
#pragma once
#include "attention_rows.h"
#include "denormals.h"
#include "tiles.h"

namespace {

constexpr int UNIT_ROWS = 16, UNIT_K = 32;  // of the unit's tiles
static_assert(D % UNIT_K == 0 && DV % UNIT_K == 0 && TILE % UNIT_K == 0, "only the last rows are no complete tile");

// 0 and 1 are sums of 16 rows, 4 is what is multiplied; 2, 3 and 5 are the same of the last rows, where these are fewer. 6
// and 7 are keys or values.
TileShapes shapes_of(const Task& task) {
    TileShapes shapes;
    for (int tile : {0, 1, 4}) shapes.set(tile, UNIT_ROWS, 64);
    for (int tile : {2, 3, 5}) {
        if (task.num_rows % UNIT_ROWS != 0) shapes.set(tile, int(task.num_rows % UNIT_ROWS), 64);
    }
    for (int tile : {6, 7}) shapes.set(tile, UNIT_ROWS, 64);
    return shapes;
}

// Sums, and what is added to them: the products of 16 rows, or of the last ones, with pairs: two numbers for each lane.
// right(k, v) says where vector v begins of the pairs of UNIT_K from k on. Strides are in bytes.
struct Product {
    const void* left;
    int64_t left_stride, right_stride, num_k;
    float* sums;
    int64_t sums_stride;
    bool from_zero;

    // With vectors v and v + 1, by the tiles SUMS and SUMS + 1 and LEFT.
    template <int SUMS, int LEFT, class Right>
    void add(int v, const Right& right) const {
        float* here = sums + v * LANES;
        if (from_zero) {
            zero_tile<SUMS>(), zero_tile<SUMS + 1>();
        } else {
            load_tile<SUMS>(here, sums_stride), load_tile<SUMS + 1>(here + LANES, sums_stride);
        }
        for (int64_t k = 0; k < num_k; k += UNIT_K) {
            load_tile<LEFT>(static_cast<const uint8_t*>(left) + 2 * k, left_stride);
            load_tile<6>(right(k, v), right_stride), dot_bf16<SUMS, LEFT, 6>();
            load_tile<7>(right(k, v + 1), right_stride), dot_bf16<SUMS + 1, LEFT, 7>();
        }
        store_tile<SUMS>(here, sums_stride), store_tile<SUMS + 1>(here + LANES, sums_stride);
    }

    template <class Right>
    void add_all(int64_t num_rows, int num_vectors, const Right& right) const {
        for (int v = 0; v < num_vectors; v += 2) num_rows == UNIT_ROWS ? add<0, 4>(v, right) : add<2, 5>(v, right);
    }
};

// Calls visit(first, count) for each 16 rows that see some of a tile's keys, the first of which is given.
template <class Visit>
void visit_sixteens(const Task& task, int64_t first_key, Visit&& visit) {
    for (int64_t row = 0; row < task.num_rows; row += UNIT_ROWS) {
        const int64_t count = std::min<int64_t>(UNIT_ROWS, task.num_rows - row);
        if (first_key > task.position(row + count - 1) || first_key + TILE <= task.first_key(row)) continue;
        visit(row, count);
    }
}

void prefetch_place(const Place& place) {
    for (int g = 0; g < GROUPS; ++g) {
        for (int64_t d = 0; d < D; d += 2) prefetch(place.k[g] + d * P);
        for (int64_t i = 0; i < LANES * DV; i += 64 / sizeof(T)) prefetch(place.v[g] + i);
    }
}

// Folds a tile of keys into the states of all rows of a head: dot products, then weights, then sums of values.
void attend_tile(const Batch& batch, const Task& task, int64_t head, const float (*q)[D], const Place& here,
                 const Place& next, Scratch& scratch, State* states) {
    if (WHOLE_VECTORS) prefetch_place(next);
    // Products with all values of a tile are added. Weights of those that are not seen are 0, and 0 times what is no number
    // would be none, so only a complete tile is used where it lies; if UNIT_K values do.
    const bool is_complete = here.num_keys == TILE && first_seen(task, here) == 0;
    const bool stays = WHOLE_VECTORS && P % UNIT_K == 0 && is_complete;
    const Tile<Copied> tile = pairs_of(batch, task, head, here, scratch.buffers, stays);
    if (!stays) {
        const int64_t num_pairs = (tile.num_keys + 1) / 2;
        std::memset(scratch.buffers.v + num_pairs * DV_LANES, 0, (TILE / 2 - num_pairs) * DV_LANES * sizeof(Copied));
    }
    constexpr int64_t WEIGHTS_STRIDE = TILE * sizeof(float);
    const auto keys = [&](int64_t k, int v) { return tile.k[v] + k / 2 * tile.k_stride; };
    const auto values = [&](int64_t k, int v) { return tile.v[k / LANES] + v * LANES; };
    visit_sixteens(task, tile.first, [&](int64_t row, int64_t count) {
        const Product scores = {q[row], D * sizeof(float), tile.k_stride * 4, D,
                                scratch.weights[row], WEIGHTS_STRIDE, true};
        scores.add_all(count, GROUPS, keys);
    });
    for (int64_t row = 0; row < task.num_rows; row += LANES) {
        const int64_t count = std::min<int64_t>(LANES, task.num_rows - row);
        weigh(batch, task, head, row, count, tile.first, scratch.weights + row, scratch.keep + row, states + row);
    }
    visit_sixteens(task, tile.first, [&](int64_t row, int64_t count) {
        const WithoutDenormals as_the_unit;
        for (int64_t r = row; r < row + count; ++r) {
            for (int d = 0; d < DV_LANES; d += LANES) {
                store(states[r].mixed + d, load<f32v>(states[r].mixed + d) * all_lanes(scratch.keep[r]));
            }
        }
        const Product mixed = {scratch.weights[row], WEIGHTS_STRIDE, tile.v_stride * 4, TILE,
                               states[row].mixed, sizeof(State), false};
        mixed.add_all(count, DV_VECTORS, values);
    });
}

}  // namespace
