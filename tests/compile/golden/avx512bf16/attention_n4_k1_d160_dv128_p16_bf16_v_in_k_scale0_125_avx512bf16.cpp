// attention(N=4, K=1, D=160, DV=128, P=16, dtype=bf16, pairs=False, v_in_k=True, scale=0.125, arch=avx512bf16) for cpp

#define FASTGEN_LANES 16
#define FASTGEN_HAS_DOT4 1  // sums of four products of bytes
#define FASTGEN_HAS_BF16_DOT 1  // sums of two products of bf16
#define FASTGEN_BF16_DOT 0
// Numbers of 16 bits.
#include <cmath>
#include <cstdint>
#include <cstring>

// A float's upper half; widened exactly, narrowed to the nearest, ties to even.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
        bits = is_nan ? uint16_t(wide >> 16 | 0x40u) : uint16_t((wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
    }
    operator float() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
};
#if defined(__aarch64__) || defined(__clang__)
using fp16 = __fp16;  // the other name is known to g++ for Arm from 13 on, to clang for x86 from 15 on
#else
using fp16 = _Float16;
#endif

enum Bias { NONE, PLAIN, SCALED };  // the scores' scale multiplies the bias too where it is SCALED

using T = bf16;  // of keys and values in the cache; queries and results are fp32
constexpr int64_t N = 4, K = 1, D = 160, DV = 128, P = 16;
constexpr int64_t WINDOW = 0;  // positions that a query sees, its own included; 0 where it sees all
constexpr bool VALUES_IN_KEYS = true;
constexpr Bias ALIBI = NONE;
constexpr bool ALIBI_IN_BF16 = false;
constexpr double SOFTCAP = 0;  // 0 where scores are not capped
constexpr double SCALE = 0.125;
// What a thread does of an attention: all segments of a task, or one of them.
// What one tile of keys comes to for some rows: scores, weights, sums of values.
// Where keys and values of one tile lie, and how they are read.
// Causal attention of a ragged batch over a paged cache, in one pass with a running maximum (Milakov and Gimelshein,
// 2018).
//
//   N query heads, K KV heads, G = N / K query heads that read one KV head; D features of a key, DV of a value
//   P       tokens in a block. A block holds its keys as [K][D][P], so that a vector of keys gives a vector of scores,
//           and its values as [K][P][DV], or the values are the first DV features of the keys
//   row     one query head of one token; rows that are computed together share what is loaded of keys and values
//   tile    TILE keys, from a multiple of TILE on: GROUPS vectors of scores, which a few rows have registers for
//   segment SEGMENT keys, from a multiple of SEGMENT on
//   pair    with BF16_DOT: two features of a key, or two keys of a value's feature, in the 32 bits of a lane; queries and
//           weights are rounded to bf16 too, and two products are added at once
//
// A segment's tiles are folded in order, and so are a row's segments: its result depends neither on which other rows
// there are nor on who computed which segment.
#include <algorithm>
#include <vector>

// How a kernel spreads its work over the pool of thread_pool.h, which is loaded before any kernel that uses it.
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
// Functions of f32v that the C library has for single numbers only, within 2 units in the last place where the result is
// not tiny.
// Vectors of LANES 32-bit numbers, in the compiler's own vector types; an instruction is named only where there is no
// other way to say what is meant. The template defines FASTGEN_LANES and FASTGEN_HAS_… by its instruction set.
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

// The same numbers again, as they are rounded.
INLINE f32v widen_bf16(u16v v) { return bits_of<f32v>(__builtin_convertvector(v, u32v) << 16); }

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
    typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));
    const i16v x_all = i16v(all_lanes(x));
    const i16v x_even = i16v(pairs(x_all) << 8) >> 8, x_odd = x_all >> 8;
    const pairs w_even = pairs(w) & 0xff, w_odd = pairs(w) >> 8;
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

// The same address, which the compiler takes for another: what is read there is read again, not kept in a register.
INLINE const uint8_t* again(const uint8_t* address) {
    asm volatile("" : "+r"(address));
    return address;
}

constexpr float INFINITE = __builtin_inff();

INLINE f32v select(i32v which, f32v yes, f32v no) { return which ? yes : no; }
INLINE f32v larger(f32v a, f32v b) { return select(a > b, a, b); }  // b where one is no number
INLINE f32v magnitude(f32v x) { return bits_of<f32v>(bits_of<u32v>(x) & 0x7fffffffu); }

// The same numbers, those of lane i + BY in lane i.
template <int BY>
INLINE f32v rotated(f32v v) {
#define SOURCE_LANE(lane) (lane + BY) % LANES
#if defined(__clang__)
    return __builtin_shufflevector(v, v, EACH_LANE(SOURCE_LANE));
#else
    return __builtin_shuffle(v, i32v{EACH_LANE(SOURCE_LANE)});
#endif
#undef SOURCE_LANE
}

// Sums and maxima over the lanes, by halves: one order, whatever the compiler.
template <class Combine>
INLINE float over_lanes(f32v v, Combine combine) {
    if constexpr (LANES > 8) v = combine(v, rotated<8>(v));
    if constexpr (LANES > 4) v = combine(v, rotated<4>(v));
    v = combine(v, rotated<2>(v));
    v = combine(v, rotated<1>(v));
    return v[0];
}
INLINE float sum_of(f32v v) { return over_lanes(v, [](f32v a, f32v b) { return a + b; }); }
INLINE float largest_of(f32v v) { return over_lanes(v, [](f32v a, f32v b) { return larger(a, b); }); }

// e to the x: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e to the r (Cephes), and n into the exponent.
// 0 below -87.3, where the result would not be normal; infinite above 88.7.
INLINE f32v exp(f32v x) {
    const i32v below = x < all_lanes(-87.33654f), above = x > all_lanes(88.72283f);  // neither, where x is no number
    const f32v within = select(below, all_lanes(-87.33654f), select(above, all_lanes(88.72283f), x));
    // Adding and taking away 1.5 * 2^23 leaves the nearest whole number.
    const f32v n = fma(within, all_lanes(1.44269504f), all_lanes(12582912.0f)) - all_lanes(12582912.0f);
    f32v r = fma(n, all_lanes(-0.693359375f), within);
    r = fma(n, all_lanes(2.12194440e-4f), r);
    f32v p = all_lanes(1.9875691500e-4f);
    p = fma(p, r, all_lanes(1.3981999507e-3f));
    p = fma(p, r, all_lanes(8.3334519073e-3f));
    p = fma(p, r, all_lanes(4.1665795894e-2f));
    p = fma(p, r, all_lanes(1.6666665459e-1f));
    p = fma(p, r, all_lanes(5.0000001201e-1f));
    p = fma(p, r * r, r) + all_lanes(1.0f);
    // In two steps: 2 to the 128 is no float.
    const i32v whole = __builtin_convertvector(n, i32v), half = whole >> 1;
    const f32v scaled = p * bits_of<f32v>((half + 127) << 23) * bits_of<f32v>((whole - half + 127) << 23);
    return select(below, all_lanes(0.0f), select(above, all_lanes(INFINITE), scaled));
}

// Near 0 a polynomial (Cephes), since 1 - 2 / (e^2x + 1) would lose the small digits there.
INLINE f32v tanh(f32v x) {
    const f32v size = magnitude(x), square = x * x;
    f32v p = all_lanes(-5.70498872745e-3f);
    p = fma(p, square, all_lanes(2.06390887954e-2f));
    p = fma(p, square, all_lanes(-5.37397155531e-2f));
    p = fma(p, square, all_lanes(1.33314422036e-1f));
    p = fma(p, square, all_lanes(-3.33332819422e-1f));
    const f32v near = fma(p * square, x, x);
    const f32v far = all_lanes(1.0f) - all_lanes(2.0f) / (exp(size + size) + all_lanes(1.0f));
    return select(size < all_lanes(0.625f), near, select(x < all_lanes(0.0f), -far, far));
}

// 1 - erf(x) for x >= 0, whose square the caller may know more exactly: an exponential of a polynomial in 1 / (1 + x / 2)
// (Press et al., Numerical Recipes, erfcc).
INLINE f32v erfc_positive(f32v x, f32v square) {
    const f32v t = all_lanes(1.0f) / fma(x, all_lanes(0.5f), all_lanes(1.0f));
    f32v p = all_lanes(0.17087277f);
    p = fma(p, t, all_lanes(-0.82215223f));
    p = fma(p, t, all_lanes(1.48851587f));
    p = fma(p, t, all_lanes(-1.13520398f));
    p = fma(p, t, all_lanes(0.27886807f));
    p = fma(p, t, all_lanes(-0.18628806f));
    p = fma(p, t, all_lanes(0.09678418f));
    p = fma(p, t, all_lanes(0.37409196f));
    p = fma(p, t, all_lanes(1.00002368f));
    p = fma(p, t, all_lanes(-1.26551223f));
    return t * exp(p - square);
}

// Some of a vector's numbers, zeros behind them; nothing behind them is touched.
INLINE f32v load_some(const float* from, int64_t count) {
    if (count >= LANES) return load<f32v>(from);
    float some[LANES] = {};
    std::memcpy(some, from, count * sizeof(float));
    return load<f32v>(some);
}
INLINE void store_some(float* to, f32v v, int64_t count) {
    if (count >= LANES) return store(to, v);
    std::memcpy(to, &v, count * sizeof(float));
}

#ifndef FASTGEN_BF16_DOT  // as an editor reads this file
#define FASTGEN_BF16_DOT 0
enum Bias { NONE, PLAIN, SCALED };
using T = bf16;
constexpr int64_t N = 8, K = 2, D = 64, DV = 64, P = 16;
constexpr int64_t WINDOW = 0;  // positions that a query sees, its own included; 0 where it sees all
constexpr bool VALUES_IN_KEYS = false;
constexpr Bias ALIBI = NONE;
constexpr bool ALIBI_IN_BF16 = false;
constexpr double SOFTCAP = 0;  // 0 where scores are not capped
constexpr double SCALE = 0.125;
#endif

constexpr int64_t G = N / K;
constexpr int GROUPS = 4, TILE = GROUPS * LANES;
constexpr bool BF16_DOT = FASTGEN_BF16_DOT;
constexpr int STEP = BF16_DOT ? 2 : 1;  // products that are added at once
constexpr int64_t SEGMENT = 8 * TILE;
constexpr int MAX_ROWS = LANES == 16 ? 6 : LANES == 8 ? 2 : 4;  // with GROUPS vectors each they fit into the registers
constexpr int MAX_TASK_ROWS = 8 * MAX_ROWS;

namespace {

struct Batch {
    const float* q;  // [tokens][N][D], tokens q_stride apart
    const T* k_cache;
    const T* v_cache;  // unused where VALUES_IN_KEYS
    const int32_t* block_tables;  // [sequences][max_blocks]
    const int32_t* cu_seqlens_q;
    const int32_t* seq_lens;
    const float* slopes;  // [N], unused without ALIBI
    float* out;  // [tokens][N][DV]
    int64_t max_blocks, q_stride;
};

// Rows of one sequence, the same of each of some KV heads: row r of a head is its query head r % G of new token r / G.
struct Task {
    int64_t sequence, num_new, seq_len;
    int64_t first_row, num_rows, first_head, num_heads;
    int64_t first_state;  // in the workspace, where the segments are shared out; else -1

    int64_t size() const { return num_rows * num_heads; }
    int64_t num_parts() const { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }
    int64_t part(int64_t i) const { return num_rows * i / num_parts(); }  // its first row
    int64_t token(int64_t r) const { return (first_row + r) / G; }
    int64_t query_head(int64_t head, int64_t r) const { return head * G + (first_row + r) % G; }
    int64_t position(int64_t r) const { return seq_len - num_new + token(r); }
    int64_t end() const { return position(num_rows - 1) + 1; }
    int64_t first_key(int64_t r) const {
        return WINDOW == 0 ? 0 : std::max<int64_t>(0, position(r) - (WINDOW - 1));
    }
    int64_t first_segment() const { return first_key(0) / SEGMENT; }
    int64_t num_segments() const { return (end() - 1) / SEGMENT + 1 - first_segment(); }
};

}  // namespace

namespace {

constexpr int DV_VECTORS = (DV + LANES - 1) / LANES, DV_LANES = DV_VECTORS * LANES;
constexpr bool WHOLE_VECTORS = P % LANES == 0;  // of keys and of values in the blocks

// Whether a tile's keys and values can be used where they lie. Where not, or where many parts of rows would each widen or
// interleave them, they are first brought together, as floats or as pairs.
constexpr bool CAN_USE_IN_PLACE = WHOLE_VECTORS && !VALUES_IN_KEYS;

// Where a tile's keys and values lie in the cache.
struct Place {
    int64_t first, num_keys;
    const T* k[GROUPS];  // LANES keys, features P apart
    const T* v[GROUPS] = {};  // LANES values, DV apart; unused where VALUES_IN_KEYS
};

// Where a tile's keys and values are brought together.
using Brought = std::conditional_t<BF16_DOT, uint32_t, float>;
struct Buffers {
    Brought k[D / STEP * TILE];         // [D / STEP][TILE]
    Brought v[TILE / STEP * DV_LANES];  // [TILE / STEP][DV_LANES]
};

// A tile's keys and values, brought together or as they are in the cache.
template <class E>
struct Tile {
    int64_t first, num_keys;
    int64_t first_seen;  // so many keys lie in front of all that the task's rows see
    int64_t k_stride, v_stride;
    const E* k[GROUPS];
    const E* v[GROUPS];
};

#if FASTGEN_BF16_DOT
// Two vectors' numbers in turn.
INLINE f32v interleave(u16v even, u16v odd) {
    const __m512i both = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(__m256i(even)), __m256i(odd), 1);
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
        17, 1, 16, 0);
    return bits_of<f32v>(_mm512_maskz_permutexvar_epi16(0xffffffffu, order, both));
}

// Features d and d + 1 of a group's keys.
INLINE f32v keys_of(const Tile<T>& tile, int g, int64_t d) {
    const T* from = tile.k[g] + d * tile.k_stride;
    return interleave(load<u16v>(from), load<u16v>(from + tile.k_stride));
}
INLINE f32v keys_of(const Tile<Brought>& tile, int g, int64_t d) {
    return load<f32v>(tile.k[g] + d / 2 * tile.k_stride);
}

// Features of a value from `first` on, zeros behind the last and where it is not `seen`; nothing else is touched.
INLINE u16v features_of(const T* value, int64_t first, bool seen) {
    if (!seen) return u16v{};
    if (DV % LANES == 0 || first + LANES <= DV) return load<u16v>(value + first);
    u16v some = {};
    std::memcpy(&some, value + first, DV % LANES * sizeof(T));
    return some;
}

// Whether key i of the tile is one that the task's rows may see.
template <class E>
INLINE bool is_seen(const Tile<E>& tile, int64_t i) {
    return i < tile.num_keys && (WINDOW == 0 || i >= tile.first_seen);
}

// Features from `first` on of values i and i + 1 of a group.
INLINE f32v values_of(const Tile<T>& tile, int g, int64_t i, int64_t first) {
    const T* from = tile.v[g] + i * tile.v_stride;
    return interleave(features_of(from, first, is_seen(tile, g * LANES + i)),
                      features_of(from + tile.v_stride, first, is_seen(tile, g * LANES + i + 1)));
}
INLINE f32v values_of(const Tile<Brought>& tile, int g, int64_t i, int64_t first) {
    return load<f32v>(tile.v[g] + i / 2 * tile.v_stride + first);
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

// Values from feature `first` on, zeros behind the last; nothing behind the last is touched.
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

// The tile of keys `first` to `end` at most. Keys behind `end` are others' or nobody's; values there are never read. The
// same is true of keys in front of all that the task's rows see: their block may have been given to another.
INLINE Place find(const Batch& batch, const Task& task, int64_t head, int64_t first, int64_t end) {
    Place place;
    place.first = first;
    place.num_keys = std::min<int64_t>(TILE, end - first);
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t position = first + g * LANES < end ? first + g * LANES : first;
        const int64_t block = block_of(batch, task, position) * K + head;
        place.k[g] = batch.k_cache + block * D * P + position % P;
        if (!VALUES_IN_KEYS) place.v[g] = batch.v_cache + (block * P + position % P) * DV;
    }
    return place;
}

INLINE int64_t first_seen(const Task& task, const Place& place) {
    return WINDOW == 0 ? 0 : std::max<int64_t>(0, task.first_key(0) - place.first);
}

INLINE Tile<T> in_place(const Task& task, const Place& place) {
    Tile<T> tile{place.first, place.num_keys, first_seen(task, place), P, DV, {}, {}};
    std::memcpy(tile.k, place.k, sizeof tile.k);
    std::memcpy(tile.v, place.v, sizeof tile.v);
    return tile;
}

Tile<Brought> bring_together(const Batch& batch, const Task& task, int64_t head, const Place& place, Buffers& buffers) {
    Tile<Brought> tile{place.first, place.num_keys, first_seen(task, place), TILE, DV_LANES, {}, {}};
    for (int g = 0; g < GROUPS; ++g) {
        tile.k[g] = buffers.k + g * LANES;
        tile.v[g] = buffers.v + g * LANES / STEP * DV_LANES;
    }
#if FASTGEN_BF16_DOT
    Tile<T> stored = in_place(task, place);
    for (int64_t d = 0; WHOLE_VECTORS && d < D; d += 2) {
        for (int g = 0; g < GROUPS; ++g) store(buffers.k + d / 2 * TILE + g * LANES, keys_of(stored, g, d));
    }
    const T* value[2] = {};
    for (int64_t i = 0; i < place.num_keys; ++i) {
        const int64_t position = place.first + i, block = block_of(batch, task, position) * K + head;
        const T* key = batch.k_cache + block * D * P + position % P;
        for (int64_t d = 0; !WHOLE_VECTORS && d < D; ++d) {
            store(reinterpret_cast<T*>(buffers.k + d / 2 * TILE + i) + d % 2, key[d * P]);
        }
        value[i % 2] = batch.v_cache + (block * P + position % P) * DV;
        if (i % 2 == 0 && i + 1 < place.num_keys) continue;
        for (int64_t d = 0; d < DV_LANES; d += LANES) {
            const int64_t even = i / 2 * 2;
            store(buffers.v + i / 2 * DV_LANES + d, interleave(features_of(value[0], d, is_seen(tile, even)),
                                                               features_of(value[1], d, is_seen(tile, even + 1))));
        }
    }
#else
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
#endif
    return tile;
}

// Asks for `count` numbers of the cache.
INLINE void ask_for(const T* address, int count) {
    for (int i = 0; i < count; i += 64 / sizeof(T)) prefetch(address + i);
}

}  // namespace

namespace {

// What some keys come to for a row: `best` the largest logarithm, to base 2, of a weight; `total`, lane by lane, the
// sum of 2^(logarithm - best); `mixed` the sum of 2^(logarithm - best) * value.
struct State {
    float best;
    f32v total;
    float mixed[DV_LANES];

    void clear() {
        best = -INFINITE;
        total = f32v{};
        std::memset(mixed, 0, sizeof mixed);
    }
};

struct Scratch {
    alignas(64) float q[MAX_TASK_ROWS][D];  // as states: row r of head h of the task is h * num_rows + r
    State all[MAX_TASK_ROWS], segment[MAX_TASK_ROWS];
    alignas(64) float weights[MAX_TASK_ROWS][TILE];  // dot products at first; in the end pairs with BF16_DOT
    float keep[MAX_TASK_ROWS + LANES];
    Buffers buffers;
};

// This thread's. Called once for a piece: where the compiler sees that it is the thread's it asks for the address again
// and again, in the innermost loops.
__attribute__((noinline)) Scratch& own_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

// 2 to the x, for x <= 0; exactly 0 from -127 down. x = n + f with |f| <= 1/2; a polynomial for 2 to the f, the one of
// its degree that is nearest relative to it (within 1e-7), and n into the exponent.
INLINE f32v power_of_2(f32v x) {
    const f32v within = larger(all_lanes(-127.0f), x);  // x where it is no number
    // Adding 1.5 * 2^23 leaves the nearest whole number, in the low bits.
    const f32v shifted = within + all_lanes(12582912.0f);
    const f32v f = within - (shifted - all_lanes(12582912.0f));
    f32v p = all_lanes(1.3264727253e-3f);
    p = fma(p, f, all_lanes(9.6715127859e-3f));
    p = fma(p, f, all_lanes(5.5507337445e-2f));
    p = fma(p, f, all_lanes(2.4022242083e-1f));
    p = fma(p, f, all_lanes(6.9314697760e-1f));
    p = fma(p, f, all_lanes(1.0f));
    return bits_of<f32v>(bits_of<u32v>(p) + (bits_of<u32v>(shifted) << 23));
}

// To subtract from logarithms: where all is masked so far, weights are 2 to the minus infinity.
INLINE float finite(float best) { return best == -INFINITE ? 0.0f : best; }

INLINE f32v to_bf16(f32v x) {  // to the nearest, ties to even
    const u32v bits = bits_of<u32v>(x);
    return bits_of<f32v>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// a * b + sum, or with BF16_DOT the sum of the two products of each lane.
INLINE f32v multiply_add(f32v a, f32v b, f32v sum) {
#if FASTGEN_BF16_DOT
    return dot2(a, b, sum);
#else
    return fma(a, b, sum);
#endif
}

// Dot products of R queries with the keys of a tile's first C vectors. Meanwhile the next tile's keys are asked for.
template <int R, int C, class E>
void dot(const float (*q)[D], const Tile<E>& tile, const Place* next, float (*products)[TILE]) {
    f32v sum[R][C] = {};
    for (int64_t d = 0; d < D; d += STEP) {
        f32v keys[C];
        for (int c = 0; c < C; ++c) keys[c] = keys_of(tile, c, d);
        for (int64_t asked = d; asked < d + STEP; ++asked) {
            if (!next || (asked * P * sizeof(T)) % 64 >= P * sizeof(T)) continue;
            for (int g = 0; g < GROUPS; ++g) prefetch(next->k[g] + asked * P);
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(all_lanes(q[r][d / STEP]), keys[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(products[r] + c * LANES, sum[r][c]);
    }
}

// Whether dot products become scores by more than the scale, which else is part of LOG2_OF_SCORE.
constexpr bool IS_ADJUSTED = ALIBI != NONE || SOFTCAP != 0;
constexpr double LOG2_E = 1.4426950408889634;
// Times a score this is a weight's logarithm to base 2.
constexpr float LOG2_OF_SCORE = IS_ADJUSTED ? LOG2_E : SCALE * LOG2_E;

// From dot products of one row to scores: scale, bias and cap where there are any, and a mask.
INLINE void finish_scores(const Batch& batch, const Task& task, int64_t head, int64_t r, int64_t first_key,
                          float* scores) {
    for (int g = 0; IS_ADJUSTED && g < GROUPS; ++g) {
        f32v score = load<f32v>(scores + g * LANES);
        if constexpr (ALIBI == NONE) {
            score = score * all_lanes(float(SCALE));
        } else {
            const f32v position = to_float(LANE + int32_t(first_key + g * LANES));
            const f32v slope = all_lanes(batch.slopes[task.query_head(head, r)]);
            const f32v bias = ALIBI_IN_BF16 ? to_bf16(slope * to_bf16(position)) : slope * position;
            score = ALIBI == SCALED ? (score + bias) * all_lanes(float(SCALE)) : score * all_lanes(float(SCALE)) + bias;
        }
        if constexpr (SOFTCAP != 0) {
            score = all_lanes(float(SOFTCAP)) * tanh(score / all_lanes(float(SOFTCAP)));
        }
        store(scores + g * LANES, score);
    }
    const int64_t last = task.position(r), first = task.first_key(r);
    if (first_key + TILE <= last + 1 && first_key >= first) return;
    for (int g = 0; g < GROUPS; ++g) {
        const i32v position = LANE + int32_t(first_key + g * LANES);
        const i32v seen = (position <= all_lanes(int32_t(last))) & (position >= all_lanes(int32_t(first)));
        store(scores + g * LANES, select(seen, load<f32v>(scores + g * LANES), all_lanes(-INFINITE)));
    }
}

// From dot products of `count` rows of a head, from row r0 of the task on, to weights, and to factors `keep` for what
// the states held so far.
INLINE void weigh(const Batch& batch, const Task& task, int64_t head, int64_t r0, int64_t count, int64_t first_key,
                  float (*weights)[TILE], float* keep, State* states) {
    float before[LANES] = {}, origin[LANES] = {};
    for (int64_t r = 0; r < count; ++r) {
        finish_scores(batch, task, head, r0 + r, first_key, weights[r]);
        f32v best = load<f32v>(weights[r]);
        for (int g = 1; g < GROUPS; ++g) best = larger(best, load<f32v>(weights[r] + g * LANES));
        before[r] = states[r].best;
        states[r].best = std::max(before[r], largest_of(best) * LOG2_OF_SCORE);
        origin[r] = finite(states[r].best);
    }
    store(keep, power_of_2(load<f32v>(before) - load<f32v>(origin)));
    for (int64_t r = 0; r < count; ++r) {
        f32v sum = {};
        for (int g = 0; g < GROUPS; ++g) {
            const f32v score = load<f32v>(weights[r] + g * LANES);
            const f32v weight = power_of_2(fma(score, all_lanes(LOG2_OF_SCORE), all_lanes(-origin[r])));
#if FASTGEN_BF16_DOT
            const u16v rounded = narrow_to_bf16(weight);
            store(weights[r] + g * LANES / 2, rounded);  // over the scores of groups that have been read
            sum += widen_bf16(rounded);  // so that values that are all alike stay what they are
#else
            store(weights[r] + g * LANES, weight);
            sum += weight;
#endif
        }
        states[r].total = states[r].total * all_lanes(keep[r]) + sum;
    }
}

// state.mixed = state.mixed * keep + weights * values, for C vectors of features of R rows. The values of all groups of
// keys are read side by side, as memory likes it; meanwhile the next tile's are asked for.
template <int R, int C, class E>
INLINE void mix_some(const float (*weights)[TILE], const float* keep, const Tile<E>& tile, const Place* next,
                     int64_t first, State* states) {
    f32v sum[R][C];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) sum[r][c] = load<f32v>(states[r].mixed + first + c * LANES) * all_lanes(keep[r]);
    }
    for (int64_t i = 0; i < LANES; i += STEP) {
        for (int g = 0; g < GROUPS; ++g) {
            if (g * LANES + i >= tile.num_keys) break;
            // 0 times what is no number would be none.
            if (WINDOW > 0 && g * LANES + i + STEP <= tile.first_seen) continue;
            f32v values[C];
            for (int c = 0; c < C; ++c) values[c] = values_of(tile, g, i, first + c * LANES);
            for (int64_t asked = i; !VALUES_IN_KEYS && next && asked < i + STEP; ++asked) {
                ask_for(next->v[g] + asked * DV + first, C * LANES);
            }
            for (int r = 0; r < R; ++r) {
                const f32v weight = all_lanes(weights[r][(g * LANES + i) / STEP]);
                for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(weight, values[c], sum[r][c]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(states[r].mixed + first + c * LANES, sum[r][c]);
    }
}

// For all features, in as few passes over the values as there are registers for.
template <int R, class E>
void mix(const float (*weights)[TILE], const float* keep, const Tile<E>& tile, const Place* next, State* states) {
    constexpr int MOST = GROUPS * MAX_ROWS / R, PASSES = (DV_VECTORS + MOST - 1) / MOST;
    constexpr int C = (DV_VECTORS + PASSES - 1) / PASSES, REST = DV_VECTORS - (PASSES - 1) * C;
    for (int pass = 0; pass < PASSES - 1; ++pass) mix_some<R, C>(weights, keep, tile, next, pass * C * LANES, states);
    mix_some<R, REST>(weights, keep, tile, next, (PASSES - 1) * C * LANES, states);
}

// Calls run(R) with a number of rows as a type.
template <int R = MAX_ROWS, class Run>
INLINE void with_rows(int64_t num_rows, Run&& run) {
    if (num_rows == R) return run(std::integral_constant<int, R>());
    if constexpr (R > 1) with_rows<R - 1>(num_rows, run);
}

// Calls visit(R, first row) for each part of the rows that sees some of a tile's keys, the first of which is given.
template <class Visit>
INLINE void visit_rows(const Task& task, int64_t first_key, Visit&& visit) {
    const int64_t num_parts = task.num_parts();
    for (int64_t part = 0, row = 0, end; part < num_parts; ++part, row = end) {
        end = task.num_rows * (part + 1) / num_parts;
        if (first_key > task.position(end - 1) || first_key + TILE <= task.first_key(row)) continue;
        with_rows(end - row, [&](auto R) { visit(R, row); });
    }
}

// Folds a tile into the states of all rows of a head: dot products, then weights, then sums of values, so that first
// the keys and then the values stay in the first cache while parts of the rows go by. The first asks for the next tile.
template <class E>
void attend_all(const Batch& batch, const Task& task, int64_t head, const float (*q)[D], const Tile<E>& tile,
                const Place* next, Scratch& scratch, State* states) {
    const Place* asked = next;
    visit_rows(task, tile.first, [&](auto R, int64_t row) {
        if (tile.num_keys <= LANES) {
            dot<R, 1>(q + row, tile, asked, scratch.weights + row);
        } else {
            dot<R, GROUPS>(q + row, tile, asked, scratch.weights + row);
        }
        asked = nullptr;
    });
    for (int64_t row = 0; row < task.num_rows; row += LANES) {
        const int64_t count = std::min<int64_t>(LANES, task.num_rows - row);
        weigh(batch, task, head, row, count, tile.first, scratch.weights + row, scratch.keep + row, states + row);
    }
    asked = next;
    visit_rows(task, tile.first, [&](auto R, int64_t row) {
        mix<R>(scratch.weights + row, scratch.keep + row, tile, asked, states + row);
        asked = nullptr;
    });
}

void attend_tile(const Batch& batch, const Task& task, int64_t head, const float (*q)[D], const Place& here,
                 const Place& next, Scratch& scratch, State* states) {
    const Place* asked = WHOLE_VECTORS ? &next : nullptr;
    constexpr bool IS_FLOAT = std::is_same_v<T, float>;
    if constexpr (CAN_USE_IN_PLACE) {
        if (IS_FLOAT || task.num_parts() <= 2) {
            return attend_all(batch, task, head, q, in_place(task, here), asked, scratch, states);
        }
    }
    if constexpr (!CAN_USE_IN_PLACE || !IS_FLOAT) {
        const Tile<Brought> tile = bring_together(batch, task, head, here, scratch.buffers);
        attend_all(batch, task, head, q, tile, asked, scratch, states);
    }
}

}  // namespace

namespace {

void load_queries(const Batch& batch, const Task& task, Scratch& scratch) {
    const float* first = batch.q + batch.cu_seqlens_q[task.sequence] * batch.q_stride;
    for (int64_t i = 0; i < task.size(); ++i) {
        const int64_t head = task.first_head + i / task.num_rows, r = i % task.num_rows;
        const float* q = first + task.token(r) * batch.q_stride + task.query_head(head, r) * D;
#if FASTGEN_BF16_DOT
        narrow_to_bf16(q, D, scratch.q[i]);
#else
        std::memcpy(scratch.q[i], q, D * sizeof(float));
#endif
    }
}

void write_out(const Batch& batch, const Task& task, const State* states) {
    float* first = batch.out + batch.cu_seqlens_q[task.sequence] * N * DV;
    for (int64_t i = 0; i < task.size(); ++i) {
        const int64_t head = task.first_head + i / task.num_rows, r = i % task.num_rows;
        float* out = first + (task.token(r) * N + task.query_head(head, r)) * DV;
        const float total = sum_of(states[i].total);
        for (int64_t d = 0; d < DV; ++d) out[d] = states[i].mixed[d] / total;
    }
}

// Where a segment of a task's keys begins.
int64_t first_of(const Task& task, int64_t segment) {
    return std::max(segment * SEGMENT, task.first_key(0) / TILE * TILE);
}

Place first_place(const Batch& batch, const Task& task, int64_t segment) {
    return find(batch, task, task.first_head, first_of(task, segment), task.end());
}

// One segment of a task's keys. A tile's heads come one after the other, since they lie side by side in its blocks:
// memory is read fastest in long pieces. Meanwhile what comes next is asked for, and in the end what comes `after`.
void attend_segment(const Batch& batch, const Task& task, int64_t segment, const Place& after, Scratch& scratch,
                    State* states) {
    for (int64_t i = 0; i < task.size(); ++i) states[i].clear();
    const int64_t end = std::min((segment + 1) * SEGMENT, task.end());
    int64_t first = first_of(task, segment), head = 0;
    for (Place here = first_place(batch, task, segment), next; first < end; here = next) {
        int64_t next_first = first, next_head = head + 1;
        if (next_head == task.num_heads) next_head = 0, next_first += TILE;
        next = next_first < end ? find(batch, task, task.first_head + next_head, next_first, end) : after;
        const int64_t state = head * task.num_rows;
        attend_tile(batch, task, task.first_head + head, scratch.q + state, here, next, scratch, states + state);
        first = next_first;
        head = next_head;
    }
}

// Folds a segment's states into those of all before it.
void fold(State* all, const State* segment, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const float best = std::max(all[r].best, segment[r].best), origin = finite(best);
        const f32v keep = power_of_2(all_lanes(all[r].best - origin));
        const f32v add = power_of_2(all_lanes(segment[r].best - origin));
        all[r].best = best;
        all[r].total = all[r].total * keep + segment[r].total * add;
        for (int d = 0; d < DV_LANES; d += LANES) {
            const f32v mixed = load<f32v>(all[r].mixed + d) * keep + load<f32v>(segment[r].mixed + d) * add;
            store(all[r].mixed + d, mixed);
        }
    }
}

void run_task(const Batch& batch, const Task& task, const Place& after, Scratch& scratch) {
    load_queries(batch, task, scratch);
    const int64_t first = task.first_segment(), end = first + task.num_segments();
    for (int64_t segment = first; segment < end; ++segment) {
        const Place next = segment + 1 < end ? first_place(batch, task, segment + 1) : after;
        attend_segment(batch, task, segment, next, scratch, segment == first ? scratch.all : scratch.segment);
        if (segment > first) fold(scratch.all, scratch.segment, task.size());
    }
    write_out(batch, task, scratch.all);
}

// One piece of work for the pool: a whole task from its first segment on, or one segment, whose states go into the
// workspace from first_state on.
struct Piece {
    int64_t task, segment, first_state;
};

void run(const Batch& batch, const Task& task, const Piece& piece, State* workspace, const Place& after) {
    Scratch& scratch = own_scratch();
    if (piece.first_state < 0) return run_task(batch, task, after, scratch);
    load_queries(batch, task, scratch);
    attend_segment(batch, task, piece.segment, after, scratch, workspace + piece.first_state);
}

// Calls visit(first, count) for the fewest parts of at most `most` of n things, as even as can be.
template <class Visit>
void visit_parts(int64_t n, int64_t most, Visit&& visit) {
    const int64_t num_parts = (n + most - 1) / most;
    for (int64_t i = 0; i < num_parts; ++i) visit(n * i / num_parts, n * (i + 1) / num_parts - n * i / num_parts);
}

}  // namespace

extern "C" void attention_n4_k1_d160_dv128_p16_bf16_v_in_k_scale0_125_avx512bf16(
    const float* __restrict q,
    const bf16* __restrict k_cache,
    const int32_t* __restrict block_tables,
    const int32_t* __restrict cu_seqlens_q,
    const int32_t* __restrict seq_lens,
    float* __restrict out,
    int64_t num_seqs,
    int64_t num_tokens,
    int64_t max_blocks,
    int64_t q_stride) {
    const Batch batch = {q, k_cache, nullptr, block_tables, cu_seqlens_q, seq_lens,
                         nullptr, out, max_blocks, q_stride};
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<Piece> pieces;
    static thread_local std::vector<State> states;
    tasks.clear();
    pieces.clear();

    // As many rows of a sequence as a task has room for, of all heads.
    const auto visit_tasks = [&](auto visit) {
        for (int64_t s = 0; s < num_seqs; ++s) {
            const int64_t num_new = cu_seqlens_q[s + 1] - cu_seqlens_q[s];
            visit_parts(num_new * G, MAX_TASK_ROWS, [&](int64_t row, int64_t num_rows) {
                visit(Task{s, num_new, seq_lens[s], row, num_rows, 0, K, -1});
            });
        }
    };
    int64_t work = 0;  // segments of a head
    visit_tasks([&](const Task& task) { work += task.num_segments() * K; });
    // A piece is as many heads as there is room for and as leave enough pieces for all threads, and all segments; or
    // one segment, where all would keep one thread busy when the others are done.
    const int64_t fair = std::max<int64_t>(1, work / (4 * fastgen_num_threads()));
    int64_t num_states = 0;
    visit_tasks([&](Task task) {
        visit_parts(K, std::min<int64_t>(fair, MAX_TASK_ROWS / task.num_rows), [&](int64_t head, int64_t num_heads) {
            task.first_head = head;
            task.num_heads = num_heads;
            const int64_t index = tasks.size(), first = task.first_segment(), num_segments = task.num_segments();
            const bool is_shared = num_segments > 1 && num_segments * num_heads > fair;
            task.first_state = is_shared ? num_states : -1;
            for (int64_t i = 0; i < (is_shared ? num_segments : 1); ++i) {
                pieces.push_back({index, first + i, is_shared ? num_states : -1});
                if (is_shared) num_states += task.size();
            }
            tasks.push_back(task);
        });
    });
    if (int64_t(states.size()) < num_states) states.resize(num_states);
    const Task* task_of = tasks.data();
    const Piece* piece_of = pieces.data();
    State* state_of = states.data();
    const int64_t num_pieces = pieces.size();
    // Most often a thread goes on with the next piece; the last has none, and asks once more for its own beginning.
    parallel_for(num_pieces, [&batch, task_of, piece_of, state_of, num_pieces](int64_t index) {
        const Piece &piece = piece_of[index], &next = piece_of[std::min(index + 1, num_pieces - 1)];
        run(batch, task_of[piece.task], piece, state_of, first_place(batch, task_of[next.task], next.segment));
    });
    for (const Task& task : tasks) {
        if (task.first_state < 0) continue;
        State* all = state_of + task.first_state;
        for (int64_t i = 1; i < task.num_segments(); ++i) fold(all, all + i * task.size(), task.size());
        write_out(batch, task, all);
    }
    const int64_t num_used = cu_seqlens_q[num_seqs];
    std::memset(out + num_used * N * DV, 0, (num_tokens - num_used) * N * DV * sizeof(float));
}

// The same for a tape, whose argument blocks have 8 bytes for each.
extern "C" void attention_n4_k1_d160_dv128_p16_bf16_v_in_k_scale0_125_avx512bf16_from_slots(const int64_t* slots) {
    attention_n4_k1_d160_dv128_p16_bf16_v_in_k_scale0_125_avx512bf16(
        reinterpret_cast<const float*>(slots[0]), 
        reinterpret_cast<const bf16*>(slots[1]), 
        reinterpret_cast<const int32_t*>(slots[2]), 
        reinterpret_cast<const int32_t*>(slots[3]), 
        reinterpret_cast<const int32_t*>(slots[4]), 
        reinterpret_cast<float*>(slots[5]), 
        int64_t(slots[6]), 
        int64_t(slots[7]), 
        int64_t(slots[8]), 
        int64_t(slots[9])
    );
}
