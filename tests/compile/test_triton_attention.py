"""The Triton kernels of paged attention: interpreted, against the torch reference; and built for GPUs not at hand.

Everything that a kernel must not read holds NaN or an impossible block id, and so do the buffers before each run.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from fastgen.compile.ops.attention.reference import paged_attention
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import Tiling
from fastgen.compile.ops.attention.triton import MAX_DECODE_QUERIES, AttentionKernel, AttentionPlan, attention_specs
from fastgen.compile.spec import KernelSpec
from tests.compile.attention_cases import (
    TOLERANCE,
    Case,
    Rows,
    Subject,
    differences_of_one_subject,
    draw_rows,
    make_batch,
    plans,
    reference,
    shape_of,
    specs_of,
    worst_difference,
)
from tests.fast import cases

AHEAD = Tiling(32, 16, 4, 1, ahead=True, persistent=True)
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 11},
    "tiny window": {"sliding_window": 1},
    "alibi": {"alibi": "plain"},
    "scaled alibi": {"alibi": "scaled", "alibi_dtype": "fp16"},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "two-part head": {"head_dim": 48},
    "padded head": {"head_dim": 20},
    "other values": {"v_dim": 32},
    "latent": {"head_dim": 48, "v_dim": 32, "values_in_keys": True, "num_heads": 4, "num_kv_heads": 1},
    "whole blocks": {"block_size": 32},
    "blocks of three": {"block_size": 3},
    "groups of three": {"num_heads": 3, "num_kv_heads": 1},
    "strided queries": {"q_stride": 256},
    "fp16": {"dtype": "fp16"},
}
MIXED: Rows = [(19, 1), (0, 11), (0, 0), (33, 2)]


def compatible(*names: str) -> bool:
    """Returns whether they change different things."""
    keys = [key for name in names for key in FEATURES[name]]
    return len(keys) == len(set(keys))


def case_of(*names: str, rows: Rows = MIXED, num_padding: int = 2, **more: Any) -> Case:
    changes = {key: value for name in names for key, value in FEATURES[name].items()} | more
    return Case(rows, shape_of(**changes), num_padding=num_padding)


def check(cases: list[Case]) -> None:
    for case, difference in zip(cases, worst_difference(cases), strict=True):
        assert difference <= TOLERANCE[case.shape.dtype], f"differs by {difference:.1e}: {case}"


# Answers


@pytest.mark.kernels
@pytest.mark.slow  # pairs have each feature
def test_every_feature() -> None:
    check([case_of(), *(case_of(name) for name in FEATURES)])


# Prompts of several tiles that all rows see; of one, and of none. Programs have several tiles, and one.
IN_TURN: list[tuple[Rows, int]] = [([(40, 33), (0, 70), (15, 1)], 2), ([(16, 9), (0, 16), (3, 12)], 30)]


def ahead(name: str, batch: tuple[Rows, int]) -> Case:
    return replace(case_of(name, rows=batch[0]), chunk=AHEAD, num_sms=batch[1])


@pytest.mark.kernels
def test_every_feature_with_the_next_product_ahead_and_tiles_in_turn() -> None:
    """Every other feature, with one of the batches each. The slow test has all, with both."""
    check([ahead(*each) for each in zip([*FEATURES][::2], itertools.cycle(IN_TURN), strict=False)])


@pytest.mark.kernels
@pytest.mark.slow
def test_every_feature_and_batch_with_the_next_product_ahead_and_tiles_in_turn() -> None:
    check([ahead(*each) for each in itertools.product(FEATURES, IN_TURN)])


@pytest.mark.gpu
def test_every_feature_in_bf16() -> None:
    """The interpreter's dots of bf16 are wrong."""
    check([case_of(name, dtype="bf16") for name in FEATURES if "dtype" not in FEATURES[name]])


@pytest.mark.kernels
def test_feature_pairs() -> None:
    """Some of them, drawn so that each feature is in one. The slow test has them all."""
    pairs = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(*pair)]
    drawn = Random(4).sample(pairs, 20)
    assert {name for pair in drawn for name in pair} == FEATURES.keys()
    check([case_of(), *(case_of(*pair, rows=MIXED[1:]) for pair in drawn)])


@pytest.mark.kernels
@pytest.mark.slow
def test_every_feature_pair_and_triple() -> None:
    pairs = [case_of(*pair) for pair in itertools.combinations(FEATURES, 2) if compatible(*pair)]
    triples = [case_of(*names) for names in itertools.combinations(FEATURES, 3) if compatible(*names)]
    check(pairs + Random(5).sample(triples, 100))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", cases(["decodes", "chunks", "mixed", "long"], fast=["mixed", "long"]))
def test_drawn_batches_in_the_same_buffers(kind: str) -> None:
    """Grids and buffers are one budget's; lengths, mix and number of sequences change from step to step."""
    rng = Random(f"batches of {kind}")
    case = Case([(0, 0)] * 5, shape_of(sliding_window=rng.choice([None, 7])), num_padding=60)
    batches = []
    while len(batches) < 4:
        rows = draw_rows(rng, kind, 5, case.shape.block_size)
        if sum(new for _, new in rows) <= case.num_tokens:
            batches.append(rows)
    differences = differences_of_one_subject(case, batches)
    for rows, difference in zip(batches, differences, strict=True):
        assert difference <= TOLERANCE["fp32"], f"differs by {difference:.1e}: {rows} {case}"


@pytest.mark.kernels
def test_head_counts_and_sizes() -> None:
    """Grouped heads in odd numbers, 71 among them (Falcon-7B); the head sizes of models; latent attention's own."""
    rows: Rows = [(21, 1), (3, 9)]
    shapes = [
        shape_of(num_heads=2, num_kv_heads=2),
        shape_of(num_heads=8, num_kv_heads=1),
        shape_of(num_heads=71, num_kv_heads=1),
        *(shape_of(head_dim=size, num_heads=2, num_kv_heads=1) for size in (64, 80, 96, 128, 256)),
        shape_of(head_dim=192, v_dim=128, num_heads=2, num_kv_heads=2),
        shape_of(head_dim=576, v_dim=512, values_in_keys=True, num_heads=4, num_kv_heads=1),
    ]
    check([Case(rows, replace(shape, scale=shape.head_dim**-0.5)) for shape in shapes])


@pytest.mark.kernels
def test_block_sizes() -> None:
    shapes = [shape_of(block_size=size, num_heads=2, num_kv_heads=1) for size in (1, 4, 16, 64, 256)]
    rows: Rows = [(14, 1), (15, 1), (63, 1), (0, 16), (14, 9)]
    check([Case(rows, shape) for shape in shapes])


@pytest.mark.kernels
@pytest.mark.slow
def test_many_drawn_batches() -> None:
    rng, cases = Random(6), []
    while len(cases) < 150:
        names = rng.sample(sorted(FEATURES), rng.randint(0, 5))
        if compatible(*names):
            rows = draw_rows(rng, rng.choice(["decodes", "chunks", "mixed", "long"]), rng.randint(1, 7), 4)
            case = case_of(*names, rows=rows, num_padding=rng.choice([0, 1, 30]))
            chunk, decode = rng.choice([16, 64, 128]), rng.choice([16, 32])
            cases.append(
                replace(
                    case,
                    chunk=Tiling(chunk, rng.choice([16, 32]), 4, 1),
                    decode=Tiling(decode, rng.choice([16, 32]), 4, 1, programs_per_sm=rng.choice([1, 2])),
                    num_sms=rng.choice([1, 2, 5, 12]),
                    seed=len(cases),
                )
            )
    check(cases)


@pytest.mark.kernels
def test_nothing_at_all() -> None:
    """A batch without sequences, as when a graph is captured: every row is padding, and becomes zero."""
    check([Case([(0, 0), (0, 0)], shape_of(), num_padding=13)])


def test_reference_with_sinks() -> None:
    """The torch reference against the definition: a sink takes its part of the softmax and adds nothing."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, size, 3, generator=generator) for size in (4, 2, 2))
    keys, values = torch.randn(2, 8, 2, 3, generator=generator)
    keys[4], values[4] = k[0], v[0]
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    tables, starts, lens = torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([5])
    found = paged_attention(
        q, keys[None], values[None], tables, starts, lens, scale=0.7, sliding_window=None, sinks=sinks
    )
    for head in range(4):
        scores = keys[:5, head // 2].double().numpy() @ q[0, head].double().numpy() * 0.7
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(float(sinks[head])))
        np.testing.assert_allclose(found[0, head], weights @ values[:5, head // 2].double().numpy(), atol=1e-6)


# Parts of decodes

# Batches for one KV head, and a number of multiprocessors: a query tile has parts of one level, of two, and of three.
# In the first, programs have several KV tiles: some end one query tile and begin the next.
SPLIT: list[tuple[Rows, int]] = [
    ([(40, 3), (0, 0), (150, 1)], 4),
    ([(700, 1), (31, 8)], 90),
    ([(2200, 1), (14, 11), (90, 2)], 90),
]
# The last part of one query tile is alone, in a program in which the next query tile begins.
ALONE: tuple[Rows, int] = ([(512, 1), (300, 1), (200, 1)], 20)


def split(*names: str, batch: tuple[Rows, int]) -> Case:
    heads = {} if any("num_heads" in FEATURES[name] for name in names) else {"num_heads": 5, "num_kv_heads": 1}
    return replace(case_of(*names, rows=batch[0], **heads), num_sms=batch[1])


@pytest.mark.kernels
def test_parts_of_one_query_tile_are_joined_whatever_the_features() -> None:
    rng = Random(10)
    pairs = [(name, rng.choice([other for other in FEATURES if compatible(name, other)])) for name in FEATURES]
    check([split(*pair, batch=SPLIT[index % 4 == 0]) for index, pair in enumerate(pairs)] + [split(batch=SPLIT[2])])


@pytest.mark.kernels
@pytest.mark.parametrize(
    "batch", [pytest.param(SPLIT[1], marks=pytest.mark.slow), ALONE], ids=["two levels", "a part alone"]
)
def test_launches_of_one_plan_follow_each_other(batch: tuple[Rows, int]) -> None:
    """As those of the layers do: each leaves the arrivals as the next one needs them."""
    case = split(batch=batch)
    subject, step = Subject(case), make_batch(case)
    first, expected = subject(step), reference(step, case.shape)
    assert float((first - expected).abs().max()) <= TOLERANCE["fp32"]
    for _ in range(3):
        subject.plan.part.fill_(torch.nan)
        assert torch.equal(subject.attend(step), first)


@pytest.mark.parametrize(
    "batch",
    [SPLIT[1], pytest.param(SPLIT[2], marks=pytest.mark.slow), ALONE],
    ids=["two levels", "three levels", "a part alone"],
)
def test_sums_are_the_same_in_every_order_of_arrival(batch: tuple[Rows, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs run one after the other; here in drawn orders, and from the last to the first."""
    from triton.runtime.interpreter import interpreter_builder

    set_grid_idx, num_moved = interpreter_builder.set_grid_idx, 0
    case = split(batch=batch)
    subject, step = Subject(case), make_batch(case)
    expected = subject(step)
    for seed in range(2):
        rng = Random(seed)

        def moved(x: int, y: int, z: int, rng: Random = rng, is_last_first: bool = seed == 0) -> None:
            nonlocal order, num_moved
            size = interpreter_builder.grid_dim[0]
            if x == 0:
                order = list(range(size))[::-1] if is_last_first else rng.sample(range(size), size)
            num_moved += order[x] != x
            set_grid_idx(order[x], y, z)

        order: list[int] = []
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", moved)
        assert torch.equal(subject(step), expected), f"{seed=}"
        monkeypatch.undo()
    assert num_moved > 30


# Work lists


@pytest.mark.parametrize(("batch", "has_several"), [(SPLIT[0], True), (SPLIT[1], False), (ALONE, True)])
def test_in_some_batches_a_program_ends_one_query_tile_and_begins_the_next(
    batch: tuple[Rows, int], has_several: bool
) -> None:
    (lists,) = plans(split(batch=batch), [batch[0]])
    assert any(first < last for first, last, *_ in lists["shares"] if first >= 0) is has_several


def check_lists(lists: dict[str, list[Any]], rows: Rows, case: Case, num_programs: int) -> None:
    """Each row of each sequence in one query tile; each KV tile that it may see in exactly one program's share."""
    group_size, window = case.shape.group_size, case.shape.sliding_window
    num_chunk_tiles, total, share = lists["counts"]
    chunks = [[0] * (new * group_size) for _, new in rows]
    previous = None
    for seq, first in lists["chunk_tiles"][:num_chunk_tiles]:
        assert previous is None or seq > previous[0] or first < previous[1], "a chunk's last tile comes first"
        previous = seq, first
        for row in range(first, min(first + case.chunk.block_m, len(chunks[seq]))):
            chunks[seq][row] += 1
    work: list[tuple[int, int, int]] = []  # the line of KV tiles: sequence, first row, KV tile of it
    num_decode_tiles = 0
    for seq, (cached, new) in enumerate(rows):
        is_chunk = new > MAX_DECODE_QUERIES
        assert chunks[seq] == [int(is_chunk)] * (new * group_size)
        if is_chunk or not new:
            continue
        first_key = max(0, cached + 1 - window) if window else 0
        kv_tiles = -(-(cached + new) // case.decode.block_n) - first_key // case.decode.block_n
        for first in range(0, new * group_size, case.decode.block_m):
            of_sequence = [sum(each for _, each in rows[:seq]), new, cached + new]
            assert lists["decode_tiles"][num_decode_tiles] == [seq, first, len(work), kv_tiles, *of_sequence]
            num_decode_tiles += 1
            work += [(seq, first, tile) for tile in range(kv_tiles)]
    assert total == len(work)
    assert share == max(-(-total // num_programs), 1)
    done: list[tuple[int, int, int]] = []
    for program in range(-(-total // share)):  # as a decoding program walks through its share
        begin, end, *first_tile = lists["shares"][program]
        assert first_tile == lists["decode_tiles"][begin]
        for seq, first, first_work, kv_tiles, *_ in lists["decode_tiles"][begin : end + 1]:
            tiles = range(max(program * share - first_work, 0), min((program + 1) * share - first_work, kv_tiles))
            assert tiles, "no program is sent to a tile that it has no share in"
            done += [(seq, first, tile) for tile in tiles]
    assert done == work


def check_plans(num_heads: int, num_sms: int, window: int | None, num_batches: int) -> None:
    """Batches of up to six sequences, drawn by a seed made of the arguments, in the same buffers."""
    rng = Random(f"{num_heads} {num_sms} {window}")
    shape = shape_of(num_heads=num_heads, num_kv_heads=1, sliding_window=window)
    case = Case([(0, 0)] * 6, shape, num_sms=num_sms, num_padding=6 * 33)
    kinds = itertools.islice(itertools.cycle(["mixed", "decodes", "chunks", "long"]), num_batches)
    batches = [[(0, 0)] * 6, *(draw_rows(rng, kind, 6, 16) for kind in kinds)]
    for rows, lists in zip(batches, plans(case, batches), strict=True):
        check_lists(lists, rows, case, num_sms)


@pytest.mark.parametrize(
    ("num_heads", "num_sms", "window"), cases([(4, 3, None), (71, 1, 20), (3, 20, None)], fast=[(71, 1, 20)])
)
def test_lists_hold_everything_once(num_heads: int, num_sms: int, window: int | None) -> None:
    check_plans(num_heads, num_sms, window, num_batches=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_sms", "window"), list(itertools.product((1, 4, 71), (1, 5, 300), (None, 20)))
)
def test_lists_of_hundreds_of_batches(num_heads: int, num_sms: int, window: int | None) -> None:
    check_plans(num_heads, num_sms, window, num_batches=300)


def test_bounds_of_the_lists_hold_for_the_worst_batch() -> None:
    """Brute force over all splits of a few tokens into sequences."""
    for num_heads, chunk_m, decode_m, max_num_seqs in itertools.product((1, 3, 40), (16, 32), (16, 32), (1, 2, 30)):
        chunk, decode = Tiling(chunk_m, 16, 4, 1), Tiling(decode_m, 16, 4, 1)
        case = Case([], shape_of(num_heads=num_heads, num_kv_heads=1), chunk=chunk, decode=decode)
        plan = AttentionPlan(
            specs_of(case, max_num_seqs),
            lambda spec: recording(spec, []),
            token_budget=64,
            max_num_seqs=max_num_seqs,
            num_sms=1,
            device=torch.device("cpu"),
        )
        for num_tokens in range(1, 41):
            for news in partitions(num_tokens, max_num_seqs):
                chunks = sum(-(-new * num_heads // chunk_m) for new in news if new > MAX_DECODE_QUERIES)
                decodes = sum(-(-new * num_heads // decode_m) for new in news if new <= MAX_DECODE_QUERIES)
                assert chunks <= plan.max_chunk_tiles(num_tokens), (news, case)
                assert decodes <= plan.max_decode_tiles(num_tokens), (news, case)


def partitions(total: int, max_parts: int) -> list[list[int]]:
    """Ways to share tokens out that are the worst for some bound: equal parts of each size, and a rest."""
    sizes = range(1, total + 1)
    found = [[size] * (total // size) + ([total % size] if total % size else []) for size in sizes]
    mixed = [[1] * ones + [total - ones] for ones in range(total)]
    return [parts for parts in found + mixed if len(parts) <= max_parts]


# Launches


class Recording:
    """Stands in for a kernel: writes down how it is launched."""

    def __init__(self, spec: KernelSpec, launches: list[Any]):
        self.spec, self.launches = spec, launches

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        assert len(plain) == len(self.spec.arguments)
        for value, argument in zip(arguments, self.spec.arguments, strict=True):
            assert isinstance(value, torch.Tensor) == argument.is_pointer, argument.name
        self.launches.append((self.spec.name, grid, plain))


def recording(spec: KernelSpec, launches: list[Any]) -> Recording:
    return Recording(spec, launches)


def test_launches_are_the_same_whatever_a_batch_holds() -> None:
    """A captured graph freezes only what depends on the number of tokens. Chunks take tiles in turn here."""
    launches: list[Any] = []
    shape = AttentionShape(32, 8, 128, 64, "bf16", 0.1, alibi="plain", sinks=True)
    in_turn = Tiling(128, 64, 8, 5, persistent=True)
    specs = attention_specs(shape, max_num_seqs=16, arch="sm_90", chunk=in_turn)
    plan = AttentionPlan(
        specs,
        lambda spec: recording(spec, launches),
        token_budget=2048,
        max_num_seqs=16,
        num_sms=132,
        device=torch.device("meta"),
    )
    attention = AttentionKernel(specs, lambda spec: recording(spec, launches), plan)
    starts, seq_lens = torch.zeros(17, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    q = torch.zeros(2048, 32, 128, dtype=torch.bfloat16)
    cache, tables = torch.zeros(4, 64, 8, 128, dtype=torch.bfloat16), torch.zeros(16, 9, dtype=torch.int32)
    slopes, sinks = torch.zeros(32), torch.zeros(32)
    tapes = []
    for seed in range(300):
        rows = draw_rows(Random(seed), ["decodes", "chunks", "mixed", "long"][seed % 4], 16, 64)
        starts[1:] = torch.tensor([new for _, new in rows]).cumsum(0)
        seq_lens[:] = torch.tensor([cached + new for cached, new in rows])
        launches.clear()
        plan(starts, seq_lens)
        attention(q, cache, cache, tables, starts, seq_lens, q, slopes=slopes, sinks=sinks)
        tapes.append(list(launches))
    assert all(tape == tapes[0] for tape in tapes)
    grids = [grid for _, grid, _ in tapes[0]]
    assert grids == [(16,), (4 * 132,), (2 * 132 // 8 * 8,)]
