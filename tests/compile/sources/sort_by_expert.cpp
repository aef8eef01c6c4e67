// sort_by_expert(E=16) for cpp
// mixtral on avx2, weights in bf16
// experts: in i64
// order: out i64
// first_rows: out i64
// num_choices: scalar i64

#include <cstdint>

// The choices expert by expert, in the order of tokens, and where in that order each of the E experts' begin.
//
//   experts [num_choices]; order [num_choices], first_rows [E + 1]
constexpr int64_t E = 16;

extern "C" void sort_by_expert_e16(
    const int64_t* __restrict experts,
    int64_t* __restrict order,
    int64_t* __restrict first_rows,
    int64_t num_choices) {
    int64_t next[E] = {};
    for (int64_t c = 0; c < num_choices; ++c) ++next[experts[c]];
    int64_t first = 0;
    for (int64_t expert = 0; expert < E; ++expert) {
        first_rows[expert] = first;
        first += next[expert];
        next[expert] = first_rows[expert];
    }
    first_rows[E] = first;
    for (int64_t c = 0; c < num_choices; ++c) order[next[experts[c]]++] = c;
}

// The same function for a tape, whose blocks have 8 bytes for each argument.
extern "C" void sort_by_expert_e16_from_slots(const int64_t* slots) {
    sort_by_expert_e16(
        reinterpret_cast<const int64_t*>(slots[0]), 
        reinterpret_cast<int64_t*>(slots[1]), 
        reinterpret_cast<int64_t*>(slots[2]), 
        int64_t(slots[3])
    );
}
