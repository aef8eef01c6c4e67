// Where rank 0 puts the tokens of steady decodes for the others; fastgen/runtime/step/mailbox.py says how.
#pragma once
#include "ranks.h"

// Words of 64 bits: the first line, then token ids, places of block tables, blocks.
struct Mailbox {
    int64_t* words;
    int64_t max_rows, max_updates;

    std::atomic<int64_t>& number() const { return *reinterpret_cast<std::atomic<int64_t>*>(words); }
    std::atomic<int64_t>& sleepers() const { return *reinterpret_cast<std::atomic<int64_t>*>(words + 1); }
    int64_t& num_rows() const { return words[2]; }
    int64_t& num_updates() const { return words[3]; }
    int64_t* token_ids() const { return words + 8; }
    int64_t* places() const { return words + 8 + max_rows; }
    int64_t* blocks() const { return places() + max_updates; }
};
