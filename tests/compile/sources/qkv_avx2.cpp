// qkv(N=4, K=4, D=64, P=16, dtype=bf16, R=64, interleaved=False, arch=avx2) for cpp
// llama on avx2, weights in bf16
// qkv: out fp32
// cos_sin: in fp32
// positions: in i32
// k_cache: out bf16
// v_cache: out bf16
// slots: in i64
// num_tokens: scalar i64

#define FASTGEN_LANES 8
#define FASTGEN_HAS_DOT4 0  // sums of four products of bytes
#define FASTGEN_HAS_BF16_DOT 0  // sums of two products of bf16
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
// What kernels between projections and attention do to heads in fp32.
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

enum NormKind { RMS, LAYER };

// A norm of COUNT heads of LENGTH features that lie side by side, with `weight` and `bias` where it has them: LENGTH
// numbers, or LENGTH for each head.
template <NormKind KIND, int64_t COUNT, int64_t LENGTH, bool PER_HEAD, bool HAS_WEIGHT, bool HAS_BIAS, bool HAS_OFFSET>
static void norm_heads(float* x, const float* weight, const float* bias, float eps, float offset) {
    for (int64_t head = 0; head < COUNT; ++head, x += LENGTH) {
        f32v sum = {};
        float mean = 0;
        if (KIND == LAYER) {
            for (int64_t i = 0; i < LENGTH; i += LANES) sum += load_some(x + i, LENGTH - i);
            mean = sum_of(sum) / LENGTH;
            sum = f32v{};
        }
        for (int64_t i = 0; i < LENGTH; i += LANES) {
            const f32v centred = load_some(x + i, LENGTH - i) - all_lanes(mean);
            float counted[LANES];
            store(counted, centred);
            for (int64_t lane = LENGTH - i; lane < LANES; ++lane) counted[lane] = 0;
            sum = fma(load<f32v>(counted), load<f32v>(counted), sum);
        }
        const float inverse = 1 / __builtin_sqrtf(sum_of(sum) / LENGTH + eps);
        const int64_t first = PER_HEAD ? head * LENGTH : 0;
        for (int64_t i = 0; i < LENGTH; i += LANES) {
            f32v value = (load_some(x + i, LENGTH - i) - all_lanes(mean)) * all_lanes(inverse);
            if (HAS_WEIGHT) {
                f32v factor = load_some(weight + first + i, LENGTH - i);
                if (HAS_OFFSET) factor += all_lanes(offset);
                value *= factor;
            }
            if (HAS_BIAS) value += load_some(bias + first + i, LENGTH - i);
            store_some(x + i, value, LENGTH - i);
        }
    }
}

// Rotates the first SIZE features of heads that lie `stride` apart. Pair i is 2i and 2i + 1 where pairs are INTERLEAVED,
// else i and i + SIZE / 2. `cos_sin` are SIZE / 2 cosines, then as many sines.
template <int64_t SIZE, bool INTERLEAVED>
static void rotate(float* x, int64_t num_heads, int64_t stride, const float* cos_sin) {
    constexpr int64_t PAIRS = SIZE / 2;
    for (int64_t head = 0; head < num_heads; ++head, x += stride) {
        for (int64_t i = 0; i < PAIRS; ++i) {
            float &first = x[INTERLEAVED ? 2 * i : i], &second = x[INTERLEAVED ? 2 * i + 1 : i + PAIRS];
            const float cos = cos_sin[i], sin = cos_sin[i + PAIRS];
            const float turned = first * cos - second * sin;
            second = second * cos + first * sin;
            first = turned;
        }
    }
}

// What happens between the projection to queries, keys and values and attention: rotation, and keys
// and values into the paged cache.
//
//   N query heads, K KV heads of D features; P tokens in a block; the first R features of a head are rotated
//   qkv     [T][N + 2K][D], queries are changed in place
//   caches  keys [blocks][K][D][P], values [blocks][K][P][D]
//   slots   [T], block * P + offset
constexpr int64_t N = 4, K = 4, D = 64, P = 16, R = 64;
constexpr int64_t TOKENS = 4;  // of a chunk of work

using T = bf16;  // of the cache

extern "C" void qkv_n4_k4_d64_p16_bf16_r64_avx2(
    float* __restrict qkv,
    const float* __restrict cos_sin,
    const int32_t* __restrict positions,
    bf16* __restrict k_cache,
    bf16* __restrict v_cache,
    const int64_t* __restrict slots,
    int64_t num_tokens) {
    parallel_for((num_tokens + TOKENS - 1) / TOKENS, [=](int64_t chunk) {
        const int64_t end = chunk * TOKENS + TOKENS < num_tokens ? chunk * TOKENS + TOKENS : num_tokens;
        for (int64_t token = chunk * TOKENS; token < end; ++token) {
            float* q = qkv + token * (N + 2 * K) * D;
            float *k = q + N * D, *v = k + K * D;
            rotate<R, false>(q, N + K, D, cos_sin + int64_t(positions[token]) * R);
            const int64_t block = slots[token] / P, offset = slots[token] % P;
            for (int64_t head = 0; head < K; ++head) {
                T* keys = k_cache + (block * K + head) * D * P + offset;
                T* values = v_cache + ((block * K + head) * P + offset) * D;
                for (int64_t d = 0; d < D; ++d) keys[d * P] = T(k[head * D + d]);
                for (int64_t d = 0; d < D; ++d) values[d] = T(v[head * D + d]);
            }
        }
    });
}

// The same for a tape, whose argument blocks have 8 bytes for each.
extern "C" void qkv_n4_k4_d64_p16_bf16_r64_avx2_from_slots(const int64_t* slots) {
    qkv_n4_k4_d64_p16_bf16_r64_avx2(
        reinterpret_cast<float*>(slots[0]), 
        reinterpret_cast<const float*>(slots[1]), 
        reinterpret_cast<const int32_t*>(slots[2]), 
        reinterpret_cast<bf16*>(slots[3]), 
        reinterpret_cast<bf16*>(slots[4]), 
        reinterpret_cast<const int64_t*>(slots[5]), 
        int64_t(slots[6])
    );
}
