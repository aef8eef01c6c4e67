# sampling_draw(V=1024, block=1024, slices=1, penalties=True, mask=True, bias=True, enable_fp_fusion=False, num_warps=2) for triton

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


@triton.jit
def sampling_draw_v1024_block1024_slices1_penalties_mask_bias(logits_ptr, slots_ptr, reals_ptr, integers_ptr, positions_ptr, seeds_ptr, uses_ptr, mask_ptr, bias_ptr, peaks_ptr, states_ptr, sums_ptr, drawn_ptr, drawn_ids_ptr, masses_ptr, list_keys_ptr, list_ids_ptr, list_counts_ptr):
    """One slice of a drawn row. Without top-k and top-p it draws among its own tokens. Else it appends those that may
    be kept to the row's list, in no particular order: what follows does not depend on it.
    """
    row = tl.program_id(0) // SLICES
    part = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    reals = reals_ptr + slot.to(tl.int64) * REALS
    integers = integers_ptr + slot.to(tl.int64) * INTEGERS
    parts = row.to(tl.int64) * SLICES + tl.arange(0, BLOCK_SLICES)
    is_part = tl.arange(0, BLOCK_SLICES) < SLICES
    temperature = tl.load(reals + TEMPERATURE)
    if (temperature == 0) | (tl.max(tl.load(states_ptr + parts, is_part, NOTHING), 0) != FINITE):
        return
    token = tl.program_id(0) % SLICES * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    raw = tl.load(logits_ptr + row.to(tl.int64) * V + token, inside, float("-inf"))
    score = raw
    adjusts = tl.load(integers + ADJUSTS)
    if (adjusts & 1) != 0:
        repetition = tl.load(reals + REPETITION)
        uses = tl.load(uses_ptr + slot.to(tl.int64) * V + token, inside, 0)
        count = (uses >> 1).to(tl.float32)
        penalised = tl.where(score < 0, score * repetition, tl.div_rn(score, repetition))
        score = tl.where(uses > 0, penalised, score)
        score = score - tl.load(reals + PRESENCE) * (count > 0).to(tl.float32)
        score = score - tl.load(reals + FREQUENCY) * count
        score = tl.where(score > LARGEST, LARGEST, score)  # of a tiny repetition penalty; NaN stays NaN
    if (adjusts & 2) != 0:
        word = tl.load(mask_ptr + slot.to(tl.int64) * 32 + token // 32, inside, 0)
        score = tl.where(((word >> (token % 32)) & 1) != 0, score, float("-inf"))
    if (adjusts & 4) != 0:
        score = score + tl.load(bias_ptr + slot.to(tl.int64) * V + token, inside, 0.0)
        score = tl.where(score > LARGEST, LARGEST, score)

    peaks = tl.load(peaks_ptr + parts, is_part, float("-inf"))
    peak = tl.max(peaks, 0)
    # Only where the division would overflow are scores taken relative to the largest: that costs a rounding.
    quotient = tl.div_rn(peak, temperature)
    shift = tl.where(tl.abs(quotient) == float("inf"), peak, 0.0)
    x = tl.div_rn(score - shift, temperature) - tl.div_rn(peak - shift, temperature)

    top_k = tl.load(integers + TOP_K)
    tail_p = tl.load(reals + TAIL_P)
    if (top_k == 0) & (tail_p == 0):
        min_p = tl.load(reals + MIN_P)
        x = tl.where(tl.exp(x) >= min_p, x, float("-inf"))
        quad = tl.program_id(0) % SLICES * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        index = tl.load(integers + SEQUENCE_INDEX)
        position = tl.load(positions_ptr + row)
        word0, word1, word2, word3 = tl.philox(tl.load(seeds_ptr + slot), quad, quad * 0 + position, quad * 0 + index, quad * 0)
        word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
        x += gumbel(word)
        best = tl.max(x, 0)
        tl.store(drawn_ptr + part, best)
        tl.store(drawn_ids_ptr + part, tl.min(tl.where(x == best, token, V), 0))
    else:
        key = (0.0 - x).to(tl.int32, bitcast=True)
        finite = x > float("-inf")
        tl.store(masses_ptr + part, tl.sum(tl.where(finite, (tl.exp(x) * UNIT).to(tl.int64), 0), 0))
        limit = LAST_KEY
        if top_k > 0:
            # Of the row's k best those here are among this slice's k best: narrow down to little more than those.
            wanted = tl.minimum(top_k, tl.sum(finite.to(tl.int32), 0))
            low = 0
            for _ in range(12):
                middle = low + (limit - low) // 2
                enough = tl.sum((finite & (key <= middle)).to(tl.int32), 0) >= wanted
                limit = tl.where(enough, middle, limit)
                low = tl.where(enough, low, middle + 1)
        else:
            # All tokens with less than this weight together have less than the tail that is cut off.
            sums = tl.load(sums_ptr + parts, is_part, 0.0)
            total = tl.sum(tl.where(sums > 0, sums * tl.exp(tl.div_rn(peaks - peak, temperature)), 0.0), 0)
            bound = tl.minimum(tl.log(tail_p * total / V) - 0.01, 0.0)
            limit = tl.minimum(limit, (0.0 - bound).to(tl.int32, bitcast=True))
        listed = finite & (key <= limit)
        count = tl.sum(listed.to(tl.int32), 0)
        first = tl.atomic_add(list_counts_ptr + row, count, sem="relaxed")
        place = row.to(tl.int64) * V + first + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(list_ids_ptr + place, token, listed)
        tl.store(list_keys_ptr + place, key, listed)
