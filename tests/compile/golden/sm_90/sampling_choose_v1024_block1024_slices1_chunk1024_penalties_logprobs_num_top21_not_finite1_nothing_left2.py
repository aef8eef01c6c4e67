# sampling_choose(V=1024, block=1024, slices=1, chunk=1024, penalties=True, logprobs=True, num_top=21, not_finite=1, nothing_left=2, enable_fp_fusion=False, num_warps=2) for triton

import triton
import triton.language as tl

# R rows of logits [R, V]; S slots. A row is cut into SLICES of BLOCK tokens.
V = tl.constexpr(1024)
BLOCK = tl.constexpr(1024)
SLICES = tl.constexpr(1)
BLOCK_SLICES = tl.constexpr(1)
# Columns of `reals` [S, REALS] and `integers` [S, INTEGERS].
TEMPERATURE = tl.constexpr(0)
TAIL_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
REALS = tl.constexpr(6)
TOP_K = tl.constexpr(0)
SEQUENCE_INDEX = tl.constexpr(1)
ADJUSTS = tl.constexpr(2)
LOGPROBS = tl.constexpr(3)
INTEGERS = tl.constexpr(4)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of finite numbers
LAST_KEY = tl.constexpr(0x7F7FFFFF)  # the key of -LARGEST
NO_KEY = tl.constexpr(0x7F800000)  # the key of -inf
# State of a slice, and of a row the largest of its slices'.
NOTHING = tl.constexpr(0)  # it has no token that could be chosen
FINITE = tl.constexpr(1)
BAD = tl.constexpr(2)  # it holds NaN or +inf
# exp(x) of x <= 0 as an integer number of 1 / UNIT: sums that are exact, so in any order the same, and fit 63 bits.
UNIT = tl.constexpr(4503599627370496.0)


@triton.jit
def gumbel(word):
    """Gumbel noise ``-log(-log u)`` of the uniform number ``u`` in the upper 23 bits of a random word, centred."""
    steps = (word >> 9).to(tl.int32)
    u = (steps.to(tl.float32) + 0.5) * (2.0**-23)
    # -log u; near 1, where a fast logarithm has few digits, by the series in 1 - u, which fp32 holds exactly.
    v = ((8388607 - steps).to(tl.float32) + 0.5) * (2.0**-23)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * (0.25 + v * (0.2 + v * (1 / 6))))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(u)))
CHUNK = tl.constexpr(1024)  # of a row's list, read at once


@triton.jit
def up_to(list_keys_ptr, list_ids_ptr, size, first_key, last_key, last_id):
    """How many of a list's tokens have keys ``first_key … last_key`` and ids up to ``last_id``, and their mass."""
    count = 0
    mass = tl.full([], 0, tl.int64)
    for begin in range(0, size, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        key = tl.load(list_keys_ptr + place, place < size, NO_KEY)
        counted = (key >= first_key) & (key <= last_key) & (tl.load(list_ids_ptr + place, place < size, V) <= last_id)
        count += tl.sum(counted.to(tl.int32), 0)
        mass += tl.sum(tl.where(counted, (tl.exp(0.0 - key.to(tl.float32, bitcast=True)) * UNIT).to(tl.int64), 0), 0)
    return count, mass


@triton.jit
def smallest_key(list_keys_ptr, list_ids_ptr, size, last_key, target, BY_MASS: tl.constexpr):
    """The smallest key up to which the list has ``target`` tokens, or that mass, or one that keeps the same tokens.

    Returns it, and of the tokens before it and of those up to it, counts and masses.
    """
    low = 0
    high = last_key
    count_before = 0
    mass_before = tl.full([], 0, tl.int64)
    count, mass = up_to(list_keys_ptr, list_ids_ptr, size, 0, high, V)
    while (low < high) & (count - count_before > 1):
        middle = low + (high - low) // 2
        middle_count, middle_mass = up_to(list_keys_ptr, list_ids_ptr, size, 0, middle, V)
        if BY_MASS:
            found = middle_mass >= target
            exact = middle_mass == target
        else:
            found = middle_count >= target
            exact = middle_count == target
        if found:
            high = middle
            count = middle_count
            mass = middle_mass
        else:
            low = middle + 1
            count_before = middle_count
            mass_before = middle_mass
        if exact:
            low = middle
    return high, count_before, mass_before, count, mass


@triton.jit
def lowest_ids(list_keys_ptr, list_ids_ptr, size, key, target):
    """The smallest id up to which the list has ``target`` tokens with this key."""
    low = 0
    high = V
    while low < high:
        middle = low + (high - low) // 2
        count, _ = up_to(list_keys_ptr, list_ids_ptr, size, key, key, middle)
        if count >= target:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def sampling_choose_v1024_block1024_slices1_chunk1024_penalties_logprobs_num_top21_not_finite1_nothing_left2(logits_ptr, slots_ptr, reals_ptr, integers_ptr, positions_ptr, seeds_ptr, peaks_ptr, states_ptr, peak_ids_ptr, drawn_ptr, drawn_ids_ptr, masses_ptr, list_keys_ptr, list_ids_ptr, list_counts_ptr, raw_peaks_ptr, raw_sums_ptr, slice_top_ptr, slice_top_ids_ptr, uses_ptr, token_ids_ptr, sampled_ids_ptr, logprobs_ptr, top_logprobs_ptr, top_ids_ptr):
    """The token of a row: the largest score, what the slices drew, or a draw from the list of what may be kept."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    reals = reals_ptr + slot.to(tl.int64) * REALS
    integers = integers_ptr + slot.to(tl.int64) * INTEGERS
    parts = row.to(tl.int64) * SLICES + tl.arange(0, BLOCK_SLICES)
    is_part = tl.arange(0, BLOCK_SLICES) < SLICES
    state = tl.max(tl.load(states_ptr + parts, is_part, NOTHING), 0)
    if state != FINITE:
        tl.store(token_ids_ptr + row, tl.where(state == BAD, -1, -2))
        tl.store(sampled_ids_ptr + slot, 0)
        return

    top_k = tl.load(integers + TOP_K)
    tail_p = tl.load(reals + TAIL_P)
    token = V
    if tl.load(reals + TEMPERATURE) == 0:
        best = tl.load(peaks_ptr + parts, is_part, float("-inf"))
        token = tl.min(tl.where(best == tl.max(best, 0), tl.load(peak_ids_ptr + parts, is_part, V), V), 0)
    elif (top_k == 0) & (tail_p == 0):
        drawn = tl.load(drawn_ptr + parts, is_part, float("-inf"))
        token = tl.min(tl.where(drawn == tl.max(drawn, 0), tl.load(drawn_ids_ptr + parts, is_part, V), V), 0)
    else:
        list_keys = list_keys_ptr + row.to(tl.int64) * V
        list_ids = list_ids_ptr + row.to(tl.int64) * V
        size = tl.load(list_counts_ptr + row)
        last_key = LAST_KEY
        last_id = V
        total = tl.sum(tl.load(masses_ptr + parts, is_part, 0), 0)
        if top_k > 0:
            last_key, _, _, _, total = smallest_key(list_keys, list_ids, size, last_key, top_k, False)
        if tail_p > 0:
            target = total - (tail_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            target = tl.maximum(target, 1)
            last_key, before, mass_before, count, mass = smallest_key(list_keys, list_ids, size, last_key, target, True)
            tied = count - before
            if (tied > 1) & (mass > target):
                # Of equals those with the lowest ids are kept, as many as it takes.
                each = (mass - mass_before) // tied
                kept = (target - mass_before + each - 1) // each
                last_id = lowest_ids(list_keys, list_ids, size, last_key, kept)

        min_p = tl.load(reals + MIN_P)
        seed = tl.load(seeds_ptr + slot)
        position = tl.load(positions_ptr + row)
        index = tl.load(integers + SEQUENCE_INDEX)
        best = float("-inf")
        for begin in range(0, size, CHUNK):
            place = begin + tl.arange(0, CHUNK)
            key = tl.load(list_keys + place, place < size, NO_KEY)
            candidate = tl.load(list_ids + place, place < size, V)
            x = 0.0 - key.to(tl.float32, bitcast=True)
            kept = (key < last_key) | ((key == last_key) & (candidate <= last_id))
            kept = kept & (place < size) & (tl.exp(x) >= min_p)
            quad = candidate // 4
            lane = candidate % 4
            word0, word1, word2, word3 = tl.philox(seed, quad, quad * 0 + position, quad * 0 + index, quad * 0)
            word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
            x = tl.where(kept, x + gumbel(word), float("-inf"))
            chunk_best = tl.max(x, 0)
            chunk_token = tl.min(tl.where(x == chunk_best, candidate, V), 0)
            is_better = (chunk_best > best) | ((chunk_best == best) & (chunk_token < token))
            token = tl.where(is_better, chunk_token, token)
            best = tl.maximum(best, chunk_best)
    tl.store(token_ids_ptr + row, token)
    tl.store(sampled_ids_ptr + slot, token)
    if (tl.load(integers + ADJUSTS) & 1) != 0:
        use = uses_ptr + slot.to(tl.int64) * V + token
        tl.store(use, tl.load(use) + 2)

    if tl.load(integers + LOGPROBS) != 0:
        raw_peaks = tl.load(raw_peaks_ptr + parts, is_part, float("-inf"))
        raw_peak = tl.max(raw_peaks, 0)
        log_sum = tl.log(tl.sum(tl.load(raw_sums_ptr + parts, is_part, 0.0) * tl.exp(raw_peaks - raw_peak), 0))
        raw = tl.load(logits_ptr + row.to(tl.int64) * V + token)
        tl.store(logprobs_ptr + row, (raw - raw_peak) - log_sum)
        # Slices lie in the order of ids, and so do equals within one: the first of equals has the lowest id.
        LOWEST: tl.constexpr = -2147483648
        TOP: tl.constexpr = 21
        entry = tl.arange(0, 32)
        rank = tl.load(slice_top_ptr + row.to(tl.int64) * (SLICES * TOP) + entry, entry < SLICES * TOP, LOWEST)
        for place in range(TOP):
            best_rank = tl.max(rank, 0)
            first = tl.min(tl.where(rank == best_rank, entry, 2147483647), 0)
            bits = tl.where(best_rank < 0, best_rank ^ 0x7FFFFFFF, best_rank)
            top = (bits.to(tl.float32, bitcast=True) - raw_peak) - log_sum
            tl.store(top_logprobs_ptr + row.to(tl.int64) * TOP + place, top)
            top_id = tl.load(slice_top_ids_ptr + row.to(tl.int64) * (SLICES * TOP) + first)
            tl.store(top_ids_ptr + row.to(tl.int64) * TOP + place, top_id)
            rank = tl.where(entry == first, LOWEST, rank)
