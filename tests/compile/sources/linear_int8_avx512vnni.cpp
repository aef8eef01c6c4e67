// linear(weight=int8, arch=avx512vnni, panel=32, routed=False, over_ranks=False) for cpp
// llama on avx512vnni, weights in int8
// x: in fp32
// x_stride: scalar i64
// x_group_stride: scalar i64
// num_rows: scalar i64
// num_groups: scalar i64
// workspace: out u8
// row_bytes: scalar i64
// is_prepared: scalar i64
// weights: in u8
// scale: in fp32
// bias: in fp32
// y: out fp32
// y_stride: scalar i64
// y_group_stride: scalar i64
// in_features: scalar i64
// out_features: scalar i64

#define FASTGEN_LANES 16
#define FASTGEN_HAS_DOT4 1  // sums of four products of bytes
#define FASTGEN_HAS_BF16_DOT 0  // sums of two products of bf16

#define FASTGEN_ROUTED 0
constexpr int PANEL = 32;
constexpr int K_STEP = 4;
constexpr int PANEL_BYTES_PER_STEP = PANEL * 4;
constexpr int X_BYTES_PER_STEP = 4;
constexpr bool HAS_OUTPUT_SCALES = true;
constexpr int MAX_R = 12;  // rows of a tile
constexpr int BLOCK_K = 2048, SLAB_K = 4096;  // the rows of a tile then fill most of the first cache
constexpr int MAX_TOGETHER = 4;  // tiles that go through a panel one after the other
// What all linear layers share: how rows and outputs are divided, and in which order weights are read.
//
// The including template defines the constants below, and afterwards `tile<R, P>`, the arithmetic of R rows with P panels.
//
//     rows     of x, `num_rows`; K = in_features, N = out_features
//     group    a part with its own weights: a head, whose x and y are in all rows beside the other heads', or where it is
//              `routed` an expert, which multiplies the rows that chose it; a plain layer is one group
//     panel    PANEL outputs side by side in the lanes; its weights lie in the order of k, K_STEP of them to a step
//     tile     at most MAX_R rows with a panel, or few rows with several panels: their sums stay in registers
//     stream   a contiguous range of panels; a tile's panels come from as many streams, where a core reads faster from several
//     block    BLOCK_K of K; a tile goes through one at once, whose rows stay in the first cache for many panels, and whose
//              weights in the second one for several tiles. A tile alone goes through all of K, or as many blocks as were
//              copied, since weights come from memory then, and faster the longer the pieces are. Where all rows are a few
//              tiles, these go through a panel together, each prefetching a part of the next, so that memory works while they
//              compute
//     slab     SLAB_K of K, or all of it where no chunks share weights. All go through one before any begins the next, so
//              that what they share stays in the last cache; in between the sums rest in y
//
// One output is one chain of additions in the order of k, whatever the rows, threads and blocks, so nothing else shows in
// its bits.
#include <utility>

// A kernel divides its work among the threads of thread_pool.h, which is loaded before any kernel that uses it.
#include <cstdint>
#include <type_traits>

extern "C" void fastgen_parallel_for(void (*run)(void* job, int64_t chunk), void* job, int64_t num_chunks);
extern "C" int fastgen_num_threads();

// Calls work(chunk) for every chunk below num_chunks, each on any thread, in any order.
template <class Work>
static void parallel_for(int64_t num_chunks, Work&& work) {
    using Plain = std::remove_reference_t<Work>;
    fastgen_parallel_for([](void* job, int64_t chunk) { (*static_cast<Plain*>(job))(chunk); }, &work, num_chunks);
}
// Vectors of LANES 32-bit numbers, in the compiler's own vector types; intrinsics are used only where vector
// types cannot express the operation. The template defines FASTGEN_LANES and FASTGEN_HAS_… by its instruction set.
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef FASTGEN_LANES  // the template has not chosen an instruction set, as when an editor reads this file
#define FASTGEN_LANES 4
#define FASTGEN_HAS_DOT4 0
#define FASTGEN_HAS_BF16_DOT 0
#endif

constexpr int LANES = FASTGEN_LANES;
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));
typedef int8_t i8v __attribute__((vector_size(LANES)));
#define INLINE static inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
INLINE void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}
template <class To, class From>
INLINE To bits_of(From v) {
    static_assert(sizeof(To) == sizeof(From), "the same bits under another type");
    To to;
    std::memcpy(&to, &v, sizeof to);
    return to;
}

// EACH_LANE(of) is of(0), of(1) and so on, one for each lane.
#if FASTGEN_LANES == 16
#define EACH_LANE(of) \
    of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15)
#elif FASTGEN_LANES == 8
#define EACH_LANE(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)
#else
#define EACH_LANE(of) of(0), of(1), of(2), of(3)
#endif
#define LANE_NUMBER(lane) lane
constexpr i32v LANE = {EACH_LANE(LANE_NUMBER)};

#define SAME(lane) s
INLINE f32v all_lanes(float s) { return f32v{EACH_LANE(SAME)}; }
INLINE i32v all_lanes(int32_t s) { return i32v{EACH_LANE(SAME)}; }
#undef SAME
INLINE f32v to_float(i32v v) { return __builtin_convertvector(v, f32v); }

// a * b + c, rounded once where the machine can.
INLINE f32v fma(f32v a, f32v b, f32v c) {
#if FASTGEN_LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif FASTGEN_LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// LANES numbers in fp16 widened, exactly.
INLINE f32v widen_fp16(const void* from) {
#if FASTGEN_LANES == 16
    return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from));
#elif FASTGEN_LANES == 8
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    const u32v half = __builtin_convertvector(load<u16v>(from), u32v);
    const u32v magnitude = bits_of<u32v>(bits_of<f32v>((half & 0x7fffu) << 13) * all_lanes(0x1p112f));
    const u32v not_finite = u32v((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return bits_of<f32v>(magnitude | not_finite | (half & 0x8000u) << 16);
#endif
}

#if FASTGEN_HAS_BF16_DOT
// LANES numbers rounded to bf16: to the nearest, ties to even.
INLINE u16v narrow_to_bf16(f32v v) { return bits_of<u16v>(_mm512_cvtneps_pbh(v)); }

// The numbers of two vectors rounded so, those of the first before those of the second: a pair for each lane.
INLINE f32v narrow_to_bf16(f32v first, f32v second) { return bits_of<f32v>(_mm512_cvtne2ps_pbh(second, first)); }

// `count` numbers rounded so.
INLINE void narrow_to_bf16(const float* from, int64_t count, void* to) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __mmask16 some = __mmask16(count - i < LANES ? (1 << (count - i)) - 1 : 0xffff);
        const u16v narrow = narrow_to_bf16(_mm512_maskz_loadu_ps(some, from + i));
        _mm256_mask_storeu_epi16(static_cast<uint8_t*>(to) + 2 * i, some, __m256i(narrow));
    }
}

// Adds to each lane of sum the products of the two bf16 of its lane in a with those in b.
INLINE f32v dot2(f32v a, f32v b, f32v sum) {
    return _mm512_dpbf16_ps(sum, bits_of<__m512bh>(a), bits_of<__m512bh>(b));
}

#endif
// LANES signed bytes as 32-bit numbers.
INLINE i32v widen_i8(const void* from) {
#if FASTGEN_LANES == 16
    return i32v(_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(from)));
#elif FASTGEN_LANES == 8
    return i32v(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(load<i8v>(from), i32v);
#endif
}

// Adds to each lane of sum the products of its four unsigned bytes in w with the four signed ones in x.
INLINE i32v dot4(i32v sum, u32v w, int32_t x) {
#if FASTGEN_HAS_DOT4
    return i32v(_mm512_dpbusd_epi32(__m512i(sum), __m512i(w), __m512i(all_lanes(x))));
#elif FASTGEN_LANES > 4
    // In 16 bits: bytes 0 and 2 of a lane, then bytes 1 and 3. The compiler shares each half among its uses.
    typedef int16_t i16v __attribute__((vector_size(4 * LANES)));
    typedef uint16_t halves __attribute__((vector_size(4 * LANES)));
    const i16v x_all = i16v(all_lanes(x));
    const i16v x_even = i16v(halves(x_all) << 8) >> 8, x_odd = x_all >> 8;
    const halves w_even = halves(w) & 0xff, w_odd = halves(w) >> 8;
#if FASTGEN_LANES == 16
    const u32v even = u32v(_mm512_madd_epi16(__m512i(w_even), __m512i(x_even)));
    const u32v odd = u32v(_mm512_madd_epi16(__m512i(w_odd), __m512i(x_odd)));
#else
    const u32v even = u32v(_mm256_madd_epi16(__m256i(w_even), __m256i(x_even)));
    const u32v odd = u32v(_mm256_madd_epi16(__m256i(w_odd), __m256i(x_odd)));
#endif
    return i32v(u32v(sum) + even + odd);
#else
    u32v total = u32v(sum);
    for (int byte = 0; byte < 4; ++byte) {
        total += (w >> (8 * byte) & 0xffu) * uint32_t(int32_t(int8_t(uint32_t(x) >> (8 * byte))));
    }
    return i32v(total);
#endif
}

// Moves the cache line at an address towards the core, as far as its second level.
INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// The same address, which the compiler treats as another one: data is read again, not kept in registers.
INLINE const uint8_t* again(const uint8_t* address) {
    asm volatile("" : "+r"(address));
    return address;
}

#ifndef FASTGEN_ROUTED  // as an editor reads this file
#define FASTGEN_ROUTED 0
constexpr int PANEL = 16;
constexpr int K_STEP = 1;
constexpr int PANEL_BYTES_PER_STEP = 64;
constexpr int X_BYTES_PER_STEP = 4;
constexpr bool HAS_OUTPUT_SCALES = false;
constexpr int MAX_R = 6;         // rows of a tile
constexpr int BLOCK_K = 512;     // the rows of a tile then fill most of the first cache
constexpr int SLAB_K = 2048;
constexpr int MAX_TOGETHER = 4;  // tiles that go through a panel one after the other
#endif

constexpr int VECTORS = PANEL / LANES;
constexpr int MAX_P = 4;
// Panels of a chunk. Where a layer is routed each chunk copies its rows; else the second cache holds a block of their
// weights.
constexpr int MAX_PANELS = (FASTGEN_ROUTED ? 512 : 256) / PANEL;
constexpr int BLOCK_ROWS = 4 * MAX_R;
constexpr int LEAST_PANELS = MAX_P;  // of a chunk, where every thread gets so many
constexpr int X_BYTES = BLOCK_K / K_STEP * X_BYTES_PER_STEP;  // of a row's block
constexpr int MAX_BLOCKS = 4;              // that are copied, of a tile with few rows, or of as many tiles together
constexpr int COPY_STRIDE = X_BYTES + 64;  // no multiple of 4096, so that rows share no cache sets
constexpr int AHEAD = 6144 / PANEL_BYTES_PER_STEP;  // steps from a weight to the one that is prefetched beside it

struct Call {
    int64_t num_groups, K, N, num_panels;
    const uint8_t* x;  // rows x_stride bytes apart
    int64_t x_stride;
    const uint8_t* weights;  // [num_groups][num_panels][K / K_STEP] steps
    const float* scale;      // [num_groups][num_panels * PANEL], where the format has one for each output
    const float* bias;       // [num_groups][num_panels * PANEL]
    float* y;                // rows y_stride numbers apart
    int64_t y_stride;
#if FASTGEN_ROUTED
    const int64_t* order;       // choices, those of group g from first_rows[g] on; choice c writes row c of y
    const int64_t* first_rows;  // [num_groups + 1]
    int64_t choices_per_row;    // of x
#else
    int64_t num_rows;
    int64_t x_group_stride, y_group_stride;  // from what a group has of a row to what the next has
#endif

    const uint8_t* step(int64_t panel, int64_t k) const { return weights + (panel * K + k) / K_STEP * PANEL_BYTES_PER_STEP; }
#if FASTGEN_ROUTED
    int64_t num_rows_of(int64_t group) const { return first_rows[group + 1] - first_rows[group]; }
    const uint8_t* x_row(int64_t row) const { return x + order[row] / choices_per_row * x_stride; }
    float* y_row(int64_t row) const { return y + order[row] * y_stride; }
#else
    int64_t num_rows_of(int64_t) const { return num_rows; }
    const uint8_t* x_row(int64_t row) const { return x + row * x_stride; }
    float* y_row(int64_t row) const { return y + row * y_stride; }
#endif

    // The same with one group alone.
    Call of(int64_t group) const {
        Call one = *this;
        one.weights = step(group * num_panels, 0);
        if (HAS_OUTPUT_SCALES) one.scale = scale + group * num_panels * PANEL;
        one.bias = bias + group * num_panels * PANEL;
#if FASTGEN_ROUTED
        one.order = order + first_rows[group];
#else
        one.x = x + group * x_group_stride;
        one.y = y + group * y_group_stride;
#endif
        return one;
    }
};

struct Panel {
    int64_t index;
    const uint8_t* weights;  // the tile's part
    const uint8_t* next;     // what is read after them
    float* sums;             // [rows of the tile][PANEL], between blocks
    bool is_cut;             // wider than what is left of y
};

struct Tile {
    int64_t k, num_k;
    bool begins_slab, ends_slab;
    const uint8_t* x = nullptr;    // of each block the rows' parts
    int64_t x_stride = 0;          // bytes from one row's part to the next one's
    int64_t x_block = 0;           // and from one block's parts to the next one's
    const uint8_t* x_rows[MAX_R];  // the complete rows
    float* y_rows[MAX_R];
    Panel panels[MAX_P];
    int64_t first_ahead = AHEAD;  // the step whose weights are prefetched beside the first one's
    int ahead_shift = 0;          // 2 to the so many steps prefetch one

    // The tile is number j of several that go through each panel: it prefetches its part of the next panel, or nothing.
    void prefetch_part(int64_t j, int64_t num_together) {
        if (num_together == 1) return;
        ahead_shift = num_together == 4 ? 2 : 1;
        const int64_t num_steps = num_k / K_STEP;
        first_ahead = j >> ahead_shift ? 0 : num_steps + j * (num_steps >> ahead_shift);
    }

    // The block that begins with that k of the tile's.
    const uint8_t* block_of_x(int64_t begin) const { return x + begin / BLOCK_K * x_block; }

    // Where the sums of a row with a panel are, and where they go.
    const float* before(const Panel& panel, int r) const { return sums(panel, r, begins_slab); }
    float* after(const Panel& panel, int r) const { return sums(panel, r, ends_slab); }

    float* sums(const Panel& panel, int r, bool in_y) const {
        return in_y && !panel.is_cut ? y_rows[r] + panel.index * PANEL : panel.sums + r * PANEL;
    }
};

// Where R rows of x are in a loop over k: an address for three, as instructions add once or twice a stride by themselves.
template <int R>
struct RowsOfX {
    const uint8_t* thirds[(R + 2) / 3];
    int64_t stride;

    RowsOfX(const uint8_t* first, int64_t apart) : stride(apart) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r += 3) thirds[r / 3] = first + r * apart;
    }
    const uint8_t* operator[](int r) const { return thirds[r / 3] + r % 3 * stride; }
    void step() {
#pragma GCC unroll 16
        for (int r = 0; r < R; r += 3) thirds[r / 3] += X_BYTES_PER_STEP;
    }
};

// How many panels a tile of R rows has where there are several streams: as many as there are registers for.
constexpr int panels_of(int R) { return MAX_R / R < MAX_P ? MAX_R / R : MAX_P; }

template <int R, int P>
static void tile(const Call& call, const Tile& at);

template <int... I>
INLINE void run_tile_of(std::integer_sequence<int, I...>, int64_t num_rows, int64_t num_panels, const Call& call,
                        const Tile& at) {
    using Run = void (*)(const Call&, const Tile&);
    static constexpr Run ONE_PANEL[] = {tile<I + 1, 1>...};
    static constexpr Run STREAMS[] = {tile<I + 1, panels_of(I + 1)>...};
    (num_panels == 1 ? ONE_PANEL : STREAMS)[num_rows - 1](call, at);
}
static void run_tile(int64_t num_rows, int64_t num_panels, const Call& call, const Tile& at) {
    run_tile_of(std::make_integer_sequence<int, MAX_R>(), num_rows, num_panels, call, at);
}

// The weight to prefetch beside step i of `count` steps of a panel.
INLINE const uint8_t* ahead_of(const Tile& at, const Panel& panel, int64_t i, int64_t count) {
    const int64_t step = at.first_ahead + (i >> at.ahead_shift);
    return step < count ? panel.weights + step * PANEL_BYTES_PER_STEP : panel.next + (step - count) * PANEL_BYTES_PER_STEP;
}

// Division of n things into parts that are as even as can be: part i begins at begin(i).
struct Parts {
    int64_t n, count;
    int64_t begin(int64_t i) const { return n * i / count; }
    int64_t size(int64_t i) const { return begin(i + 1) - begin(i); }
};

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE Parts fewest_parts(int64_t n, int64_t most) { return {n, divide_up(n, most)}; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Part of a call: `num_rows` of its rows, or all, the panels `begin` to `end` of the first stream with their counterparts
// of the others, `stream_length` further on, and `k_begin` to `k_end` of K.
struct Part {
    int64_t row, num_rows;
    bool has_all_rows;
    int64_t begin, end, stream_length, num_streams, k_begin, k_end;
};

// y of the last panel, which is wider than what is left of y, to `sums`, or back.
static void copy_cut(const Call& call, const Part& part, float* sums, bool to_y) {
    const int64_t last = call.num_panels - 1;
    for (int64_t r = 0; r < part.num_rows; ++r) {
        float* y = call.y_row(part.row + r) + last * PANEL;
        std::memcpy(to_y ? y : sums + r * PANEL, to_y ? sums + r * PANEL : y, 4 * (call.N - last * PANEL));
    }
}

// Returns whether a tile's rows are copied together before it goes through them. Routed rows lie anywhere. Others lie where
// a loop can read them, but at multiples of 4096 bytes more rows than the first cache has ways would share its sets.
INLINE bool copies_rows(const Call& call, int64_t num_rows) {
    return FASTGEN_ROUTED ? num_rows > 1 : num_rows > MAX_R && call.x_stride % 4096 == 0;
}

// Gives a tile the `size` rows from `row` on: as they lie, or what it goes through of them copied to `x`.
static void take_rows(const Call& call, int64_t row, int64_t size, Tile& at, bool copies, uint8_t (*x)[MAX_R * COPY_STRIDE]) {
    const int64_t first = at.k / K_STEP * X_BYTES_PER_STEP;
    at.x = call.x_row(row) + first, at.x_stride = call.x_stride, at.x_block = X_BYTES;
    if (copies) at.x = x[0], at.x_stride = COPY_STRIDE, at.x_block = sizeof x[0];
    for (int64_t r = 0; r < size; ++r) {
        at.x_rows[r] = call.x_row(row + r);
        at.y_rows[r] = call.y_row(row + r);
        if (!copies) continue;
        for (int64_t left = at.num_k / K_STEP * X_BYTES_PER_STEP, b = 0; left > 0; left -= X_BYTES, ++b) {
            std::memcpy(x[b] + r * COPY_STRIDE, at.x_rows[r] + first + b * X_BYTES, smaller(left, X_BYTES));
        }
    }
}

// Prefetches a share of what a tile goes through of its `size` rows from `row` on.
static void prefetch_rows(const Call& call, int64_t row, int64_t size, int64_t k, int64_t num_k, const Parts& shares,
                          int64_t share) {
    const Parts rows = {size, shares.count};
    for (int64_t r = rows.begin(share); r < rows.begin(share + 1); ++r) {
        const uint8_t* from = call.x_row(row + r) + k / K_STEP * X_BYTES_PER_STEP;
        for (int64_t byte = 0; byte < num_k / K_STEP * X_BYTES_PER_STEP; byte += 64) prefetch(from + byte);
    }
}

static void multiply_part(const Call& call, const Part& part) {
    static_assert(MAX_TOGETHER <= MAX_BLOCKS, "each has room for its block of x");
    alignas(64) uint8_t x[MAX_BLOCKS][MAX_R * COPY_STRIDE];
    const bool copies = copies_rows(call, part.num_rows);
    alignas(64) float sums[MAX_PANELS * BLOCK_ROWS * PANEL];
    const auto sums_of = [&](int64_t i, int64_t stream) {
        return sums + ((i - part.begin) * part.num_streams + stream) * part.num_rows * PANEL;
    };
    const int64_t last = call.num_panels - 1, last_i = last % part.stream_length;
    const bool has_cut = call.N < call.num_panels * PANEL && part.begin <= last_i && last_i < part.end;
    float* cut = has_cut ? sums_of(last_i, last / part.stream_length) : nullptr;
    if (has_cut && part.k_begin > 0) copy_cut(call, part, cut, false);
    const Parts tiles = fewest_parts(part.num_rows, MAX_R);
    const int64_t num_together = part.has_all_rows && tiles.count <= MAX_TOGETHER ? tiles.count : 1;
#if FASTGEN_ROUTED
    const int64_t most_k = part.num_rows == 1 ? call.K : part.num_rows <= MAX_R ? MAX_BLOCKS * BLOCK_K : BLOCK_K;
#else
    const int64_t most_k = part.num_rows <= MAX_R ? call.K : BLOCK_K;
#endif
    const auto run = [&](Tile& at, int64_t t, int64_t i) {
        int64_t count = 0;
        const int64_t back = at.ends_slab ? 0 : i - part.begin;
        for (int64_t panel = i; panel <= last; panel += part.stream_length) {
            const uint8_t* next = i + 1 < part.end ? call.step(panel + 1, at.k) : call.step(panel - back, at.k + at.num_k);
            float* resting = sums_of(i, count) + tiles.begin(t) * PANEL;
            at.panels[count++] = {panel, call.step(panel, at.k), next, resting, has_cut && panel == last};
        }
        if (count == part.num_streams) return run_tile(tiles.size(t), count, call, at);
        for (int64_t p = 0; p < count; ++p) {  // the last stream has ended; one by one
            at.panels[0] = at.panels[p];
            run_tile(tiles.size(t), 1, call, at);
        }
    };
    for (int64_t k = part.k_begin; k < part.k_end; k += most_k) {
        const int64_t num_k = smaller(most_k, part.k_end - k);
        for (int64_t t = 0; t < tiles.count; t += num_together) {
            Tile together[MAX_TOGETHER];
            for (int64_t j = 0; j < num_together; ++j) {
                Tile& at = together[j];
                at.k = k, at.num_k = num_k, at.begins_slab = k == part.k_begin, at.ends_slab = k + num_k == part.k_end;
                at.prefetch_part(j, num_together);
                take_rows(call, part.row + tiles.begin(t + j), tiles.size(t + j), at, copies, x + j);
            }
            // Meanwhile the rows to be copied next are fetched: all of them may be too many for the second cache.
            const bool is_last = t + num_together == tiles.count;
            const int64_t next_t = is_last ? 0 : t + 1, next_k = is_last ? k + num_k : k;
            const bool fetches = copies && num_together == 1 && part.num_rows > MAX_R && next_k < part.k_end;
            const Parts shares = {tiles.size(next_t), part.end - part.begin};
            for (int64_t i = part.begin; i < part.end; ++i) {
                if (fetches) {
                    prefetch_rows(call, part.row + tiles.begin(next_t), tiles.size(next_t), next_k,
                                  smaller(most_k, part.k_end - next_k), shares, i - part.begin);
                }
                for (int64_t j = 0; j < num_together; ++j) run(together[j], t + j, i);
            }
        }
    }
    if (has_cut) copy_cut(call, part, cut, true);
}

// Whether a core reads memory faster from one stream of weights than from several. Zen 5 does, by a tenth to a fifth;
// Cascade Lake is slower by as much.
INLINE bool reads_best_from_one_stream() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// How a group's work is divided into chunks, each of them a part of its rows with a part of every stream.
struct Chunks {
    Parts rows;
    int64_t num_streams, stream_length;
    Parts panels;  // of a stream

    // `num_row_parts` are those of all groups.
    Chunks(int64_t num_rows, int64_t num_panels, int64_t num_row_parts)
        : rows(fewest_parts(num_rows, BLOCK_ROWS)),
          num_streams(num_rows <= MAX_R && !reads_best_from_one_stream() ? panels_of(int(num_rows)) : 1),
          stream_length(divide_up(num_panels, num_streams)),
          panels{stream_length, parts_of_stream(stream_length, num_rows, num_row_parts)} {}

    // Every thread gets as many chunks: several, so that others can help one that is held up.
    static int64_t parts_of_stream(int64_t stream_length, int64_t num_rows, int64_t num_row_parts) {
        const int64_t num_threads = fastgen_num_threads(), of_a_thread = divide_up(stream_length * num_row_parts, num_threads);
        const int64_t least = num_rows <= MAX_R ? LEAST_PANELS / panels_of(int(num_rows)) : LEAST_PANELS;
        const int64_t most = smaller(larger(of_a_thread / 8, least), MAX_PANELS);
        return smaller(stream_length, divide_up(divide_up(of_a_thread, most) * num_threads, num_row_parts));
    }

    int64_t count() const { return rows.count * panels.count; }

    void run(const Call& call, int64_t chunk, int64_t k_begin, int64_t k_end) const {
        const int64_t row = chunk % rows.count, panel = chunk / rows.count;
        multiply_part(call, {rows.begin(row), rows.size(row), rows.count == 1, panels.begin(panel),
                             panels.begin(panel + 1), stream_length, num_streams, k_begin, k_end});
    }
};

// Goes through the groups that have rows, until visit(group, chunks) is true.
template <class Visit>
static void visit_groups(const Call& call, int64_t num_row_parts, Visit&& visit) {
    Chunks chunks(1, call.num_panels, num_row_parts);
    for (int64_t group = 0; group < call.num_groups; ++group) {
        const int64_t num_rows = call.num_rows_of(group);
        if (num_rows == 0) continue;
        if (num_rows != chunks.rows.n) chunks = Chunks(num_rows, call.num_panels, num_row_parts);
        if (visit(group, chunks)) return;
    }
}

static void multiply(const Call& call) {
    int64_t num_row_parts = 0, num_chunks = 0, most_rows = 0;
    for (int64_t group = 0; group < call.num_groups; ++group) {
        num_row_parts += divide_up(call.num_rows_of(group), BLOCK_ROWS);
        most_rows = larger(most_rows, call.num_rows_of(group));
    }
    if (num_row_parts == 0) return;
    visit_groups(call, num_row_parts, [&](int64_t, const Chunks& chunks) {
        num_chunks += chunks.count();
        return false;
    });
    const int64_t slab = most_rows <= BLOCK_ROWS ? call.K : SLAB_K;
    for (int64_t k = 0; k < call.K; k += slab) {
        parallel_for(num_chunks, [&](int64_t chunk) {
            visit_groups(call, num_row_parts, [&](int64_t group, const Chunks& chunks) {
                if (chunk >= chunks.count()) {
                    chunk -= chunks.count();
                    return false;
                }
                chunks.run(call.of(group), chunk, k, smaller(k + slab, call.K));
                return true;
            });
        });
    }
}

// Rows of x as the arithmetic reads them, such as rounded or quantized, row_bytes apart. If they are `complete`, x is not
// read.
struct PreparedRows {
    uint8_t* first;
    int64_t row_bytes;
    bool complete;

    // Calls prepare(i, where it goes) for each of `count` rows of in_features.
    template <class Prepare>
    void complete_by(int64_t count, int64_t in_features, Prepare&& prepare) const {
        if (complete) return;
        if (count * in_features < 32768) {
            for (int64_t i = 0; i < count; ++i) prepare(i, first + i * row_bytes);
        } else {
            parallel_for(count, [&](int64_t i) { prepare(i, first + i * row_bytes); });
        }
    }
};

// Multiplies rows that are prepared first: prepare(row of x, where it goes) does it for each row of a group. `call` says
// where x is, and in numbers how far its rows lie apart.
template <class Prepare>
static void multiply_prepared(Call call, const float* x, int64_t x_stride, int64_t x_group_stride, int64_t num_rows,
                              int64_t in_features, const PreparedRows& rows, Prepare&& prepare_row) {
    const int64_t num_groups = FASTGEN_ROUTED ? 1 : call.num_groups;  // of a row of x, one after the other
    rows.complete_by(num_rows * num_groups, in_features, [&](int64_t i, uint8_t* to) {
        prepare_row(x + i / num_groups * x_stride + i % num_groups * x_group_stride, to);
    });
    call.x = rows.first;
    call.x_stride = num_groups * rows.row_bytes;
#if !FASTGEN_ROUTED
    call.x_group_stride = rows.row_bytes;
#endif
    multiply(call);
}

// Of each group of k, which share a scale: their codes, signed bytes; what their sums of products start from, an i32; the
// scale, an fp32. All of k is one group.
INLINE void quantize_group(const float* __restrict x, int64_t num_k, int64_t size, uint8_t* __restrict to) {
    uint32_t largest_bits = 0;  // as integers NaN is the largest of all, so it reaches the scale
    for (int64_t k = 0; k < num_k; ++k) {
        const uint32_t magnitude = load<uint32_t>(x + k) & 0x7fffffffu;
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    const float largest = bits_of<float>(largest_bits);
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int64_t k = 0; k < num_k; ++k) {
        const float rounded = x[k] * inverse + 0x1.8p23f;  // to the nearest integer, ties to even, in the lowest bits
        const int8_t code = int8_t(bits_of<int32_t>(rounded));
        to[k] = uint8_t(code);
        sum += code;
    }
    std::memset(to + num_k, 0, size - num_k);
    store(to + size, -128 * sum);  // the offset of weights
    store(to + size + 4, largest / 127.0f);
}

static void write_prepared(const float* x, int64_t in_features, int64_t K, uint8_t* to) {
    quantize_group(x, in_features, K, to);
}


INLINE i32v start_of(const Call& call, const uint8_t* row) { return all_lanes(load<int32_t>(row + call.K)); }
INLINE f32v scale_of(const Call& call, const uint8_t* row) { return all_lanes(load<float>(row + call.K + 4)); }

template <int R, int P>
static void tile(const Call& call, const Tile& at) {
    i32v sum[P][R][VECTORS];
    #pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
        const Panel& panel = at.panels[p];
        #pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            #pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                const float* y = at.before(panel, r) + v * LANES;
                sum[p][r][v] = at.k == 0 ? start_of(call, at.x_rows[r]) : load<i32v>(y);
            }
        }
    }
    const int64_t num_steps = at.num_k / K_STEP;
    for (int64_t begin = 0; begin < num_steps; begin += BLOCK_K / K_STEP) {
        const int64_t end = smaller(begin + BLOCK_K / K_STEP, num_steps);
        RowsOfX<R> x(at.block_of_x(begin * K_STEP), at.x_stride);
        for (int64_t i = begin; i < end; ++i, x.step()) {
            #pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                const uint8_t* ahead = ahead_of(at, at.panels[p], i, num_steps);
                #pragma GCC unroll 16
                for (int line = 0; line < PANEL_BYTES_PER_STEP; line += 64) prefetch(ahead + line);
                const uint8_t* weights = at.panels[p].weights + i * PANEL_BYTES_PER_STEP;
                u32v w[VECTORS];
                #pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) w[v] = load<u32v>(weights + v * LANES * 4);
                #pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const int32_t four = load<int32_t>(x[r]);
                    #pragma GCC unroll 16
                    for (int v = 0; v < VECTORS; ++v) sum[p][r][v] = dot4(sum[p][r][v], w[v], four);
                }
            }
        }
    }
    const bool is_whole = at.k + at.num_k == call.K;
    #pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
        const Panel& panel = at.panels[p];
        #pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            #pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                float* y = at.after(panel, r) + v * LANES;
                if (!is_whole) {
                    store(y, sum[p][r][v]);
                    continue;
                }
                const int64_t output = panel.index * PANEL + v * LANES;
                const f32v value = to_float(sum[p][r][v]) * scale_of(call, at.x_rows[r]) * load<f32v>(call.scale + output);
                store(y, value + load<f32v>(call.bias + output));
            }
        }
    }
}

extern "C" void linear_int8_avx512vnni_panel32(
    const float* __restrict x,
    int64_t x_stride,
    int64_t x_group_stride,
    int64_t num_rows,
    int64_t num_groups,
    uint8_t* __restrict workspace,
    int64_t row_bytes,
    int64_t is_prepared,
    const uint8_t* __restrict weights,
    const float* __restrict scale,
    const float* __restrict bias,
    float* __restrict y,
    int64_t y_stride,
    int64_t y_group_stride,
    int64_t in_features,
    int64_t out_features) {
    const int64_t K = (in_features + K_STEP - 1) / K_STEP * K_STEP, num_panels = (out_features + PANEL - 1) / PANEL;
    const Call call = {num_groups, K, out_features, num_panels, nullptr, 0, weights, scale, bias, y, y_stride,
                       num_rows, 0, y_group_stride};
    const PreparedRows rows = {workspace, row_bytes, is_prepared != 0};
    const auto prepare = [=](const float* row, uint8_t* to) {
        write_prepared(row, in_features, K, to);
    };
    multiply_prepared(call, x, x_stride, x_group_stride, num_rows, in_features, rows, prepare);
}

// The same function for a tape, whose blocks have 8 bytes for each argument.
extern "C" void linear_int8_avx512vnni_panel32_from_slots(const int64_t* slots) {
    linear_int8_avx512vnni_panel32(
        reinterpret_cast<const float*>(slots[0]), 
        int64_t(slots[1]), 
        int64_t(slots[2]), 
        int64_t(slots[3]), 
        int64_t(slots[4]), 
        reinterpret_cast<uint8_t*>(slots[5]), 
        int64_t(slots[6]), 
        int64_t(slots[7]), 
        reinterpret_cast<const uint8_t*>(slots[8]), 
        reinterpret_cast<const float*>(slots[9]), 
        reinterpret_cast<const float*>(slots[10]), 
        reinterpret_cast<float*>(slots[11]), 
        int64_t(slots[12]), 
        int64_t(slots[13]), 
        int64_t(slots[14]), 
        int64_t(slots[15])
    );
}
