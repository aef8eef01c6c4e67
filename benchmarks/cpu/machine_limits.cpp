// What the machine can do at most: read memory, add products in fp32 and in int8. Chunks go over fastgen's own pool.
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

extern "C" void fastgen_parallel_for(void (*run)(void* job, int64_t chunk), void* job, int64_t num_chunks);

typedef float f32v __attribute__((vector_size(64)));

struct Job {
    const char* memory;
    int64_t count;
};

// Each chunk reads four streams side by side, two cache lines of each at a time.
static void read_chunk(void* argument, int64_t chunk) {
    Job* job = static_cast<Job*>(argument);
    const int64_t stream = job->count / 4;
    const char* begin = job->memory + chunk * job->count;
    f32v sum[8] = {};
    for (int64_t i = 0; i < stream; i += 128) {
#pragma GCC unroll 8
        for (int s = 0; s < 8; ++s) sum[s] += *reinterpret_cast<const f32v*>(begin + s / 2 * stream + i + s % 2 * 64);
    }
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) asm volatile("" : : "m"(sum[s]));  // so that nothing is left out
}

extern "C" void read_memory(const char* memory, int64_t chunk_bytes, int64_t num_chunks) {
    Job job{memory, chunk_bytes};
    fastgen_parallel_for(read_chunk, &job, num_chunks);
}

// Independent sums, more than the latency of an addition hides, as many as there are registers for.
#if defined(__AVX512F__)
constexpr int CHAINS = 24, REGISTER = 64;
#elif defined(__AVX__)
constexpr int CHAINS = 12, REGISTER = 32;
#else
constexpr int CHAINS = 12, REGISTER = 16;
#endif
typedef float lanes __attribute__((vector_size(REGISTER)));

static void fp32_chunk(void* argument, int64_t) {
    Job* job = static_cast<Job*>(argument);
    lanes sum[CHAINS];
    for (int s = 0; s < CHAINS; ++s) sum[s] = lanes{} + float(s);  // were they equal, one would be computed for all
    const lanes factor = lanes{} + 0.999f;
    for (int64_t i = 0; i < job->count; ++i) {
#pragma GCC unroll 24
        for (int s = 0; s < CHAINS; ++s) sum[s] = sum[s] * factor + factor;
    }
#pragma GCC unroll 24
    for (int s = 0; s < CHAINS; ++s) asm volatile("" : : "m"(sum[s]));
}

// Returns how many operations that were, a multiplication and an addition for each lane.
extern "C" int64_t add_fp32(int64_t count, int64_t num_chunks) {
    Job job{nullptr, count};
    fastgen_parallel_for(fp32_chunk, &job, num_chunks);
    return 2 * (REGISTER / 4) * CHAINS * count * num_chunks;
}

// Products of 8 bits summed in 32; no operations where the CPU has no instructions for it.
#if defined(__AVX512VNNI__)
typedef __m512i bytes;
static inline bytes step(bytes sum, bytes x, bytes y) { return _mm512_dpbusd_epi32(sum, x, y); }
#elif defined(__AVX2__)
typedef __m256i bytes;
static inline bytes step(bytes sum, bytes x, bytes y) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
#endif

#if defined(__AVX2__)
static void int8_chunk(void* argument, int64_t) {
    Job* job = static_cast<Job*>(argument);
    bytes sum[CHAINS] = {}, x, y = {};
    asm volatile("" : "=v"(x));  // unknown, so that nothing is computed beforehand
    for (int64_t i = 0; i < job->count; ++i) {
#pragma GCC unroll 24
        for (int s = 0; s < CHAINS; ++s) {
            sum[s] = step(sum[s], x, y);
            asm volatile("" : "+v"(y));
        }
    }
#pragma GCC unroll 24
    for (int s = 0; s < CHAINS; ++s) asm volatile("" : : "v"(sum[s]));
}
#endif

extern "C" int64_t add_int8(int64_t count, int64_t num_chunks) {
#if defined(__AVX2__)
    Job job{nullptr, count};
    fastgen_parallel_for(int8_chunk, &job, num_chunks);
    return 2 * sizeof(bytes) * CHAINS * count * num_chunks;
#else
    return 0;
#endif
}
