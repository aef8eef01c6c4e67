# moe_route(E=16, K=2, scoring=softmax, normalize=True, corrected=False, block_t=32, num_warps=4) for triton

import triton
import triton.language as tl

# T tokens, K of E experts each. Experts lie in GROUPS of SIZE, each padded to a power of two: column c of BLOCK columns
# is member c % BLOCK_SIZE of group c // BLOCK_SIZE.
E = tl.constexpr(16)
K = tl.constexpr(2)
GROUPS = tl.constexpr(1)
SIZE = tl.constexpr(16)
BLOCK_SIZE = tl.constexpr(16)
BLOCK_GROUPS = tl.constexpr(1)
BLOCK = tl.constexpr(16)
BLOCK_K = tl.constexpr(2)
BLOCK_T = tl.constexpr(32)
GONE = tl.constexpr(-2147483648)  # below every number's rank: no expert, or chosen already


@triton.jit
def rank_of(x):
    """An integer that orders as the numbers do; NaN comes first or last, yet never is GONE."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=['num_tokens'])
def moe_route_e16_k2_softmax_normalize_block_t32(logits_ptr, experts_ptr, weights_ptr, num_tokens):
    """The K best experts of BLOCK_T tokens, best first, ties to the lowest id."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.minimum(row, num_tokens - 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    expert = column // BLOCK_SIZE * SIZE + column % BLOCK_SIZE
    is_expert = (column % BLOCK_SIZE < SIZE) & (column // BLOCK_SIZE < GROUPS)
    logits = tl.load(logits_ptr + token[:, None] * E + expert[None, :], is_expert[None, :], float("-inf"))
    weight = tl.exp(logits - tl.max(logits, 1)[:, None])
    score = weight / tl.sum(weight, 1)[:, None]
    choice = score
    rank = tl.where(is_expert[None, :], rank_of(choice), GONE)

    index = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.full([BLOCK_T, BLOCK_K], 0, tl.int32)
    weights = tl.full([BLOCK_T, BLOCK_K], float("-inf"), tl.float32)
    for place in range(K):
        best = tl.argmax(rank, 1, tie_break_left=True)
        is_best = column[None, :] == best[:, None]
        chosen = tl.where(index == place, (best // BLOCK_SIZE * SIZE + best % BLOCK_SIZE)[:, None], chosen)
        weights = tl.where(index == place, tl.sum(tl.where(is_best, score, 0.0), 1)[:, None], weights)
        rank = tl.where(is_best, GONE, rank)
    total = tl.sum(tl.where(index < K, weights, 0.0), 1)
    weights = weights / tl.maximum(total, 1e-20)[:, None]  # sigmoids may all have underflowed to 0
    stored = (row < num_tokens)[:, None] & (index < K)
    tl.store(experts_ptr + token[:, None] * K + index, chosen, stored)
    tl.store(weights_ptr + token[:, None] * K + index, weights, stored)
