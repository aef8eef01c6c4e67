// embedding(format=bf16, packed=False, resolve=True, added=False, row_scaled=False) for cpp

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
#include <type_traits>
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

// Rows of a table by number, in fp32: token ids, or for those not on the host yet what was sampled last.
constexpr int64_t ROWS = 8;  // of a chunk of work

extern "C" void embedding_bf16_resolve(
    const int32_t* __restrict ids,
    const int32_t* __restrict token_source,
    const int32_t* __restrict sampled_ids,
    const bf16* __restrict table,
    float* __restrict out,
    int64_t num_tokens,
    int64_t num_features) {
    parallel_for((num_tokens + ROWS - 1) / ROWS, [=](int64_t chunk) {
        const int64_t end = chunk * ROWS + ROWS < num_tokens ? chunk * ROWS + ROWS : num_tokens;
        for (int64_t token = chunk * ROWS; token < end; ++token) {
            const int64_t row = token_source[token] < 0 ? ids[token] : sampled_ids[token_source[token]];
            float* to = out + token * num_features;
            for (int64_t i = 0; i < num_features; ++i) {
                const float value = float(table[row * num_features + i]);
                to[i] = value;
            }
        }
    });
}

// The same for a tape, whose argument blocks have 8 bytes for each.
extern "C" void embedding_bf16_resolve_from_slots(const int64_t* slots) {
    embedding_bf16_resolve(
        reinterpret_cast<const int32_t*>(slots[0]), 
        reinterpret_cast<const int32_t*>(slots[1]), 
        reinterpret_cast<const int32_t*>(slots[2]), 
        reinterpret_cast<const bf16*>(slots[3]), 
        reinterpret_cast<float*>(slots[4]), 
        int64_t(slots[5]), 
        int64_t(slots[6])
    );
}
