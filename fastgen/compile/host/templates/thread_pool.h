// The process's one pool of threads, a library of its own; every other kernel library calls it, see threads.h.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>

#ifndef FASTGEN_MAX_THREADS  // as an editor reads this file
#define FASTGEN_MAX_THREADS 256
#define FASTGEN_SPIN_US 50
#endif
constexpr int MAX_THREADS = FASTGEN_MAX_THREADS;
constexpr int64_t SPIN_NS = FASTGEN_SPIN_US * 1000;  // how long a thread without work looks for some before it sleeps

// A job is num_chunks independent pieces of work. Each thread owns a contiguous range of them and takes from its front;
// a thread that has finished its own takes from the back of another's. A chunk's result does not depend on its thread.
//
//   caller   writes the job, then the ranges, then moves `epoch`; works; waits until `unfinished` is 0
//   worker   waits for `epoch` to move; works
//
// A chunk is claimed before the job is read, and a job ends only when all claimed chunks have, so a worker that wakes
// late (its core was busy with another process) finds the ranges empty, or work of the next job; no thread waits for it.
//
// A run is a sequence of jobs that no thread waits for at first. The worker that takes it is their caller. The thread that
// started it continues with other work, and takes that worker's place when it waits for the run's end.

using Chunk = void (*)(void* job, int64_t chunk);
using Run = void (*)(const int64_t* slots);

namespace {

struct alignas(64) Range {
    std::atomic<uint64_t> chunks{0};  // first << 32 | end
};

struct alignas(64) AtWork {
    std::atomic<int32_t> id{0};  // the system's id of the thread, while it computes a chunk
};

enum RunState : uint32_t { HAS_ENDED, WAITS, IS_RUN };

struct Pool {
    pthread_mutex_t one_job_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    pthread_t workers[MAX_THREADS];
    std::atomic<int> num_threads{1};  // the caller is thread 0

    Chunk run = nullptr;
    void* job = nullptr;
    Range ranges[MAX_THREADS];
    AtWork at_work[MAX_THREADS];
    alignas(64) std::atomic<uint32_t> unfinished{0};
    std::atomic<uint32_t> caller_sleeps{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    std::atomic<uint32_t> num_sleeping{0};
    std::atomic<int> num_wanted{1};  // workers from here on leave

    Run begun = nullptr;
    const int64_t* slots = nullptr;
    std::atomic<uint32_t> run_state{HAS_ENDED};
    std::atomic<int64_t> run_number{0};
    std::atomic<int> run_by{1};  // the worker whose place is free meanwhile
    std::atomic<int64_t> run_ended_ns{0};
};

Pool pool;
thread_local bool inside_a_job = false;
thread_local int32_t own_id = 0;  // the system's; 0 on threads that never take a worker's place

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// True as soon as `done()`, false if it has not come true for SPIN_NS.
template <class Done>
bool spin_until(Done done) {
    const int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            pause();
        }
    } while (now_ns() < end);
    return false;
}

// Claims the first (or last) chunk of a range; -1 where it is empty.
int64_t claim(Range& range, bool from_front) {
    uint64_t chunks = range.chunks.load(std::memory_order_relaxed);
    for (;;) {
        const uint32_t first = uint32_t(chunks >> 32), end = uint32_t(chunks);
        if (first >= end) return -1;
        const uint64_t rest = from_front ? uint64_t(first + 1) << 32 | end : uint64_t(first) << 32 | (end - 1);
        if (range.chunks.compare_exchange_weak(chunks, rest, std::memory_order_acquire, std::memory_order_relaxed)) {
            return from_front ? first : end - 1;
        }
    }
}

void run_claimed(int64_t chunk) {
    pool.run(pool.job, chunk);
    if (pool.unfinished.fetch_sub(1) == 1 && pool.caller_sleeps.load() != 0) wake_all(pool.unfinished);
}

// Runs all chunks that thread `index` can claim.
void work(int index) {
    const int num_ranges = pool.num_threads.load(std::memory_order_relaxed);
    for (int i = 0; i < num_ranges; ++i) {
        Range& range = pool.ranges[(index + i) % num_ranges];
        for (int64_t chunk; (chunk = claim(range, i == 0)) >= 0;) {
            pool.at_work[index].id.store(own_id, std::memory_order_relaxed);
            run_claimed(chunk);
            pool.at_work[index].id.store(0, std::memory_order_relaxed);
        }
    }
}

void move_epoch() {
    pool.epoch.fetch_add(1);
    if (pool.num_sleeping.load() != 0) wake_all(pool.epoch);
}

// The run that waits, if one does.
void take_run(int index) {
    uint32_t waits = WAITS;
    if (pool.run_state.load(std::memory_order_relaxed) != WAITS || !pool.run_state.compare_exchange_strong(waits, IS_RUN)) return;
    pool.run_by.store(index);
    const bool was_inside = inside_a_job;
    inside_a_job = false;
    pool.begun(pool.slots);
    inside_a_job = was_inside;
    pool.run_ended_ns.store(now_ns());
    pool.run_state.store(HAS_ENDED);
    move_epoch();  // for a thread that waits for the end
}

// Until there is something new to do.
void wait_for_work(uint32_t seen) {
    if (spin_until([seen] { return pool.epoch.load() != seen; })) return;
    pool.num_sleeping.fetch_add(1);
    while (pool.epoch.load() == seen) sleep_while(pool.epoch, seen);
    pool.num_sleeping.fetch_sub(1);
}

// Helps the run with that number, and returns when it has ended.
void help_run(int64_t number) {
    if (own_id == 0) own_id = int32_t(syscall(SYS_gettid));
    take_run(0);
    for (;;) {
        const uint32_t seen = pool.epoch.load();
        if (pool.run_number.load() != number || pool.run_state.load() == HAS_ENDED) return;
        inside_a_job = true;
        work(pool.run_by.load());
        inside_a_job = false;
        wait_for_work(seen);
    }
}

void* worker(void* argument) {
    const int index = int(intptr_t(argument));
    char name[16];
    std::snprintf(name, sizeof name, "fastgen-%d", index);
    pthread_setname_np(pthread_self(), name);
    inside_a_job = true;
    own_id = int32_t(syscall(SYS_gettid));
    for (;;) {
        const uint32_t seen = pool.epoch.load();  // before what it announces, or a worker would sleep through its end
        if (index >= pool.num_wanted.load()) return nullptr;
        take_run(index);
        work(index);
        wait_for_work(seen);
    }
}

// Moves a thread onto the core `here`, or off it, and leaves it free to go where it was free to go.
void move_thread(int32_t id, int here, bool onto) {
    cpu_set_t before, wanted;
    if (sched_getaffinity(id, sizeof before, &before) != 0 || !CPU_ISSET(here, &before)) return;
    CPU_ZERO(&wanted);
    CPU_SET(here, &wanted);
    if (!onto) CPU_XOR(&wanted, &before, &wanted);
    if (sched_setaffinity(id, sizeof wanted, &wanted) == 0) sched_setaffinity(id, sizeof before, &before);
}

void wait_for_the_others() {
    const auto all_done = [] { return pool.unfinished.load() == 0; };
    if (spin_until(all_done)) return;
    // A worker that takes so long has most likely lost its core to another process, and would wait there for milliseconds.
    // It may finish on this one, which is about to sleep.
    const int here = sched_getcpu();
    int32_t late[MAX_THREADS];
    int num_late = 0;
    for (int i = 1; i < pool.num_threads; ++i) {
        const int32_t id = pool.at_work[i].id.load(std::memory_order_relaxed);
        if (id != 0) move_thread(late[num_late++] = id, here, true);
    }
    pool.caller_sleeps.store(1);
    for (uint32_t left; (left = pool.unfinished.load()) != 0;) sleep_while(pool.unfinished, left);
    pool.caller_sleeps.store(0);
    while (num_late > 0) move_thread(late[--num_late], here, false);
}

// Threads do not survive a fork: the child has the caller alone until the pool is resized.
void forget_threads() {
    pthread_mutex_init(&pool.one_job_at_a_time, nullptr);
    pool.num_threads = 1;
    pool.num_wanted = 1;
    pool.unfinished = 0;
    pool.caller_sleeps = 0;
    pool.num_sleeping = 0;
    for (Range& range : pool.ranges) range.chunks = 0;
    for (AtWork& each : pool.at_work) each.id = 0;
    pool.run_state = HAS_ENDED;
    own_id = 0;
    inside_a_job = false;
}

__attribute__((constructor)) void watch_forks() {
    pthread_atfork(nullptr, nullptr, forget_threads);
}

}  // namespace

// Calls run(job, chunk) for every chunk below num_chunks, on all threads, and returns when all are done. Within a chunk
// it runs on the calling thread alone; from two threads at once, one job after the other.
extern "C" void fastgen_parallel_for(Chunk run, void* job, int64_t num_chunks) {
    if (inside_a_job || num_chunks <= 1 || num_chunks > UINT32_MAX || pool.num_threads == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run(job, chunk);
        return;
    }
    pthread_mutex_lock(&pool.one_job_at_a_time);
    pool.run = run;
    pool.job = job;
    pool.unfinished.store(uint32_t(num_chunks));
    const int64_t num_threads = pool.num_threads;
    for (int64_t i = 0; i < num_threads; ++i) {
        const uint64_t first = num_chunks * i / num_threads, end = num_chunks * (i + 1) / num_threads;
        pool.ranges[i].chunks.store(first << 32 | end, std::memory_order_release);
    }
    move_epoch();
    inside_a_job = true;
    work(0);
    inside_a_job = false;
    wait_for_the_others();
    pthread_mutex_unlock(&pool.one_job_at_a_time);
}

extern "C" int32_t fastgen_num_threads() { return pool.num_threads; }

// Has run(slots) called on a thread of the pool's own, soon, and returns at once with a number for it; run's jobs are
// spread as any. 0, with nothing done, where the pool has no other thread, or another run has not ended.
extern "C" int64_t fastgen_start_run(Run run, const int64_t* slots) {
    if (inside_a_job || pool.num_threads == 1 || pool.run_state.load() != HAS_ENDED) return 0;
    pthread_mutex_lock(&pool.one_job_at_a_time);
    int64_t number = 0;
    if (pool.run_state.load() == HAS_ENDED && pool.num_threads > 1) {
        pool.begun = run;
        pool.slots = slots;
        number = pool.run_number.fetch_add(1) + 1;
        pool.run_state.store(WAITS);
        move_epoch();
    }
    pthread_mutex_unlock(&pool.one_job_at_a_time);
    return number;
}

// Helps the run with that number until it has ended. Returns when the last one that ended did, in ns of the monotonic clock.
extern "C" int64_t fastgen_end_run(int64_t number) {
    help_run(number);
    return pool.run_ended_ns.load();
}

// Resizes the pool, up to what the system allows; returns its size.
extern "C" int32_t fastgen_set_num_threads(int32_t num_threads) {
    pthread_mutex_lock(&pool.one_job_at_a_time);
    while (pool.run_state.load() != HAS_ENDED) {  // no thread may leave during a run
        pthread_mutex_unlock(&pool.one_job_at_a_time);
        help_run(pool.run_number.load());
        pthread_mutex_lock(&pool.one_job_at_a_time);
    }
    const int wanted = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    int size = pool.num_threads;
    sigset_t all, before;  // signals are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pool.num_wanted = wanted;
    for (; size < wanted; ++size) {
        if (pthread_create(&pool.workers[size], nullptr, worker, reinterpret_cast<void*>(intptr_t(size))) != 0) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    move_epoch();
    while (size > wanted) pthread_join(pool.workers[--size], nullptr);
    pool.num_threads = size;
    pthread_mutex_unlock(&pool.one_job_at_a_time);
    return size;
}
