# sampling_scan(V=1024, block=1024, slices=1, penalties=True, mask=True, bias=True, logprobs=True, num_top=21, enable_fp_fusion=False, num_warps=2, launch_pdl=True) for triton
# llama on sm_90, weights in bf16
# enable_fp_fusion=False
# num_warps=2
# launch_pdl=True
# logits: in fp32
# slots: in i32
# reals: in fp32
# integers: in i32
# uses: in i32
# mask: in i32
# bias: in fp32
# peaks: out fp32
# states: out i32
# peak_ids: out i32
# sums: out fp32
# raw_peaks: out fp32
# raw_sums: out fp32
# slice_top: out i32
# slice_top_ids: out i32
# list_counts: out i32

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
def sampling_scan_v1024_block1024_slices1_penalties_mask_bias_logprobs_num_top21(logits_ptr, slots_ptr, reals_ptr, integers_ptr, uses_ptr, mask_ptr, bias_ptr, peaks_ptr, states_ptr, peak_ids_ptr, sums_ptr, raw_peaks_ptr, raw_sums_ptr, slice_top_ptr, slice_top_ids_ptr, list_counts_ptr):
    """One slice of a row: its largest score, lowest id first, sums of exponentials, and whether all is finite."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // SLICES
    part = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    reals = reals_ptr + slot.to(tl.int64) * REALS
    integers = integers_ptr + slot.to(tl.int64) * INTEGERS
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


    bad = (raw != raw) | (raw == float("inf")) | (score != score)
    state = tl.where(bad, BAD, tl.where(score > float("-inf"), FINITE, NOTHING))
    tl.store(states_ptr + part, tl.max(state, 0))
    peak = tl.max(score, 0)
    tl.store(peaks_ptr + part, peak)
    tl.store(peak_ids_ptr + part, tl.min(tl.where(score == peak, token, V), 0))
    if tl.program_id(0) % SLICES == 0:
        tl.store(list_counts_ptr + row, 0)

    temperature = tl.load(reals + TEMPERATURE)
    if (temperature > 0) & (tl.load(reals + TAIL_P) > 0):
        # An estimate of the sum of weights, relative to this slice's peak: the next kernel only needs a bound.
        weights = tl.where(score > float("-inf"), tl.exp(tl.div_rn(score - peak, temperature)), 0.0)
        tl.store(sums_ptr + part, tl.sum(weights, 0))

    if tl.load(integers + LOGPROBS) != 0:
        raw_peak = tl.max(raw, 0)
        tl.store(raw_peaks_ptr + part, raw_peak)
        tl.store(raw_sums_ptr + part, tl.sum(tl.where(raw > float("-inf"), tl.exp(raw - raw_peak), 0.0), 0))
        LOWEST: tl.constexpr = -2147483648
        bits = tl.where(raw == 0, 0.0, raw).to(tl.int32, bitcast=True)
        rank = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)  # orders as the numbers do
        for place in range(21):
            best = tl.max(rank, 0)
            best_id = tl.min(tl.where(rank == best, token, 2147483647), 0)
            tl.store(slice_top_ptr + part * 21 + place, best)
            tl.store(slice_top_ids_ptr + part * 21 + place, best_id)
            rank = tl.where(token == best_id, LOWEST, rank)
