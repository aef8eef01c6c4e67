// next_decodes() for cpp
// llama on portable, weights in bf16
// token_ids: in i64
// slots: in i32
// block_tables: in i32
// input_ids: out i32
// token_source: out i32
// positions: out i32
// seq_lens: out i32
// slot_mapping: out i64
// sampled_positions: out i64
// num_rows: scalar i64
// num_groups: scalar i64
// num_slots: scalar i64
// max_blocks: scalar i64
// block_size: scalar i64
// slot_stride: scalar i64
// position_stride: scalar i64

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
// Row i is the one new token of the sequence in slots[i]. So little work that sharing it out would take longer.
extern "C" void next_decodes(
    const int64_t* __restrict token_ids,
    const int32_t* __restrict slots,
    const int32_t* __restrict block_tables,
    int32_t* __restrict input_ids,
    int32_t* __restrict token_source,
    int32_t* __restrict positions,
    int32_t* __restrict seq_lens,
    int64_t* __restrict slot_mapping,
    int64_t* __restrict sampled_positions,
    int64_t num_rows,
    int64_t num_groups,
    int64_t num_slots,
    int64_t max_blocks,
    int64_t block_size,
    int64_t slot_stride,
    int64_t position_stride) {
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t slot = slots[i], position = positions[i] + 1;
        input_ids[i] = int32_t(token_ids[i]);
        token_source[i] = -1;
        positions[i] = int32_t(position);
        seq_lens[slot] += 1;
        sampled_positions[i * position_stride] += 1;
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t block = block_tables[(group * num_slots + slot) * max_blocks + position / block_size];
            slot_mapping[group * slot_stride + i] = block * block_size + position % block_size;
        }
    }
}

// The same function for a tape, whose blocks have 8 bytes for each argument.
extern "C" void next_decodes_from_slots(const int64_t* slots) {
    next_decodes(
        reinterpret_cast<const int64_t*>(slots[0]), 
        reinterpret_cast<const int32_t*>(slots[1]), 
        reinterpret_cast<const int32_t*>(slots[2]), 
        reinterpret_cast<int32_t*>(slots[3]), 
        reinterpret_cast<int32_t*>(slots[4]), 
        reinterpret_cast<int32_t*>(slots[5]), 
        reinterpret_cast<int32_t*>(slots[6]), 
        reinterpret_cast<int64_t*>(slots[7]), 
        reinterpret_cast<int64_t*>(slots[8]), 
        int64_t(slots[9]), 
        int64_t(slots[10]), 
        int64_t(slots[11]), 
        int64_t(slots[12]), 
        int64_t(slots[13]), 
        int64_t(slots[14]), 
        int64_t(slots[15])
    );
}
