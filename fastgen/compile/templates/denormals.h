// Denormal numbers as matrix units take them.
#pragma once
#include <cstdint>

// Within its scope vector instructions of this thread take denormal numbers for zero, and make none. All numbers are read
// after its beginning and written before its end: the compiler moves no access to memory over either.
class WithoutDenormals {
public:
    WithoutDenormals() {
        asm volatile("stmxcsr %0" : "=m"(before_)::"memory");
        set(before_ | 0x8040);
    }
    ~WithoutDenormals() { set(before_); }
    WithoutDenormals(const WithoutDenormals&) = delete;
    WithoutDenormals& operator=(const WithoutDenormals&) = delete;

private:
    static void set(uint32_t mode) { asm volatile("ldmxcsr %0" ::"m"(mode) : "memory"); }
    uint32_t before_;
};
