// sampling(slice=32768, max_slices=64, arch=portable, not_finite=1, nothing_left=2) for cpp

#define FASTGEN_LANES 4
#define FASTGEN_HAS_DOT4 0  // sums of four products of bytes
#define FASTGEN_HAS_BF16_DOT 0  // sums of two products of bf16
#define FASTGEN_SLICE 32768
#define FASTGEN_MAX_SLICES 64
#define FASTGEN_NOT_FINITE 1
#define FASTGEN_NOTHING_LEFT 2
// A token for each row of logits.
//
//   scan    is the row sound; its largest score                 all that a greedy row takes, in one read
//   adjust  a copy, where lists or a mask say so; scanned again
//   cut     the lowest score that top-k and top-p keep          by parting a list around pivots; nothing is sorted
//   draw    the largest of score and noise, of what is kept     noise only where it can still win
//
// Threads take rows; or the slices of a row, where there are few rows. What slices found is put together in their
// order, so that no result depends on which it was, or on other rows.
#include <atomic>

// Which scores top-k and top-p keep, without sorting.
// Random numbers that depend on a counter alone, and Gumbel noise of them.
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

typedef uint64_t u64v __attribute__((vector_size(4 * LANES)));

// x > 0 and normal: x = 2^n m with m around 1, and a polynomial (Cephes).
INLINE f32v log(f32v x) {
    const i32v bits = bits_of<i32v>(x);
    f32v m = bits_of<f32v>((bits & 0x7fffff) | 0x3f000000);  // 0.5 to 1
    f32v n = to_float((bits >> 23) - 126);
    const i32v is_low = m < all_lanes(0.707106781f);
    n = select(is_low, n - all_lanes(1.0f), n);
    m = select(is_low, m + m, m) - all_lanes(1.0f);
    const f32v square = m * m;
    f32v p = all_lanes(7.0376836292e-2f);
    p = fma(p, m, all_lanes(-1.1514610310e-1f));
    p = fma(p, m, all_lanes(1.1676998740e-1f));
    p = fma(p, m, all_lanes(-1.2420140846e-1f));
    p = fma(p, m, all_lanes(1.4249322787e-1f));
    p = fma(p, m, all_lanes(-1.6668057665e-1f));
    p = fma(p, m, all_lanes(2.0000714765e-1f));
    p = fma(p, m, all_lanes(-2.4999993993e-1f));
    p = fma(p, m, all_lanes(3.3333331174e-1f)) * m * square;
    p = fma(n, all_lanes(-2.12194440e-4f), p);
    p = fma(square, all_lanes(-0.5f), p);
    return fma(n, all_lanes(0.693359375f), m + p);
}

// Of each even-numbered 32-bit lane the whole product with a number.
INLINE u64v product_of_even(u32v a, uint32_t b) {
#if FASTGEN_LANES == 16
    return u64v(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi32(int32_t(b))));
#elif FASTGEN_LANES == 8
    return u64v(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi32(int32_t(b))));
#else
    return (u64v(a) & 0xffffffffu) * uint64_t(b);
#endif
}
INLINE void multiply(u32v a, uint32_t b, u32v& upper, u32v& lower) {
    const u64v even = product_of_even(a, b), odd = product_of_even(u32v(u64v(a) >> 32), b);
    upper = u32v((even >> 32) | (odd & 0xffffffff00000000u));
    lower = u32v((even & 0xffffffffu) | (odd << 32));
}

// The lower or the upper halves of two vectors, lane by lane in turn.
template <int FIRST>
INLINE u32v interleave_from(u32v a, u32v b) {
#define SOURCE_LANE(lane) (lane % 2 * LANES + FIRST + lane / 2)
#if defined(__clang__)
    return __builtin_shufflevector(a, b, EACH_LANE(SOURCE_LANE));
#else
    return __builtin_shuffle(a, b, u32v{EACH_LANE(SOURCE_LANE)});
#endif
#undef SOURCE_LANE
}
INLINE u32v interleave_lower(u32v a, u32v b) { return interleave_from<0>(a, b); }
INLINE u32v interleave_upper(u32v a, u32v b) { return interleave_from<LANES / 2>(a, b); }

namespace {

// The random words of one drawn token: Philox4x32-10 with the seed as key and (id / 4, position, sequence index, 0) as
// counter, whose lane id % 4 belongs to the id.
struct Stream {
    uint64_t seed;
    uint32_t position, sequence_index;

    // Gumbel noise -log(-log u) for the ids from 4 * quad on, u being the upper 23 bits of a word, centred.
    void gumbel(int64_t quad, f32v noise[4]) const {
        u32v c0 = u32v(LANE) + uint32_t(quad), c1 = u32v{} + position, c2 = u32v{} + sequence_index, c3 = {};
        uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
        for (int round = 0; round < 10; ++round) {
            u32v upper0, lower0, upper1, lower1;
            multiply(c0, 0xD2511F53u, upper0, lower0);
            multiply(c2, 0xCD9E8D57u, upper1, lower1);
            c0 = upper1 ^ c1 ^ key0;
            c2 = upper0 ^ c3 ^ key1;
            c1 = lower1;
            c3 = lower0;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        const u32v even[2] = {interleave_lower(c0, c2), interleave_upper(c0, c2)};
        const u32v odd[2] = {interleave_lower(c1, c3), interleave_upper(c1, c3)};
        for (int j = 0; j < 4; ++j) {
            const u32v a = even[j / 2], b = odd[j / 2];
            const u32v word = j % 2 ? interleave_upper(a, b) : interleave_lower(a, b);
            const f32v u = (to_float(i32v(word >> 9)) + all_lanes(0.5f)) * all_lanes(0x1p-23f);
            noise[j] = -log(-log(u));
        }
    }
};

}  // namespace
// A row of scores, looked at by groups of vectors and by slices.
#include <algorithm>
#include <cmath>

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

#ifndef FASTGEN_SLICE  // as an editor reads this file
#define FASTGEN_SLICE 32768
#define FASTGEN_MAX_SLICES 64
#endif
constexpr int64_t SLICE = FASTGEN_SLICE;  // tokens; a whole number of BLOCKs
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
    double whole = 0;
    int num_added = 0;
    ALWAYS_INLINE void add(f32v x) {
        part += x;
        if (++num_added == 32) total();
    }
    ALWAYS_INLINE double total() {
        whole += sum_of(part);
        part = f32v{};
        num_added = 0;
        return whole;
    }
};

// What a step finds out about a slice.
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
    float *adjusted, *list, *spare, *maxima;  // workspaces
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

namespace {

// From a score to what filters compare: divided by the temperature. Only where that would overflow it is taken relative
// to the largest, which costs a rounding. It never falls as the score rises.
struct Tempered {
    float temperature, shift;
    Tempered(float given, float peak) : temperature(given), shift(std::isinf(peak / given) ? peak : 0.0f) {}
    template <class Number>
    ALWAYS_INLINE Number operator()(Number score) const { return (score - shift) / temperature + 0.0f; }  // never -0
    float inverse(float y) const { return y * temperature + shift; }
};

// From a logit to its log-probability.
struct LogProbability {
    float peak, log_sum;
    template <class Number>
    ALWAYS_INLINE Number operator()(Number logit) const { return (logit - peak) - log_sum + 0.0f; }
    float inverse(float y) const { return (y + log_sum) + peak; }
};

// A score that comes out below y, and so do all that are smaller; not far below.
template <class Function>
float floor_of(const Function& function, float y) {
    const float about = function.inverse(y), slack = 1e-5f * (std::fabs(about) + std::fabs(function.inverse(0)));
    return function(about - slack) < y ? about - slack : -INFINITE;
}

// Appends those lanes of x that are kept; may write a whole vector.
INLINE float* append(float* to, f32v x, i32v is_kept) {
#if FASTGEN_LANES == 16
    const __mmask16 mask = _mm512_movepi32_mask(__m512i(is_kept));
    store(to, f32v(_mm512_maskz_compress_ps(mask, x)));
    return to + __builtin_popcount(mask);
#else
    float all[LANES];
    store(all, x);
    for (int lane = 0; lane < LANES; ++lane) {
        *to = all[lane];
        to -= is_kept[lane];
    }
    return to;
#endif
}

INLINE i32v lanes_below(int64_t count) { return LANE < all_lanes(int32_t(std::min(count, int64_t(LANES)))); }

// An integer that orders as numbers do, and back.
INLINE int32_t key_of(float x) {
    const int32_t bits = bits_of<int32_t>(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
INLINE float number_of(int32_t key) { return bits_of<float>(key < 0 ? key ^ 0x7fffffff : key); }

// To row.list go the row's values from `limit` on, in no order that matters; returns how many. Where they are `WEIGHED`,
// *below is what the others weigh: e to their distance from `peak`.
template <bool WEIGHED, class Function>
int64_t gather(Row& row, const Function& function, float limit, float peak = 0, double* below = nullptr) {
    const float floor = WEIGHED ? -INFINITE : floor_of(function, limit);
    row.for_slices([&, floor](Slice& slice, const float* scores, int64_t count, int64_t first) {
        float *const begin = row.list + first + first / SLICE * GROUP, *end = begin;
        Sum others;
        for_groups(floor, scores, count, [&](const Group& group, int64_t) {
            for (int j = 0; j < 4; ++j) {
                const f32v y = function(group.part[j]);
                const i32v is_kept = y >= all_lanes(limit);
                end = append(end, y, is_kept);
                if (WEIGHED) others.add(select(is_kept, f32v{}, exp(y - all_lanes(peak))));
            }
        });
        slice.count = end - begin;
        slice.mass = others.total();
    });
    int64_t count = 0;
    for (int64_t i = 0; i < row.num_slices(); ++i) {
        std::memmove(row.list + count, row.list + i * (SLICE + GROUP), row.slices[i].count * sizeof(float));
        count += row.slices[i].count;
    }
    if (WEIGHED) *below = row.mass();
    return count;
}

struct Found {
    float value;
    int64_t count;  // of values equal to it
    double below;  // what those below it weigh
};

// Of row.list, below whose values others weigh `below`: the smallest value up to which all weighs more than `target`;
// the largest, where none does. The list is parted around a pivot, and on it goes with the part that holds what is
// looked for, until that holds equals only. Pivots lie midway between the part's ends, of numbers and of their bits in
// turn: the first is fast where numbers lie evenly, the second ends soon wherever they lie.
template <class Weigh>
Found find(Row& row, int64_t count, double below, double target, const Weigh& weigh) {
    float *list = row.list, *spare = row.spare;
    f32v most = all_lanes(-INFINITE), least = all_lanes(-INFINITE);  // its negative
    for (int64_t i = 0; i < count; i += LANES) {
        const f32v x = load<f32v>(list + i);
        most = select(lanes_below(count - i), larger(x, most), most);
        least = select(lanes_below(count - i), larger(-x, least), least);
    }
    float low = -largest_of(least), high = largest_of(most);
    for (int turn = 0; low < high; ++turn) {
        float pivot = low / 2 + high / 2;
        if (turn % 2 == 1) pivot = number_of(int32_t((int64_t(key_of(low)) + key_of(high)) >> 1));
        if (!(pivot >= low && pivot < high)) pivot = low;
        float *lower = list, *upper = spare;
        Sum sum;
        most = least = all_lanes(-INFINITE);
        for (int64_t i = 0; i < count; i += LANES) {
            const f32v x = load<f32v>(list + i);
            const i32v is_there = lanes_below(count - i), is_lower = (x <= all_lanes(pivot)) & is_there;
            const i32v is_upper = ~is_lower & is_there;
            sum.add(select(is_lower, weigh(x), f32v{}));
            most = select(is_lower, larger(x, most), most);
            least = select(is_upper, larger(-x, least), least);
            lower = append(lower, x, is_lower);
            upper = append(upper, x, is_upper);
        }
        const double up_to_pivot = below + sum.total();
        if (up_to_pivot > target) {
            count = lower - list;
            high = largest_of(most);
        } else {
            below = up_to_pivot;
            count = upper - spare;
            low = -largest_of(least);
            std::swap(list, spare);
        }
    }
    return {low, count, below};
}

// The num_best-th best value of the row that was scanned last; -inf where fewer are finite.
template <class Function>
float value_of_best(Row& row, const Function& function, int64_t num_best) {
    float bound = -LARGEST;
    const int64_t num_maxima = (row.size + BLOCK - 1) / BLOCK * LANES;
    if (num_best <= num_maxima) {  // as many scores are no smaller than that many maxima
        float *const nth = row.maxima + num_best - 1, *const end = row.maxima + num_maxima;
        std::nth_element(row.maxima, nth, end, [](float a, float b) { return a > b; });
        bound = std::max(function(*nth), bound);
    }
    const int64_t count = gather<false>(row, function, bound);
    if (count < num_best) return -INFINITE;
    return find(row, count, 0, double(count - num_best), [](f32v) { return all_lanes(1.0f); }).value;
}

// The lowest value that is kept, and of those equal to it the last id.
struct Cut {
    float value;
    int64_t id;
};

// By top-k (0: all) and top-p, which cuts off a `tail`; what lies more than `-least` below `peak` is cut anyway.
Cut cut(Row& row, const Tempered& tempered, float peak, int64_t top_k, float tail, float least) {
    Cut cut{-LARGEST, row.size};
    if (top_k > 0 && top_k < row.size) cut.value = std::max(value_of_best(row, tempered, top_k), cut.value);
    if (tail == 0) return cut;
    const auto weigh = [peak](f32v y) { return exp(y - all_lanes(peak)); };
    double below = 0;
    int64_t count;
    if (cut.value > -LARGEST) {
        count = gather<false>(row, tempered, cut.value);
    } else {
        // All that lie below the first of these bounds weigh less together than the tail.
        const float bound = std::max(std::log(tail / float(row.size)), least) - 0.01f;
        count = gather<true>(row, tempered, std::max(peak + bound, -LARGEST), peak, &below);
    }
    Sum listed;
    for (int64_t i = 0; i < count; i += LANES) {
        listed.add(select(lanes_below(count - i), weigh(load<f32v>(row.list + i)), f32v{}));
    }
    const double target = double(tail) * (below + listed.total());
    const Found found = find(row, count, below, target, weigh);
    cut.value = found.value;
    // Equals are cut off from the highest id on, as many as weigh no more than the target.
    const double fitting = (target - found.below) / weigh(all_lanes(found.value))[0];
    int64_t num_kept = found.count;
    if (fitting >= 1) num_kept -= std::min(found.count - 1, int64_t(std::min(fitting, double(found.count))));
    if (num_kept == found.count) return cut;
    for_groups(floor_of(tempered, cut.value), row.scores, row.size, [&](const Group& group, int64_t place) {
        for (int j = 0; j < 4; ++j) {
            const i32v is_equal = tempered(group.part[j]) == all_lanes(cut.value);
            for (int lane = 0; lane < LANES; ++lane) {
                if (is_equal[lane] && --num_kept == 0) cut.id = place + j * LANES + lane;
            }
        }
    });
    return cut;
}

}  // namespace

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

// Takes the scores of tokens whose bit is 0.
void forbid(float* scores, int64_t size, const int32_t* mask) {
    for (int64_t begin = 0; begin < size; begin += 32) {
        const uint32_t word = uint32_t(mask[begin / 32]);
        if (word == ~0u) continue;
        for (int64_t i = begin; i < std::min(begin + 32, size); ++i) {
            if ((word >> (i - begin) & 1) == 0) scores[i] = -INFINITE;
        }
    }
}

// A token, or minus what is wrong with the row.
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

// logits [num_rows][vocab_size], reals [num_rows][NUM_REALS], integers [num_rows][NUM_INTEGERS]: a row's uses, biases, mask and
// log-probabilities begin where its integers say; token_ids [num_rows]; workspaces [num_workspaces][workspace_size]
extern "C" void sampling_slice32768_max_slices64_portable_not_finite1_nothing_left2(
    const float* __restrict logits,
    const float* __restrict reals,
    const int64_t* __restrict integers,
    const int32_t* __restrict use_ids,
    const int32_t* __restrict uses,
    const int32_t* __restrict bias_ids,
    const float* __restrict biases,
    const int32_t* __restrict masks,
    int64_t* __restrict token_ids,
    float* __restrict logprobs,
    int64_t* __restrict top_ids,
    float* __restrict workspaces,
    int64_t num_rows,
    int64_t vocab_size,
    int64_t num_workspaces,
    int64_t workspace_size) {
    const int64_t num_slices = (vocab_size + SLICE - 1) / SLICE, num_threads = fastgen_num_threads();
    const bool by_rows = num_rows >= std::min(num_slices, num_threads);
    std::atomic<int64_t> next{0};
    parallel_for(by_rows ? std::min({num_rows, num_threads, num_workspaces}) : 1, [&](int64_t worker) {
        const int64_t room = vocab_size + num_slices * GROUP;
        float* const workspace = workspaces + worker * workspace_size;
        Row row;
        row.size = vocab_size;
        row.adjusted = workspace;
        row.list = workspace + room;
        row.spare = workspace + 2 * room;
        row.maxima = workspace + 3 * room;
        for (int64_t i; (i = next.fetch_add(1)) < num_rows;) {
            const int64_t* const of_row = integers + i * NUM_INTEGERS;
            row.scores = logits + i * vocab_size;
            token_ids[i] = choose(row, reals + i * NUM_REALS, of_row, use_ids, uses, bias_ids, biases, masks);
            if (token_ids[i] < 0 || of_row[NUM_TOP] < 0) continue;
            row.scores = logits + i * vocab_size;
            const int64_t first = of_row[FIRST_LOGPROB];
            log_probabilities(row, token_ids[i], of_row[NUM_TOP], logprobs + first, top_ids + first);
        }
    });
}

// The same for a tape, whose argument blocks have 8 bytes for each.
extern "C" void sampling_slice32768_max_slices64_portable_not_finite1_nothing_left2_from_slots(const int64_t* slots) {
    sampling_slice32768_max_slices64_portable_not_finite1_nothing_left2(
        reinterpret_cast<const float*>(slots[0]), 
        reinterpret_cast<const float*>(slots[1]), 
        reinterpret_cast<const int64_t*>(slots[2]), 
        reinterpret_cast<const int32_t*>(slots[3]), 
        reinterpret_cast<const int32_t*>(slots[4]), 
        reinterpret_cast<const int32_t*>(slots[5]), 
        reinterpret_cast<const float*>(slots[6]), 
        reinterpret_cast<const int32_t*>(slots[7]), 
        reinterpret_cast<int64_t*>(slots[8]), 
        reinterpret_cast<float*>(slots[9]), 
        reinterpret_cast<int64_t*>(slots[10]), 
        reinterpret_cast<float*>(slots[11]), 
        int64_t(slots[12]), 
        int64_t(slots[13]), 
        int64_t(slots[14]), 
        int64_t(slots[15])
    );
}
