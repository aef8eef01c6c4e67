// qkv(N=4, K=4, D=64, P=16, dtype=bf16, R=64, interleaved=False, arch=avx2) for cpp
// llama on avx2, weights in bf16
// qkv: out fp32
// cos_sin: in fp32
// positions: in i32
// k_cache: out bf16
// v_cache: out bf16
// slots: in i64
// num_tokens: scalar i64

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

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

constexpr int LANES = 8;
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
INLINE f32v all_lanes(float s) { return f32v{s, s, s, s, s, s, s, s}; }
INLINE i32v all_lanes(int32_t s) { return i32v{s, s, s, s, s, s, s, s}; }
INLINE f32v to_float(i32v v) { return __builtin_convertvector(v, f32v); }

// a * b + c, rounded once where the machine can.
INLINE f32v fma(f32v a, f32v b, f32v c) {
    return _mm256_fmadd_ps(a, b, c);
}

// LANES numbers in fp16 widened, exactly.
INLINE f32v widen_fp16(const void* from) {
    return _mm256_cvtph_ps(load<__m128i>(from));
}

// LANES signed bytes as 32-bit numbers.
INLINE i32v widen_i8(const void* from) {
    return i32v(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
}

// Adds to each lane of sum the products of its four unsigned bytes in w with the four signed ones in x.
INLINE i32v dot4(i32v sum, u32v w, int32_t x) {
    // In 16 bits: bytes 0 and 2 of a lane, then bytes 1 and 3. The compiler shares each half among its uses.
    typedef int16_t i16v __attribute__((vector_size(4 * LANES)));
    typedef uint16_t pairs __attribute__((vector_size(4 * LANES)));
    const i16v x_all = i16v(all_lanes(x));
    const i16v x_even = i16v(pairs(x_all) << 8) >> 8, x_odd = x_all >> 8;
    const pairs w_even = pairs(w) & 0xff, w_odd = pairs(w) >> 8;
    const u32v even = u32v(_mm256_madd_epi16(__m256i(w_even), __m256i(x_even)));
    const u32v odd = u32v(_mm256_madd_epi16(__m256i(w_odd), __m256i(x_odd)));
    return i32v(u32v(sum) + even + odd);
}

// Moves the cache line at an address towards the core, as far as its second level.
INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// The same address, which the compiler takes for another: what is read there is read again, not kept in a register.
INLINE const uint8_t* again(const uint8_t* address) {
    asm volatile("" : "+r"(address));
    return address;
}
extern "C" void fastgen_parallel_for(void (*run)(void* job, int64_t chunk), void* job, int64_t num_chunks);
extern "C" int fastgen_num_threads();

// Calls work(chunk) for every chunk below num_chunks, each on any thread, in any order.
template <class Work>
static void parallel_for(int64_t num_chunks, Work&& work) {
    using Plain = std::remove_reference_t<Work>;
    fastgen_parallel_for([](void* job, int64_t chunk) { (*static_cast<Plain*>(job))(chunk); }, &work, num_chunks);
}
constexpr float INFINITE = __builtin_inff();

INLINE f32v select(i32v which, f32v yes, f32v no) { return which ? yes : no; }
INLINE f32v larger(f32v a, f32v b) { return select(a > b, a, b); }  // b where one is no number
INLINE f32v magnitude(f32v x) { return bits_of<f32v>(bits_of<u32v>(x) & 0x7fffffffu); }

// Sums and maxima over the lanes, by halves: one order, whatever the compiler.
template <class Combine>
INLINE float over_lanes(f32v v, Combine combine) {
#if defined(__clang__)
    v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
#else
    v = combine(v, __builtin_shuffle(v, i32v{4, 5, 6, 7, 0, 1, 2, 3}));
#endif
#if defined(__clang__)
    v = combine(v, __builtin_shufflevector(v, v, 2, 3, 4, 5, 6, 7, 0, 1));
#else
    v = combine(v, __builtin_shuffle(v, i32v{2, 3, 4, 5, 6, 7, 0, 1}));
#endif
#if defined(__clang__)
    v = combine(v, __builtin_shufflevector(v, v, 1, 2, 3, 4, 5, 6, 7, 0));
#else
    v = combine(v, __builtin_shuffle(v, i32v{1, 2, 3, 4, 5, 6, 7, 0}));
#endif
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

namespace {

// Rotates the first 64 features of heads that lie `stride` apart: pair i is i and i + 32.
void rotate(float* x, int64_t num_heads, int64_t stride, const float* cos_sin) {
    constexpr int64_t PAIRS = 32;
    for (int64_t head = 0; head < num_heads; ++head, x += stride) {
        for (int64_t i = 0; i < PAIRS; ++i) {
            float &first = x[i], &second = x[i + PAIRS];
            const float cos = cos_sin[i], sin = cos_sin[i + PAIRS];
            const float turned = first * cos - second * sin;
            second = second * cos + first * sin;
            first = turned;
        }
    }
}

}  // namespace

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
            rotate(q, N + K, D, cos_sin + int64_t(positions[token]) * R);
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
