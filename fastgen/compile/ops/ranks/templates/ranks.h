// Exchanges between the ranks of one machine through shared memory; fastgen/compile/host/rank_memory.py says how.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

inline int64_t now_ms() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000 + time.tv_nsec / 1000000;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while a word of other processes has this value, for so long at most. The lower half of the word is compared.
inline void sleep_while(std::atomic<int64_t>& word, int64_t value, int64_t most_ns) {
#if defined(__linux__)
    const timespec most{0, most_ns};
    syscall(SYS_futex, &word, FUTEX_WAIT, uint32_t(value), &most, nullptr, 0);
#else
    sched_yield();
#endif
}

inline void wake_all(std::atomic<int64_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

class Exchange {
  public:
    const int64_t rank, num_ranks, area_bytes;

    Exchange(uint8_t* shared, int64_t areas_offset, int64_t area_bytes, int64_t rank, int64_t num_ranks,
             int64_t timeout_ms)
        : rank(rank), num_ranks(num_ranks), area_bytes(area_bytes), shared(shared), areas(shared + areas_offset),
          timeout_ms(timeout_ms), number(begun(rank).load(std::memory_order_relaxed)) {}

    // The area that this rank fills next.
    float* begin() {
        ++number;
        return area(rank);
    }

    // Waits until all ranks have filled theirs; false if one does not come, or the ranks end.
    bool meet() {
        begun(rank).store(number);
        if (sleepers(rank).load() != 0) wake_all(begun(rank));
        const int64_t end_ms = now_ms() + timeout_ms;
        for (int64_t other = 0; other < num_ranks; ++other) {
            for (int64_t spins = 1; begun(other).load(std::memory_order_acquire) < number; ++spins) {
                relax();
                if (spins % SPINS) continue;
                if (state().load(std::memory_order_relaxed) != 0) return false;
                if (now_ms() > end_ms) {
                    int64_t running = 0;
                    state().compare_exchange_strong(running, 1 + other);
                    return false;
                }
                sleep(other);  // the core may be what the other rank waits for
            }
        }
        return true;
    }

    // What a rank filled.
    float* area(int64_t of) const {
        return reinterpret_cast<float*>(areas + ((number & 1) * num_ranks + of) * area_bytes);
    }

  private:
    static constexpr int64_t LINE_BYTES = 64, SPINS = 1024, SLEEP_NS = 5000000;
    uint8_t *shared, *areas;
    int64_t timeout_ms, number;

    std::atomic<int64_t>& line(int64_t index) const {
        return *reinterpret_cast<std::atomic<int64_t>*>(shared + index * LINE_BYTES);
    }
    std::atomic<int64_t>& state() const { return line(0); }
    std::atomic<int64_t>& begun(int64_t of) const { return line(1 + of); }
    std::atomic<int64_t>& sleepers(int64_t of) const { return (&line(1 + of))[1]; }

    // Sleeps until another rank begins an exchange, or for SLEEP_NS, unless it has begun this one.
    void sleep(int64_t other) const {
        sleepers(other).fetch_add(1);
        const int64_t seen = begun(other).load();
        if (seen < number) sleep_while(begun(other), seen, SLEEP_NS);
        sleepers(other).fetch_sub(1);
    }
};
