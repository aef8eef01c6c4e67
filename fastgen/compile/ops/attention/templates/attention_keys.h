// The keys and values of one tile, and how they are read.
#pragma once
#include "attention_tasks.h"

namespace {

constexpr int DV_VECTORS = (DV + LANES - 1) / LANES, DV_LANES = DV_VECTORS * LANES;
constexpr bool WHOLE_VECTORS = P % LANES == 0;  // of keys and of values in the blocks

// Whether a tile's keys and values can be used where they lie. Where not, or where many parts of rows would each widen
// them, they are first copied together, as floats. With BF16_DOT nothing is to be widened: pairs are copied where they lie
// in no whole vectors.
constexpr bool CAN_USE_IN_PLACE = WHOLE_VECTORS && !VALUES_IN_KEYS;

// The addresses of a tile's keys and values in the cache.
struct Place {
    int64_t first, num_keys;
    const T* k[GROUPS];  // LANES keys, features P apart, or pairs of features 2 P
    const T* v[GROUPS] = {};  // LANES values, DV apart, or pairs of values 2 DV; unused where VALUES_IN_KEYS
};

// Room for the copied keys and values of a tile.
using Copied = std::conditional_t<BF16_DOT, uint32_t, float>;
using Stored = std::conditional_t<BF16_DOT, uint32_t, T>;
struct Buffers {
    Copied k[D / STEP * TILE];         // [D / STEP][TILE]
    Copied v[TILE / STEP * DV_LANES];  // [TILE / STEP][DV_LANES]
};

// A tile's keys and values, copied together or in place in the cache.
template <class E>
struct Tile {
    int64_t first, num_keys;
    int64_t first_seen;  // keys before all that the task's rows see
    int64_t k_stride, v_stride;
    const E* k[GROUPS];
    const E* v[GROUPS];
};

#if FASTGEN_BF16_DOT
// Features d and d + 1 of a group's keys.
INLINE f32v keys_of(const Tile<Copied>& tile, int g, int64_t d) {
    return load<f32v>(tile.k[g] + d / 2 * tile.k_stride);
}

// The halves of a pair of values i and i + 1 of the tile that the task's rows may see.
INLINE uint32_t seen_halves(const Tile<Copied>& tile, int64_t i) {
    const auto is_seen = [&](int64_t key) { return key < tile.num_keys && (WINDOW == 0 || key >= tile.first_seen); };
    return (is_seen(i) ? 0xffffu : 0u) | (is_seen(i + 1) ? 0xffff0000u : 0u);
}

// Features from `first` on of values i and i + 1 of a group, with zeros where they are not seen.
INLINE f32v values_of(const Tile<Copied>& tile, int g, int64_t i, int64_t first) {
    const u32v pairs = load<u32v>(tile.v[g] + i / 2 * tile.v_stride + first);
    return bits_of<f32v>(pairs & u32v(all_lanes(int32_t(seen_halves(tile, g * LANES + i)))));
}
#else
INLINE f32v widen(const float* from) { return load<f32v>(from); }
INLINE f32v widen(const fp16* from) { return widen_fp16(from); }
#if FASTGEN_LANES == 16
INLINE f32v widen(const bf16* from) {  // in one instruction, into the upper halves
    const __m512i halves = _mm512_castsi256_si512(load<__m256i>(from));
    const __m512i order = _mm512_set_epi16(
        15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return bits_of<f32v>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, halves));
}
#else
INLINE f32v widen(const bf16* from) { return bits_of<f32v>(__builtin_convertvector(load<u16v>(from), u32v) << 16); }
#endif

// Values from feature `first` on, with zeros after the last; reads nothing after the last.
template <class E>
INLINE f32v widen_value(const E* value, int64_t first) {
    if (DV % LANES == 0 || first + LANES <= DV) return widen(value + first);
    E some[LANES] = {};
    std::memcpy(some, value + first, DV % LANES * sizeof(E));
    return widen(some);
}

template <class E>
INLINE f32v keys_of(const Tile<E>& tile, int g, int64_t d) {
    return widen(tile.k[g] + d * tile.k_stride);
}
template <class E>
INLINE f32v values_of(const Tile<E>& tile, int g, int64_t i, int64_t first) {
    return widen_value(tile.v[g] + i * tile.v_stride, first);
}
#endif

INLINE int64_t block_of(const Batch& batch, const Task& task, int64_t position) {
    return batch.block_tables[task.sequence * batch.max_blocks + position / P];
}

// The tile of keys `first` to `end` at most. Keys after `end` are not this sequence's; values there are never read. The
// same is true of keys before all that the task's rows see: their block may belong to another sequence by now.
INLINE Place find(const Batch& batch, const Task& task, int64_t head, int64_t first, int64_t end) {
    Place place;
    place.first = first;
    place.num_keys = std::min<int64_t>(TILE, end - first);
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t position = first + g * LANES < end ? first + g * LANES : first;
        const int64_t block = block_of(batch, task, position) * K + head;
        place.k[g] = batch.k_cache + block * D * P + position % P * STEP;
        if (!VALUES_IN_KEYS) place.v[g] = batch.v_cache + (block * P + position % P / STEP * STEP) * DV;
    }
    return place;
}

INLINE int64_t first_seen(const Task& task, const Place& place) {
    return WINDOW == 0 ? 0 : std::max<int64_t>(0, task.first_key(0) - place.first);
}

INLINE Tile<Stored> in_place(const Task& task, const Place& place) {
    Tile<Stored> tile{place.first, place.num_keys, first_seen(task, place), P, DV, {}, {}};
    for (int g = 0; g < GROUPS; ++g) {
        tile.k[g] = reinterpret_cast<const Stored*>(place.k[g]);
        tile.v[g] = reinterpret_cast<const Stored*>(place.v[g]);
    }
    return tile;
}

#if FASTGEN_BF16_DOT
void copy_keys(const Batch& batch, const Task& task, int64_t head, Buffers& buffers, Tile<Copied>& tile) {
    tile.k_stride = TILE;
    for (int g = 0; g < GROUPS; ++g) tile.k[g] = buffers.k + g * LANES;
    for (int64_t i = 0; i < tile.num_keys; ++i) {
        const int64_t position = tile.first + i, block = block_of(batch, task, position) * K + head;
        const T* key = batch.k_cache + block * D * P + position % P * 2;
        for (int64_t d = 0; d < D; d += 2) buffers.k[d / 2 * TILE + i] = load<uint32_t>(key + d * P);
    }
}

void copy_values(const Batch& batch, const Task& task, int64_t head, Buffers& buffers, Tile<Copied>& tile) {
    tile.v_stride = DV_LANES;
    for (int g = 0; g < GROUPS; ++g) tile.v[g] = buffers.v + g * LANES / 2 * DV_LANES;
    for (int64_t i = 0; i < tile.num_keys; i += 2) {
        const int64_t position = tile.first + i, block = block_of(batch, task, position) * K + head;
        const T* values = batch.v_cache + (block * P + position % P) * DV;
        const uint32_t seen = seen_halves(tile, i);
        Copied* to = buffers.v + i / 2 * DV_LANES;
        for (int64_t d = 0; d < DV; ++d) to[d] = load<uint32_t>(values + 2 * d) & seen;
        for (int64_t d = DV; d < DV_LANES; ++d) to[d] = 0;
    }
}

// A tile of pairs, of which the values are copied unless they stay where they lie.
Tile<Copied> pairs_of(const Batch& batch, const Task& task, int64_t head, const Place& place, Buffers& buffers,
                      bool values_stay) {
    Tile<Copied> tile = in_place(task, place);
    if (!WHOLE_VECTORS) copy_keys(batch, task, head, buffers, tile);
    if (!values_stay) copy_values(batch, task, head, buffers, tile);
    return tile;
}
#else
Tile<Copied> copy_together(const Batch& batch, const Task& task, int64_t head, const Place& place, Buffers& buffers) {
    Tile<Copied> tile{place.first, place.num_keys, first_seen(task, place), TILE, DV_LANES, {}, {}};
    for (int g = 0; g < GROUPS; ++g) {
        tile.k[g] = buffers.k + g * LANES;
        tile.v[g] = buffers.v + g * LANES * DV_LANES;
    }
    for (int64_t d = 0; WHOLE_VECTORS && d < D; ++d) {
        for (int g = 0; g < GROUPS; ++g) store(buffers.k + d * TILE + g * LANES, widen(place.k[g] + d * P));
    }
    for (int64_t i = 0; i < place.num_keys; ++i) {
        const int64_t position = place.first + i, block = block_of(batch, task, position) * K + head;
        const T* key = batch.k_cache + block * D * P + position % P;
        for (int64_t d = 0; !WHOLE_VECTORS && d < D; ++d) buffers.k[d * TILE + i] = float(key[d * P]);
        if (VALUES_IN_KEYS) continue;
        const T* value = batch.v_cache + (block * P + position % P) * DV;
        for (int64_t d = 0; d < DV_LANES; d += LANES) store(buffers.v + i * DV_LANES + d, widen_value(value, d));
    }
    for (int64_t d0 = 0; VALUES_IN_KEYS && d0 < DV; d0 += LANES) {  // few at a time, which stay in the first cache
        const int64_t end = std::min<int64_t>(DV, d0 + LANES);
        for (int64_t i = 0; i < place.num_keys; ++i) {
            for (int64_t d = d0; d < end; ++d) buffers.v[i * DV_LANES + d] = buffers.k[d * TILE + i];
        }
    }
    return tile;
}
#endif

// Prefetches `count` numbers of the cache.
INLINE void prefetch_numbers(const T* address, int count) {
    for (int i = 0; i < count; i += 64 / sizeof(T)) prefetch(address + i);
}

}  // namespace
