"""Steps from tapes: the same bits as from the modules, recorded once for each size, whatever the steps hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen import LLM
from fastgen.compile.capture.tape import Tape
from fastgen.errors import CaptureError
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.runtime.engine import Engine
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step.forward import CapturedForward, Forward, Results, TapedForward


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with fastgen.load("tiny-mistral", target="cpp", token_budget=128, max_num_seqs=24) as loaded:
        yield loaded


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


class Watched(TapedForward):
    """Beside every step from a tape computes it by the modules, and looks whether another recording is the same."""

    def __init__(self, forward: TapedForward):
        self.__dict__ |= forward.__dict__
        self.sizes: list[tuple[int, int]] = []
        self.num_differences = 0

    def hidden(self, batch: RaggedBatch) -> Tensor:
        expected = Forward.hidden(self, batch).clone()  # the same keys and values are written twice
        found = super().hidden(batch)
        self.num_differences += not torch.equal(found, expected)
        if (tape := (self._forwards | self._others).get(len(batch.input_ids))) is not None:
            assert isinstance(tape, Tape)
            again = self._pool.record(tape.name, lambda: self._forward_step(len(expected)))
            self.num_differences += tape.difference(again) is not None
        return found

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        expected = Forward.logits(self, hidden, batch).clone()
        found = super().logits(hidden, batch)
        self.num_differences += not torch.equal(found, expected)
        self.sizes.append((len(hidden), len(found)))
        return found


@pytest.mark.parametrize("often", [TapedForward.OFTEN, 1])
def test_the_same_bits_over_a_random_history(llm: LLM, monkeypatch: pytest.MonkeyPatch, often: int) -> None:
    """Prompts of all lengths arrive while others decode; every step, small or large, is looked at."""
    monkeypatch.setattr(TapedForward, "OFTEN", often)
    engine, draw = engine_of(llm), random.Random(20 * often)
    forward = engine.runner.forward
    assert isinstance(forward, TapedForward)
    watched = engine.runner.forward = Watched(forward)
    try:
        prompts = [[draw.randrange(300) for _ in range(draw.choice((1, 2, 9, 40, 130)))] for _ in range(40)]
        lengths = [draw.randint(1, 12) for _ in prompts]
        samplings = [fastgen.SamplingParams(max_new_tokens=length, ignore_eos=True, seed=1) for length in lengths]
        outputs = llm.generate(prompts, samplings)
    finally:
        engine.runner.forward = forward
    assert [len(output.token_ids) for output in outputs] == lengths
    assert watched.num_differences == 0
    num_tokens = {size for size, _ in watched.sizes}
    recurring = {*range(1, TapedForward.SMALL + 1), *captured_sizes(128)}
    assert num_tokens - set(captured_sizes(128))  # as many tokens as there were, not padded to one of these
    assert any(size > rows > 0 for size, rows in watched.sizes)  # decodes and a chunk that needs no logits
    assert num_tokens & recurring <= forward._forwards.keys() <= recurring
    assert forward._others.keys() <= num_tokens - recurring
    assert often > 1 or forward._others.keys() == num_tokens - recurring > set()
    forward._others.clear()
    assert {128} < num_tokens & recurring


def test_a_step_of_a_number_that_will_hardly_come_again(llm: LLM) -> None:
    """Two sequences read the last of their prompts together, in a step that is neither small nor filled."""
    prompt = list(range(1, 101))
    assert 100 not in captured_sizes(128)
    together = llm.generate([prompt], max_new_tokens=2, temperature=0, ignore_eos=True, logprobs=0)[0]
    forward = engine_of(llm).runner.forward
    assert 100 not in {*forward._forwards, *forward._others}
    with fastgen.load("tiny-mistral", target="cpp", token_budget=64, max_num_seqs=24) as other:
        chunked = other.generate([prompt], max_new_tokens=2, temperature=0, ignore_eos=True, logprobs=0)[0]
    assert together.logprobs == chunked.logprobs


def test_a_tape_is_recorded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate([[5, 6, 7]], max_new_tokens=3, ignore_eos=True)
    monkeypatch.setattr(engine_of(llm).runner.forward._pool, "record", lambda *_: pytest.fail("recorded again"))
    llm.generate([[8, 9, 10]], max_new_tokens=5, ignore_eos=True)


def test_where_gaps_are_bounded_nothing_is_recorded_under_traffic() -> None:
    options: dict[str, Any] = {"target": "cpp", "token_budget": 128, "max_num_seqs": 6, "itl_target_ms": 50}
    with fastgen.load("tiny-mistral", **options) as llm:
        forward = engine_of(llm).runner.forward
        assert isinstance(forward, TapedForward)
        sizes, heads = dict(forward._forwards), dict(forward._heads)
        assert sizes.keys() == set(captured_sizes(128))
        assert heads.keys() == {*range(1, 7)}
        llm.generate([[5] * 300, [6] * 40, [7]], max_new_tokens=9, ignore_eos=True)
        assert {size: forward._forwards[size] for size in sizes} == sizes
        assert forward._heads == heads


# Captured steps, without a GPU: the graphs of a fake pool run the model once more, and change what it gives.


class FakeModel:
    """Gives hidden states of the same row, and their doubles as logits."""

    def __init__(self, row: list[float], dtype: torch.dtype) -> None:
        self.row = torch.tensor(row).to(dtype)
        self.change: Callable[[Tensor], Tensor] = torch.clone

    def __call__(self, batch: Any, kv_cache: Any) -> Tensor:
        return self.change(self.row.repeat(len(batch.input_ids), 1))

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return 2 * rows if out is None else out.copy_(2 * rows)


class FakePool:
    """Captures steps whose replay is a run with the model's results changed by ``change``; ``None`` runs nothing."""

    def __init__(self, model: FakeModel, change: Callable[[Tensor], Tensor] | None) -> None:
        self.model, self.change, self.calls = model, change, list[str]()

    def capture(self, name: str, step: Callable[[], None], *, runs_twice: bool) -> Any:
        self.calls.append(f"{name}, twice" if runs_twice else name)
        step()
        return SimpleNamespace(name=name, replay=lambda: self._replay(step))

    def _replay(self, step: Callable[[], None]) -> None:
        if self.change is not None:
            self.model.change = self.change
            step()
            self.model.change = torch.clone


class FakeTrial:
    """Has one token less than a step has."""

    def __init__(self) -> None:
        self.calls = list[object]()

    def fill(self, size: int) -> int:
        self.calls.append(size)
        return size - 1

    def clear(self) -> None:
        self.calls.append("clear")


class RecordingPool:
    """Notes what is recorded. A recorded step is run again where it is replayed."""

    def __init__(self) -> None:
        self.names = list[str]()

    def record(self, name: str, step: Callable[[], None]) -> Any:
        self.names.append(name)
        step()
        return SimpleNamespace(replay=step)


def batch_of(num_tokens: int, num_rows: int) -> Any:
    return SimpleNamespace(input_ids=torch.zeros(num_tokens), logits_indices=torch.zeros(num_rows, dtype=torch.int32))


def taped(pool: RecordingPool, *, sizes: tuple[int, ...]) -> TapedForward:
    results = Results(2, 2, torch.float32, torch.device("cpu"))
    model = cast(Any, FakeModel([1, 2], torch.float32))
    return TapedForward(model, cast(Any, None), cast(Any, pool), batch_of, results, sizes=sizes, max_rows=3)


def test_which_steps_are_recorded_and_when() -> None:
    """All up to 64 tokens, and those that the scheduler fills: the largest first, then that of a single token."""
    pool = RecordingPool()
    forward = taped(pool, sizes=(1, 2, 64, 128))
    assert pool.names == ["a step of 128 tokens", "a step of 1 tokens", "logits of 1 rows"]
    for num_tokens in (63, 65, 127, 128, 63):
        assert forward.hidden(batch_of(num_tokens, 0)).tolist() == [[1, 2]] * num_tokens
    assert pool.names[3:] == ["a step of 63 tokens"]
    forward.record_sizes()
    assert pool.names[4:6] == ["a step of 64 tokens", "a step of 2 tokens"]
    assert pool.names[6:] == ["logits of 3 rows", "logits of 2 rows"]


def test_other_numbers_of_tokens_are_recorded_when_they_have_come_often() -> None:
    pool, often = RecordingPool(), TapedForward.OFTEN
    forward = taped(pool, sizes=(1, 2, 64, 512))
    num_before = len(pool.names)
    for _ in range(often - 1):
        for num_tokens in (70, 71):
            assert forward.hidden(batch_of(num_tokens, 0)).tolist() == [[1, 2]] * num_tokens
            assert forward.logits(torch.ones(num_tokens, 2), batch_of(num_tokens, 1)).tolist() == [[2, 2]]
    assert len(pool.names) == num_before
    for _ in range(3):
        hidden = forward.hidden(batch_of(70, 0))
        assert hidden.tolist() == [[1, 2]] * 70
        assert forward.logits(hidden, batch_of(70, 1)).tolist() == [[2, 4]]
    assert pool.names[num_before:] == ["a step of 70 tokens"], "once"
    for _ in range(often):
        for num_tokens in range(80, 80 + TapedForward.MOST_OTHERS - 1):
            forward.hidden(batch_of(num_tokens, 0))
        forward.hidden(batch_of(70, 0))
    for _ in range(often):  # one more than are kept: the one used longest ago is dropped
        forward.hidden(batch_of(79, 0))
    num_before = len(pool.names)
    for num_tokens in (70, 79, 81):
        forward.hidden(batch_of(num_tokens, 0))
    assert len(pool.names) == num_before
    for num in range(often):
        assert len(pool.names) == num_before
        assert forward.hidden(batch_of(80, 0)).tolist() == [[1, 2]] * 80, num
    assert pool.names[num_before:] == ["a step of 80 tokens"]


def test_where_all_numbers_of_tokens_come_none_is_recorded() -> None:
    pool = RecordingPool()
    forward = taped(pool, sizes=(1, 2, 64, 1024))
    num_before, draw = len(pool.names), random.Random(0)
    for _ in range(6000):
        forward.hidden(batch_of(draw.randrange(65, 1000), 0))
    assert len(pool.names) - num_before < 60
    for _ in range(TapedForward.OFTEN * TapedForward.MOST_OTHERS // 4):
        for num_tokens in (70, draw.randrange(100, 1000)):
            forward.hidden(batch_of(num_tokens, 0))
    assert "a step of 70 tokens" in pool.names[num_before:]


def test_where_all_sizes_are_recorded_at_the_start_no_others_are_later() -> None:
    pool = RecordingPool()
    forward = taped(pool, sizes=(1, 2, 64, 128))
    forward.record_sizes()
    num_before = len(pool.names)
    for _ in range(2 * TapedForward.OFTEN):
        assert forward.hidden(batch_of(70, 0)).tolist() == [[1, 2]] * 70
    assert len(pool.names) == num_before


def captured(
    row: list[float], dtype: torch.dtype, change: Callable[[Tensor], Tensor] | None
) -> tuple[CapturedForward, FakePool]:
    model = FakeModel(row, dtype)
    pool = FakePool(model, change)
    forward = CapturedForward(
        cast(Any, model),
        cast(Any, None),
        cast(Any, pool),
        lambda tokens, rows: cast(
            Any, SimpleNamespace(input_ids=torch.zeros(tokens), logits_indices=torch.zeros(rows, dtype=torch.int32))
        ),
        Results(len(row), len(row), dtype, torch.device("cpu")),
        sizes=(2, 4),
        row_sizes=(1, 3),
        sample=lambda logits: None,
    )
    return forward, pool


def at_end(x: Tensor) -> Tensor:
    x[-1] = 7
    return x


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "dtype", "change", "is_same"),
    [
        ([1, 2], torch.float32, torch.clone, True),
        ([0, 0], torch.float32, torch.clone, True),
        ([1, NAN], torch.float32, torch.clone, True),
        ([-INF, 1], torch.float32, torch.clone, True),
        ([1, 2], torch.float32, None, False),
        ([10, 20], torch.float32, lambda x: x * (1 + 5e-5), True),
        ([0.1, 0.2], torch.float32, lambda x: x * (1 + 1.5e-4), False),
        ([0.001, 2], torch.float32, lambda x: x + 1e-4, True),
        ([0.001, NAN], torch.float32, lambda x: x + 5e-5, False),
        ([0.001, INF], torch.float32, lambda x: x + 5e-5, False),
        ([0.001, -INF], torch.float32, lambda x: x + 5e-5, False),
        ([1, 1], torch.bfloat16, lambda x: x * 1.01, True),
        ([1, 1], torch.bfloat16, lambda x: x * 1.03, False),
        ([1, 2], torch.float32, lambda x: x * NAN, False),
        ([1, 2], torch.float32, at_end, True),
    ],
    ids=[
        *("the same", "zeros", "nan", "infinity", "nothing", "nearly", "not quite", "nearly, of the largest"),
        *("not quite, beside nan", "not quite, beside infinity", "not quite, beside minus infinity"),
        *("nearly in 16 bits", "not quite in 16 bits", "nan by replay", "behind the trial's tokens"),
    ],
)
def test_a_graph_is_used_only_if_its_replay_gives_what_the_step_gave(
    row: list[float], dtype: torch.dtype, change: Callable[[Tensor], Tensor] | None, is_same: bool
) -> None:
    (forward, pool), trial = captured(row, dtype, change), FakeTrial()
    progress = list[tuple[int, int]]()
    differs = pytest.raises(CaptureError, match=r"^a step of 4 tokens: a replay gives other results")
    with nullcontext() if is_same else differs:
        forward.capture(lambda done, total: progress.append((done, total)), cast(Any, trial))
    # What differs is said when all are captured.
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert pool.calls == [
        *("a step of 4 tokens, twice", "a step of 2 tokens"),
        *("logits of 3 rows, twice", "logits of 1 rows"),
    ]
    assert trial.calls == [4, 2, "clear"]
