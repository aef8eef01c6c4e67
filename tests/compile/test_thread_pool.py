"""The thread pool: every chunk once, work taken over from late threads, quiet when idle, usable after a fork."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import MAX_THREADS, ThreadPool, load_thread_pool, thread_pool_spec
from fastgen.compile.render import render
from fastgen.errors import InvalidArgumentError

CHUNK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NO_SLOTS = torch.zeros(1, dtype=torch.int64)
# For what comes at once on an idle machine: reached only where something hangs.
DEADLINE_S = 300


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = load_thread_pool(KernelLoader(CppBuilder("portable")))
    before = pool.num_threads
    yield pool
    pool.resize(before)


def parallel_for(num_chunks: int, work: Callable[[int], None]) -> None:
    run = ctypes.CDLL(None).fastgen_parallel_for
    run.argtypes, run.restype = [CHUNK, ctypes.c_void_p, ctypes.c_int64], None
    run(CHUNK(lambda _, chunk: work(chunk)), None, num_chunks)


def address_of(run: ctypes._CFunctionType) -> int:
    return ctypes.cast(run, ctypes.c_void_p).value or 0


def pool_threads() -> dict[str, dict[str, str]]:
    """Returns what the system says of each thread of the pool but its caller."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # it has just ended
            continue
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if facts["Name"].startswith("fastgen-"):
            found[facts["Name"]] = facts
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_chunk_runs_once_on_any_number_of_threads(pool: ThreadPool) -> None:
    draw = random.Random(5)
    for _ in range(60):
        num_threads, num_chunks = draw.randint(1, 6), draw.choice([0, 1, 2, 3, 5, 17, 100])
        assert pool.resize(num_threads) == pool.num_threads == num_threads
        done = Counter[int]()
        parallel_for(num_chunks, lambda chunk, done=done: done.update([chunk]))  # type: ignore[misc]
        assert done == Counter(range(num_chunks)), (num_threads, num_chunks)


def test_the_others_take_over_what_a_late_thread_would_have_done(pool: ThreadPool) -> None:
    """Whichever thread it is that is late, and whenever it begins: nothing is left that only it would do."""
    pool.resize(2)
    others = threading.Event()
    done = Counter[int]()
    overtaken: list[bool] = []

    def work(chunk: int) -> None:
        done.update([chunk])
        if len(done) == 12:
            others.set()
        if chunk == 0:  # held up until everything else is begun, its own half included
            overtaken.append(others.wait(DEADLINE_S))

    for _ in range(20):
        others.clear()
        done.clear()
        parallel_for(12, work)
        assert (done, overtaken.pop()) == (Counter(range(12)), True)


def test_a_late_thread_may_run_on_every_core_again(pool: ThreadPool) -> None:
    """The caller waits for a worker, and may move it onto its own core meanwhile."""
    pool.resize(2)
    caller, begun = threading.get_native_id(), threading.Event()

    def work(chunk: int) -> None:
        if threading.get_native_id() == caller:
            assert begun.wait(DEADLINE_S)
        else:
            begun.set()
            time.sleep(0.03)

    for _ in range(3):
        begun.clear()
        parallel_for(2, work)
    allowed = {int(facts["Cpus_allowed"].replace(",", ""), 16) for facts in pool_threads().values()}
    assert allowed == {sum(1 << core for core in os.sched_getaffinity(0))}


def test_a_job_within_a_chunk_runs_on_that_thread(pool: ThreadPool) -> None:
    pool.resize(3)
    seen = []

    def outer(chunk: int) -> None:
        here = threading.get_native_id()
        parallel_for(4, lambda inner: seen.append((chunk, inner, threading.get_native_id() == here)))

    parallel_for(5, outer)
    assert sorted(seen) == [(chunk, inner, True) for chunk in range(5) for inner in range(4)]


def test_jobs_from_several_threads_do_not_mix(pool: ThreadPool) -> None:
    pool.resize(2)
    done = [Counter[int]() for _ in range(4)]

    def caller(index: int) -> None:
        for _ in range(25):
            parallel_for(9, lambda chunk: done[index].update([chunk]))

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert done == [Counter(dict.fromkeys(range(9), 25))] * 4


def test_idle_threads_sleep_and_take_no_signals(pool: ThreadPool) -> None:
    pool.resize(4)
    parallel_for(100, lambda chunk: None)

    def all_sleep_on() -> bool:
        """No thread wakes to look for work. One that is about to sleep may still be on its way."""
        before = pool_threads()
        time.sleep(0.1)
        after = pool_threads()
        switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        return [facts["State"][0] for facts in after.values()] == ["S"] * 3 and all(
            after[name][key] == before.get(name, {}).get(key) for name in after for key in switches
        )

    wait_until(all_sleep_on)
    blocked = [int(facts["SigBlk"], 16) for facts in pool_threads().values()]
    assert len(blocked) == 3
    assert all(mask >> (signal.SIGINT - 1) & 1 for mask in blocked)


def test_threads_go_when_the_pool_shrinks(pool: ThreadPool) -> None:
    pool.resize(5)
    wait_until(lambda: sorted(pool_threads()) == ["fastgen-1", "fastgen-2", "fastgen-3", "fastgen-4"])
    pool.resize(2)
    wait_until(lambda: sorted(pool_threads()) == ["fastgen-1"])


def test_a_thread_that_must_end_while_it_starts_ends(pool: ThreadPool) -> None:
    """Repeated hundreds of times, since the race is short: a thread that misses the signal would never end."""
    for size in range(2, 8):
        for _ in range(100):
            pool.resize(size)
            pool.resize(1)
    wait_until(lambda: not pool_threads())


def test_a_run_continues_without_its_caller_which_helps_in_the_end(pool: ThreadPool) -> None:
    """Its second job cannot end before its caller takes a chunk, which it does only when it waits for the end."""
    pool.resize(2)
    here, done, helped = threading.get_native_id(), Counter[int](), threading.Event()
    first_is_over = threading.Event()

    def work(chunk: int) -> None:
        done.update([chunk])
        if threading.get_native_id() == here:
            helped.set()
        else:
            assert helped.wait(DEADLINE_S)

    def run(slots: int) -> None:
        parallel_for(5, lambda chunk: done.update([100 + chunk]))
        first_is_over.set()
        parallel_for(8, work)

    function = RUN(run)
    number = pool.start(address_of(function), NO_SLOTS)
    assert number > 0
    assert first_is_over.wait(DEADLINE_S)
    assert pool.start(address_of(function), NO_SLOTS) == 0  # one at a time
    before_s = time.perf_counter()
    ended_s = pool.end(number)
    assert before_s < ended_s < time.perf_counter()
    assert helped.is_set()
    assert done == Counter([*range(8), *range(100, 105)])
    assert pool.end(number) == ended_s  # it has ended already


def test_a_run_is_given_its_slots_and_another_may_follow_unasked(pool: ThreadPool) -> None:
    pool.resize(3)
    seen: list[int] = []
    function = RUN(seen.append)
    numbers = []
    for _ in range(3):
        numbers.append(pool.start(address_of(function), NO_SLOTS))
        wait_until(lambda: len(seen) == len(numbers))
        pool.end(numbers[0])  # the caller of the first one does not wait for jobs that others started since
        pool.end(numbers[-1])
    assert seen == [NO_SLOTS.data_ptr()] * 3
    assert numbers == sorted(set(numbers))


def test_nothing_is_started_where_there_is_no_other_thread(pool: ThreadPool) -> None:
    pool.resize(1)
    assert pool.start(address_of(RUN(lambda slots: None)), NO_SLOTS) == 0


def test_a_pool_is_resized_when_a_run_has_ended(pool: ThreadPool) -> None:
    """Its thread may be one that is to go."""
    for size in (1, 2, 4):
        pool.resize(3)
        done = Counter[int]()
        function = RUN(lambda slots, done=done: [parallel_for(7, lambda each: done.update([each])) for _ in range(20)])
        number = pool.start(address_of(function), NO_SLOTS)
        assert pool.resize(size) == size
        assert done == Counter(dict.fromkeys(range(7), 20))
        pool.end(number)


@pytest.mark.parametrize("num_threads", [0, -1, MAX_THREADS + 1])
def test_an_impossible_size_changes_nothing(pool: ThreadPool, num_threads: int) -> None:
    pool.resize(2)
    with pytest.raises(InvalidArgumentError, match=f"num_threads={num_threads}: expected 1 to {MAX_THREADS}"):
        pool.resize(num_threads)
    assert pool.num_threads == 2


def test_there_is_one_pool_in_the_process(pool: ThreadPool) -> None:
    assert load_thread_pool(KernelLoader(CppBuilder("portable"))) is pool


def test_a_forked_child_has_a_pool_of_its_own(pool: ThreadPool) -> None:
    pool.resize(3)
    parallel_for(10, lambda chunk: None)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(DEADLINE_S)
            done = Counter[int]()
            size_at_first = pool.num_threads
            parallel_for(10, lambda chunk: done.update([chunk]))
            pool.resize(2)
            parallel_for(10, lambda chunk: done.update([chunk]))
            is_right = (size_at_first, pool.num_threads, done) == (1, 2, Counter([*range(10)] * 2))
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.num_threads == 3


@pytest.mark.slow
def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    """Three callers, jobs of all sizes and runs, resized all the while; every chunk adds to plain memory of its own."""
    (tmp_path / "main.cpp").write_text(
        render(thread_pool_spec())
        + """
#include <cstdlib>
#include <thread>
#include <vector>
struct Job { std::vector<int> counts; };
int main() {
    fastgen_set_num_threads(4);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([caller] {
            for (int round = 0; round < 3000; ++round) {
                Job job{std::vector<int>((round * 7 + caller) % 40)};
                fastgen_parallel_for([](void* job, int64_t chunk) { ++static_cast<Job*>(job)->counts[chunk]; }, &job,
                                     int64_t(job.counts.size()));
                for (int count : job.counts) if (count != 1) return std::abort();
                int runs[2] = {};
                const int64_t slots[1] = {int64_t(runs)};
                const int64_t run = fastgen_start_run([](const int64_t* slots) {
                    int* runs = reinterpret_cast<int*>(slots[0]);
                    for (int job = 0; job < 3; ++job) {
                        fastgen_parallel_for([](void* at, int64_t chunk) { ++static_cast<int*>(at)[chunk]; }, runs, 2);
                    }
                }, slots);
                if (round % 3 == 0) fastgen_parallel_for([](void*, int64_t) {}, nullptr, 5);
                if (run != 0) fastgen_end_run(run);
                if (runs[0] != (run != 0 ? 3 : 0) || runs[0] != runs[1]) return std::abort();
                if (caller == 0 && round % 100 == 0) fastgen_set_num_threads(1 + round / 100 % 5);
                if (round % 500 == 0) usleep(2000);  // long enough for all to fall asleep
            }
        });
    }
    for (auto& caller : callers) caller.join();
    std::puts("done");
}
"""
    )
    command = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "main.cpp", "-o", "main", "-pthread"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")
