// What the machine can do at most: read memory, add products in fp32 and in int8. Chunks go over fastgen's own pool.
#include <cstdint>

extern "C" void fastgen_parallel_for(void (*run)(void* job, int64_t chunk), void* job, int64_t num_chunks);

typedef float f32v __attribute__((vector_size(64)));

struct Job {
    const char* memory;
    int64_t count;
};

template <int COUNT>
static void keep(const f32v (&sum)[COUNT]) {  // so that nothing is left out
#pragma GCC unroll 24
    for (int s = 0; s < COUNT; ++s) asm volatile("" : : "m"(sum[s]));
}

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
    keep(sum);
}

extern "C" void read_memory(const char* memory, int64_t chunk_bytes, int64_t num_chunks) {
    Job job{memory, chunk_bytes};
    fastgen_parallel_for(read_chunk, &job, num_chunks);
}

constexpr int CHAINS = 24;  // independent sums, more than the latency of an addition hides

static void fp32_chunk(void* argument, int64_t) {
    Job* job = static_cast<Job*>(argument);
    f32v sum[CHAINS];
    for (int s = 0; s < CHAINS; ++s) sum[s] = f32v{} + float(s);  // were they equal, one would be computed for all
    const f32v factor = f32v{} + 0.999f;
    for (int64_t i = 0; i < job->count; ++i) {
#pragma GCC unroll 24
        for (int s = 0; s < CHAINS; ++s) sum[s] = sum[s] * factor + factor;
    }
    keep(sum);
}

// Two operations for each of 16 lanes, CHAINS * count times a chunk.
extern "C" void add_fp32(int64_t count, int64_t num_chunks) {
    Job job{nullptr, count};
    fastgen_parallel_for(fp32_chunk, &job, num_chunks);
}
