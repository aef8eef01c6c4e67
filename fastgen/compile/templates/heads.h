// Norms and rotation of heads in fp32, for kernels between projections and attention.
#pragma once
#include "vector_math.h"

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
