// Vectors of LANES 32-bit numbers, in the compiler's own vector types; intrinsics are used only where vector
// types cannot express the operation. The template defines FASTGEN_LANES and FASTGEN_HAS_… by its instruction set.
#pragma once
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
