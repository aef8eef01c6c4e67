// The matrix unit of Intel's CPUs (AMX): eight tiles of up to 16 rows of 64 bytes, and products of them.
//
// These wrappers take the place of the intrinsics: those of gcc 12 do not say which memory they access. A tile's number is
// a template argument. Built with FASTGEN_EMULATE_AMX, the same functions compute the same bits on other CPUs.
#pragma once
#include "vectors.h"

// The shapes of all tiles, as an instruction reads them. Those with 0 rows are not used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_row_bytes) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(num_row_bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

#ifdef FASTGEN_EMULATE_AMX
#include "tile_emulation.h"
#else
#include <sys/syscall.h>
#include <unistd.h>

// The system lets a process use tiles if it asks for their registers. fastgen asks before it chooses such a kernel; a program
// that only loads the kernel asks here.
constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
[[maybe_unused]] static const long has_asked = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);

// Gives this thread's tiles their shapes, and makes them zero.
INLINE void begin_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
// Gives the tiles back: until the next begin_tiles no other instruction here may run.
INLINE void end_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// Reads rows that lie `stride` bytes apart.
template <int T>
INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// The same, of rows that are not to stay in the first cache.
template <int T>
INLINE void stream_tile(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// sums[m][n] += A[m] . B[.][n] of bf16, two of A's row for each of B's rows. The products of even and of odd k are two
// chains of fused additions from zero; their sum is added to the sums. Denormal numbers count as zero and become zero.
template <int SUMS, int A, int B>
INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
// The same of signed bytes of A and unsigned ones of B, four for each row of B, in 32-bit integers.
template <int SUMS, int A, int B>
INLINE void dot_i8_u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#endif

// Has the tiles of this thread in its scope.
class TilesInUse {
public:
    explicit TilesInUse(const TileShapes& shapes) { begin_tiles(shapes); }
    ~TilesInUse() { end_tiles(); }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};
