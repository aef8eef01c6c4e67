// Functions of f32v that the C library has for single numbers only, within 2 units in the last place where the result is
// not tiny.
#pragma once
#include "vectors.h"

constexpr float INFINITE = __builtin_inff();

INLINE f32v select(i32v which, f32v yes, f32v no) { return which ? yes : no; }
INLINE f32v larger(f32v a, f32v b) {  // b where one is NaN
#if FASTGEN_LANES == 16
    return _mm512_maskz_max_ps(0xffff, a, b);
#elif FASTGEN_LANES == 8
    return _mm256_max_ps(a, b);
#else
    return select(a > b, a, b);
#endif
}
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
    const i32v below = x < all_lanes(-87.33654f), above = x > all_lanes(88.72283f);  // neither, where x is NaN
    const f32v within = select(below, all_lanes(-87.33654f), select(above, all_lanes(88.72283f), x));
    // Adding and subtracting 1.5 * 2^23 leaves the nearest integer.
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
    const i32v exponent = __builtin_convertvector(n, i32v), half = exponent >> 1;
    const f32v scaled = p * bits_of<f32v>((half + 127) << 23) * bits_of<f32v>((exponent - half + 127) << 23);
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

// 1 - erf(x) for x >= 0. The caller may know its square more exactly. An exponential of a polynomial in 1 / (1 + x / 2)
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

// Some of a vector's numbers, then zeros; memory after them is not accessed.
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
