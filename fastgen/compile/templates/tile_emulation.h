// The instructions of tiles.h in C++, bit by bit as the hardware computes them (Intel's Software Developer's Manual), so
// that kernels are proven on machines without a matrix unit. Only the payload of what is no number may differ. What the
// hardware would trap ends the process with a message.
#pragma once
#include <cstdio>
#include <cstdlib>

struct Tiles {
    bool has_shapes = false;
    TileShapes shapes;
    alignas(64) uint8_t rows[8][16][64];
};
static Tiles& tiles() {  // each thread has its own, as in hardware
    static thread_local Tiles all;
    return all;
}

[[noreturn]] static void trap(const char* what) {
    std::fprintf(stderr, "AMX would trap: %s\n", what);
    std::abort();
}
static int rows_of(int tile) {
    if (!tiles().has_shapes) trap("this thread's tiles have no shapes");
    if (tiles().shapes.rows[tile] == 0) trap("a tile without rows");
    return tiles().shapes.rows[tile];
}
static int row_bytes_of(int tile) { return rows_of(tile), tiles().shapes.row_bytes[tile]; }

static void begin_tiles(const TileShapes& shapes) {
    if (shapes.palette != 1 || shapes.start_row != 0) trap("the palette or the first row");
    for (uint8_t byte : shapes.reserved) {
        if (byte != 0) trap("reserved bytes are not zero");
    }
    for (int tile = 0; tile < 16; ++tile) {
        const int num_rows = shapes.rows[tile], num_bytes = shapes.row_bytes[tile];
        if (num_rows == 0 && num_bytes == 0) continue;
        if (tile > 7 || num_rows == 0 || num_rows > 16 || num_bytes == 0 || num_bytes > 64) trap("a tile's shape");
    }
    tiles().has_shapes = true;
    tiles().shapes = shapes;
    std::memset(tiles().rows, 0, sizeof tiles().rows);
}
static void end_tiles() { tiles().has_shapes = false; }

template <int T>
static void zero_tile() {
    rows_of(T);
    std::memset(tiles().rows[T], 0, sizeof tiles().rows[T]);
}
template <int T>
static void load_tile(const void* from, int64_t stride) {
    const int num_rows = rows_of(T), num_bytes = row_bytes_of(T);
    zero_tile<T>();
    for (int r = 0; r < num_rows; ++r) {
        std::memcpy(tiles().rows[T][r], static_cast<const uint8_t*>(from) + r * stride, num_bytes);
    }
}
template <int T>
static void stream_tile(const void* from, int64_t stride) {
    load_tile<T>(from, stride);
}
template <int T>
static void store_tile(void* to, int64_t stride) {
    const int num_rows = rows_of(T), num_bytes = row_bytes_of(T);
    for (int r = 0; r < num_rows; ++r) {
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles().rows[T][r], num_bytes);
    }
}

// Calls visit(m), and what it returns becomes row m of the sums.
template <int SUMS, int A, int B, class Visit>
static void visit_sums(Visit&& visit) {
    static_assert(SUMS != A && SUMS != B && A != B, "the hardware would trap: operands are three tiles");
    if (rows_of(SUMS) != rows_of(A) || row_bytes_of(SUMS) != row_bytes_of(B) || row_bytes_of(A) != 4 * rows_of(B)) {
        trap("the shapes of a product");
    }
    for (int m = 0; m < rows_of(SUMS); ++m) {
        uint8_t* row = tiles().rows[SUMS][m];
        store(row, visit(m));
        std::memset(row + row_bytes_of(SUMS), 0, 64 - row_bytes_of(SUMS));
    }
}

// The same numbers, with zeros of their signs for what is denormal.
INLINE f32v flushed(f32v x) {
    const u32v bits = bits_of<u32v>(x);
    return bits_of<f32v>(bits & 0x7fffffffu) < all_lanes(0x1p-126f) ? bits_of<f32v>(bits & 0x80000000u) : x;
}
// a * b + c, rounded once, and zero where it is denormal once it is rounded to 24 bits. No operand is denormal.
INLINE f32v fma_flushed(f32v a, f32v b, f32v c) {
    f32v result = fma(a, b, c);
    // A result of this size may be rounded from less: on the coarser grid of denormals, not to 24 bits.
    const u32v magnitude = bits_of<u32v>(result) & 0x7fffffffu;
    const __mmask16 smallest = _mm512_cmpeq_epi32_mask(__m512i(magnitude), _mm512_set1_epi32(0x00800000));
    for (int lane = 0; smallest != 0 && lane < LANES; ++lane) {
        const double exact = double(a[lane]) * b[lane] + c[lane];
        const bool is_less = __builtin_fabs(exact) < 0x1p-126 - 0x1p-151;
        if ((smallest >> lane & 1) && is_less) result[lane] = exact < 0 ? -0.0f : 0.0f;
    }
    return flushed(result);
}

template <int SUMS, int A, int B>
static void dot_bf16() {
    const auto upper = [](u32v bits) { return flushed(bits_of<f32v>(bits & 0xffff0000u)); };
    visit_sums<SUMS, A, B>([&](int m) {
        f32v even = {}, odd = {};
        for (int k = 0; k < rows_of(B); ++k) {
            const u32v a = u32v(all_lanes(load<int32_t>(tiles().rows[A][m] + 4 * k)));
            const u32v b = load<u32v>(tiles().rows[B][k]);
            even = fma_flushed(upper(a << 16), upper(b << 16), even);
            odd = fma_flushed(upper(a), upper(b), odd);
        }
        return flushed(flushed(load<f32v>(tiles().rows[SUMS][m])) + flushed(even + odd));
    });
}

template <int SUMS, int A, int B>
static void dot_i8_u8() {
    visit_sums<SUMS, A, B>([&](int m) {
        u32v sum = load<u32v>(tiles().rows[SUMS][m]);
        for (int k = 0; k < rows_of(B); ++k) {
            const u32v b = load<u32v>(tiles().rows[B][k]);
            for (int byte = 0; byte < 4; ++byte) {
                sum += (b >> (8 * byte) & 0xffu) * uint32_t(int32_t(int8_t(tiles().rows[A][m][4 * k + byte])));
            }
        }
        return sum;
    });
}
