// A thread's piece of an attention: all segments of a task, or one of them.
#pragma once
#include "attention_rows.h"

namespace {

void load_queries(const Batch& batch, const Task& task, Scratch& scratch) {
    const float* first = batch.q + batch.cu_seqlens_q[task.sequence] * batch.q_stride;
    for (int64_t i = 0; i < task.size(); ++i) {
        const int64_t head = task.first_head + i / task.num_rows, r = i % task.num_rows;
        const float* q = first + task.token(r) * batch.q_stride + task.query_head(head, r) * D;
#if FASTGEN_BF16_DOT
        narrow_to_bf16(q, D, scratch.q[i]);
#else
        std::memcpy(scratch.q[i], q, D * sizeof(float));
#endif
    }
}

void write_out(const Batch& batch, const Task& task, const State* states) {
    float* first = batch.out + batch.cu_seqlens_q[task.sequence] * N * DV;
    for (int64_t i = 0; i < task.size(); ++i) {
        const int64_t head = task.first_head + i / task.num_rows, r = i % task.num_rows;
        float* out = first + (task.token(r) * N + task.query_head(head, r)) * DV;
        const float total = sum_of(states[i].total);
        for (int64_t d = 0; d < DV; ++d) out[d] = states[i].mixed[d] / total;
    }
}

// Where a segment of a task's keys begins.
int64_t first_of(const Task& task, int64_t segment) {
    return std::max(segment * SEGMENT, task.first_key(0) / TILE * TILE);
}

Place first_place(const Batch& batch, const Task& task, int64_t segment) {
    return find(batch, task, task.first_head, first_of(task, segment), task.end());
}

// One segment of a task's keys. A tile's heads come one after the other, since they lie side by side in its blocks:
// memory is read fastest in long pieces. Meanwhile the next tile is prefetched, and at the end the one `after` the segment.
void attend_segment(const Batch& batch, const Task& task, int64_t segment, const Place& after, Scratch& scratch,
                    State* states) {
    for (int64_t i = 0; i < task.size(); ++i) states[i].clear();
    const int64_t end = std::min((segment + 1) * SEGMENT, task.end());
    int64_t first = first_of(task, segment), head = 0;
    for (Place here = first_place(batch, task, segment), next; first < end; here = next) {
        int64_t next_first = first, next_head = head + 1;
        if (next_head == task.num_heads) next_head = 0, next_first += TILE;
        next = next_first < end ? find(batch, task, task.first_head + next_head, next_first, end) : after;
        const int64_t state = head * task.num_rows;
        attend_tile(batch, task, task.first_head + head, scratch.q + state, here, next, scratch, states + state);
        first = next_first;
        head = next_head;
    }
}

// Folds a segment's states into those of all before it.
void fold(State* all, const State* segment, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const float best = std::max(all[r].best, segment[r].best), origin = finite(best);
        const f32v keep = power_of_2(all_lanes(all[r].best - origin));
        const f32v add = power_of_2(all_lanes(segment[r].best - origin));
        all[r].best = best;
        all[r].total = all[r].total * keep + segment[r].total * add;
        for (int d = 0; d < DV_LANES; d += LANES) {
            const f32v mixed = load<f32v>(all[r].mixed + d) * keep + load<f32v>(segment[r].mixed + d) * add;
            store(all[r].mixed + d, mixed);
        }
    }
}

void run_task(const Batch& batch, const Task& task, const Place& after, Scratch& scratch) {
    load_queries(batch, task, scratch);
    const int64_t first = task.first_segment(), end = first + task.num_segments();
    for (int64_t segment = first; segment < end; ++segment) {
        const Place next = segment + 1 < end ? first_place(batch, task, segment + 1) : after;
        attend_segment(batch, task, segment, next, scratch, segment == first ? scratch.all : scratch.segment);
        if (segment > first) fold(scratch.all, scratch.segment, task.size());
    }
    write_out(batch, task, scratch.all);
}

// One piece of work for the pool: all of a task from its first segment on, or one segment, whose states go into the
// workspace from first_state on.
struct Piece {
    int64_t task, segment, first_state;
};

void run(const Batch& batch, const Task& task, const Piece& piece, State* states, const Place& after, Scratch& scratch) {
    if (piece.first_state < 0) return run_task(batch, task, after, scratch);
    load_queries(batch, task, scratch);
    attend_segment(batch, task, piece.segment, after, scratch, states + piece.first_state);
}

// The memory that the caller gives: one Scratch for each thread, tasks, pieces, and states as far as it reaches.
struct Workspace {
    uint8_t* first_scratch;
    int64_t num_threads, scratch_bytes;
    Task* tasks;
    Piece* pieces;
    State* states;
    int64_t max_states;

    Scratch& scratch(int64_t i) const { return *reinterpret_cast<Scratch*>(first_scratch + i * scratch_bytes); }

    // A scratch that no other thread works on. The pool gives each thread a range of pieces of its own, so the first
    // that is tried is most often free, and the one that the thread used last.
    Scratch& take_scratch(int64_t piece, int64_t num_pieces) const {
        for (int64_t i = piece * num_threads / num_pieces;; i = i + 1 < num_threads ? i + 1 : 0) {
            if (scratch(i).taken.exchange(1, std::memory_order_acquire) == 0) return scratch(i);
        }
    }
};

static_assert(sizeof(Task) == 64 && sizeof(Piece) == 24, "as ops/attention/cpp.py counts them");

constexpr int64_t up_to_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays the workspace out. It traps where the caller counted too few bytes.
Workspace lay_out(uint8_t* workspace, int64_t workspace_bytes, int64_t num_threads, int64_t scratch_bytes,
                  int64_t max_tasks, int64_t max_pieces) {
    uint8_t* next = workspace + num_threads * scratch_bytes;
    Task* tasks = reinterpret_cast<Task*>(next);
    next += up_to_64(max_tasks * sizeof(Task));
    Piece* pieces = reinterpret_cast<Piece*>(next);
    next += up_to_64(max_pieces * sizeof(Piece));
    const int64_t rest = workspace + workspace_bytes - next;
    if (scratch_bytes < int64_t(sizeof(Scratch)) || rest < 0) __builtin_trap();
    State* states = reinterpret_cast<State*>(next);
    const Workspace room = {workspace, num_threads, scratch_bytes, tasks, pieces, states, rest / int64_t(sizeof(State))};
    for (int64_t i = 0; i < num_threads; ++i) room.scratch(i).taken.store(0, std::memory_order_relaxed);
    return room;
}

// Calls visit(first, count) for the fewest parts of at most `most` of n things, as even as can be.
template <class Visit>
void visit_parts(int64_t n, int64_t most, Visit&& visit) {
    const int64_t num_parts = (n + most - 1) / most;
    for (int64_t i = 0; i < num_parts; ++i) visit(n * i / num_parts, n * (i + 1) / num_parts - n * i / num_parts);
}

}  // namespace
