// Random numbers that depend on a counter alone, and Gumbel noise of them.
#pragma once
#include "vector_math.h"

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

// The 64-bit products of even-numbered 32-bit lanes with a number.
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
