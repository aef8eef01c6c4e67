// rms_norm(H=256, dtype=fp32, eps=1e-06, weight=True, bias=False, residual=False) for cpp
// llama on portable, weights in bf16
// x: in fp32
// weight: in fp32
// out: out fp32
// num_rows: scalar i64

// Numbers of 16 bits.
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

// A kernel divides its work among the threads of thread_pool.h, which is loaded before any kernel that uses it.
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

// RMS norm of rows of H features.
constexpr int64_t H = 256;
constexpr int64_t ROWS = 8;  // of a chunk of work

extern "C" void rms_norm_h256_fp32_eps1e_06_weight(
    const float* __restrict x,
    const float* __restrict weight,
    float* __restrict out,
    int64_t num_rows) {
    parallel_for((num_rows + ROWS - 1) / ROWS, [=](int64_t chunk) {
        const int64_t end = chunk * ROWS + ROWS < num_rows ? chunk * ROWS + ROWS : num_rows;
        for (int64_t row = chunk * ROWS; row < end; ++row) {
            const float* x_row = x + row * H;
            float* out_row = out + row * H;
            constexpr float mean = 0;
            float squares = 0;
            #pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < H; ++i) {
                const float centred = float(x_row[i]) - mean;
                squares += centred * centred;
            }
            const float inverse = 1 / __builtin_sqrtf(squares / H + float(1e-06));
            #pragma omp simd
            for (int64_t i = 0; i < H; ++i) {
                float value = (float(x_row[i]) - mean) * inverse;
                value *= float(weight[i]);
                out_row[i] = float(value);
            }
        }
    });
}

// The same function for a tape, whose blocks have 8 bytes for each argument.
extern "C" void rms_norm_h256_fp32_eps1e_06_weight_from_slots(const int64_t* slots) {
    rms_norm_h256_fp32_eps1e_06_weight(
        reinterpret_cast<const float*>(slots[0]), 
        reinterpret_cast<const float*>(slots[1]), 
        reinterpret_cast<float*>(slots[2]), 
        int64_t(slots[3])
    );
}
