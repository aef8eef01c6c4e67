// embedding(format=bf16_dot, packed=True, resolve=True, scale=16.0, added=False, row_scaled=False, panel=32, lanes=16) for cpp
// gemma on avx512bf16, weights in bf16
// ids: in i32
// token_source: in i32
// sampled_ids: in i32
// table: in u8
// panel_bytes: scalar i64
// out: out fp32
// num_tokens: scalar i64
// num_features: scalar i64

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
#include <type_traits>
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

// Rows of a table by number, in fp32: token ids, or for those not on the host yet what was sampled last.
// The table is packed as linear layers read it, bf16_dot in panels of 32 rows; see fastgen/compile/weights/packed.py.
constexpr int64_t ROWS = 8;  // of a chunk of work
constexpr int64_t PANEL = 32, LANES = 16;

static float number(const uint8_t* panel, int64_t place, int64_t i) {
    bf16 value;
    std::memcpy(&value, panel + 2 * ((i / 2 * PANEL + place) * 2 + i % 2), sizeof value);
    return float(value);
}

extern "C" void embedding_bf16_dot_packed_resolve_scale16_0_panel32_lanes16(
    const int32_t* __restrict ids,
    const int32_t* __restrict token_source,
    const int32_t* __restrict sampled_ids,
    const uint8_t* __restrict table,
    int64_t panel_bytes,
    float* __restrict out,
    int64_t num_tokens,
    int64_t num_features) {
    parallel_for((num_tokens + ROWS - 1) / ROWS, [=](int64_t chunk) {
        const int64_t end = chunk * ROWS + ROWS < num_tokens ? chunk * ROWS + ROWS : num_tokens;
        for (int64_t token = chunk * ROWS; token < end; ++token) {
            const int64_t row = token_source[token] < 0 ? ids[token] : sampled_ids[token_source[token]];
            float* to = out + token * num_features;
            const uint8_t* panel = table + row / PANEL * panel_bytes;
            for (int64_t i = 0; i < num_features; ++i) {
                const float value = number(panel, row % PANEL, i);
                to[i] = value * float(16.0);
            }
        }
    });
}

// The same function for a tape, whose blocks have 8 bytes for each argument.
extern "C" void embedding_bf16_dot_packed_resolve_scale16_0_panel32_lanes16_from_slots(const int64_t* slots) {
    embedding_bf16_dot_packed_resolve_scale16_0_panel32_lanes16(
        reinterpret_cast<const int32_t*>(slots[0]), 
        reinterpret_cast<const int32_t*>(slots[1]), 
        reinterpret_cast<const int32_t*>(slots[2]), 
        reinterpret_cast<const uint8_t*>(slots[3]), 
        int64_t(slots[4]), 
        reinterpret_cast<float*>(slots[5]), 
        int64_t(slots[6]), 
        int64_t(slots[7])
    );
}
