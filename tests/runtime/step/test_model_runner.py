"""The model runner with a model that tells where it was asked: each hidden state is its token's id and position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgen.compile.ops.embedding.reference import resolve_token_ids
from fastgen.layers.kv_cache import KVShape, PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.causal_lm import CausalLM
from fastgen.runtime.kv_cache.block_tables import BlockCopy
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.scheduling.drafts import DraftedSequence
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.forward import Forward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.model_runner import ModelRunner, accept
from fastgen.runtime.step.step import Step

VOCAB_SIZE = 400
CPU = torch.device("cpu")


class CountingModel:
    """The logits after token ``i`` at position ``p`` are the log-probabilities of ``expected(i, p)``."""

    broken_position: int | None = None
    most_rows = 0

    def __call__(self, batch: RaggedBatch, kv_cache: object) -> Tensor:
        ids = resolve_token_ids(batch.input_ids, batch.token_source, batch.sampled_ids)
        return torch.stack([ids, batch.positions], dim=-1).float()

    def logits(self, hidden: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        rows = [self.expected(int(token_id), int(position)) for token_id, position in hidden.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def expected(self, token_id: int, position: int) -> Tensor:
        if position == self.broken_position:
            return torch.full((VOCAB_SIZE,), torch.nan)
        scores = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * token_id + position))
        return scores.log_softmax(-1)


class Bench:
    def __init__(self, *, token_budget: int, num_blocks: int = 200):
        self.model = CountingModel()
        inputs = InputBatch(
            token_budget=token_budget, max_num_seqs=4, max_rows=4, num_groups=1, max_blocks=80, block_size=4, device=CPU
        )
        forward = Forward(cast(CausalLM, self.model), Mock(spec=PagedKVCache))
        self.runner = ModelRunner(forward, inputs, Sampler(frozenset({VOCAB_SIZE - 1})))
        kv = KVCacheManager(num_blocks, 4)
        self.scheduler = Scheduler(kv, token_budget=token_budget, max_num_seqs=4)
        self.num_requests = 0

    def add(self, prompt: list[int], **fields: Any) -> Request:
        request = Request(self.num_requests, prompt, SamplingParams(**fields), arrival_s=0.0)
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def run(self) -> list[Step]:
        """Runs until every sequence has its tokens, and returns the steps."""
        steps = []
        while (schedule := self.scheduler.schedule()) is not None:
            steps.append(self.run_step(schedule))
            self.scheduler.commit(schedule)
            for sequence, token in steps[-1].sampled:
                sequence.token_ids.append(token.token_id)
                if sequence.num_tokens - sequence.num_prompt_tokens == sequence.request.sampling.max_new_tokens:
                    self.scheduler.finish(sequence)
        return steps

    def run_step(self, schedule: Schedule) -> Step:
        step = Step(schedule, 0.0, 0.0)
        self.runner.launch(step)
        self.runner.sample(step)
        self.runner.collect(step)
        return step


def test_a_step_is_launched_on_the_runners_gpu_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    found = []

    @contextmanager
    def stand_in(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", stand_in)
    bench = Bench(token_budget=4)
    hidden = bench.runner.forward.hidden

    def noted(batch: RaggedBatch) -> Tensor:
        found.extend(current)
        return hidden(batch)

    bench.runner.forward.hidden = noted  # type: ignore[method-assign]
    bench.add([5, 6, 7], max_new_tokens=2)
    bench.run()
    assert found == []
    bench.runner.device = torch.device("cuda", 1)
    bench.add([5, 6, 7, 8, 9, 10], max_new_tokens=2)
    bench.run()
    assert found == [torch.device("cuda", 1)] * 3
    assert current == []


@pytest.mark.parametrize("token_budget", [4, 50, 64, 65, 300])
def test_prompt_log_probabilities_over_chunks_and_row_pieces(token_budget: int) -> None:
    bench = Bench(token_budget=token_budget)
    generator = torch.Generator().manual_seed(token_budget)
    requests = [
        bench.add(torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist(), max_new_tokens=3, n=n, **asked)
        for length, n, asked in [
            (3, 1, {}),
            (200, 1, {"prompt_logprobs": 0}),
            (1, 1, {"prompt_logprobs": 2}),
            (70, 2, {"prompt_logprobs": 2}),
        ]
    ]
    outputs = bench.run()
    pieces = [piece for output in outputs for piece in output.prompt_logprobs]
    assert all(piece.sequence.index == 0 for piece in pieces), "once for a request, not once for each completion"
    for request in requests:
        count, prompt = request.sampling.prompt_logprobs, request.prompt_ids
        found = [piece for piece in pieces if piece.sequence.request is request]
        if count is None or len(prompt) == 1:
            assert found == []
            continue
        assert [piece.start for piece in found] == [
            1 + sum(len(piece.logprobs) for piece in found[:index]) for index in range(len(found))
        ]
        rows = [row for piece in found for row in piece.logprobs]
        assert len(rows) == len(prompt) - 1
        for position, row in enumerate(rows):
            expected, actual = bench.model.expected(prompt[position], position), prompt[position + 1]
            likeliest = [int(other) for other in expected.topk(count + 1).indices if other != actual][:count]
            assert list(row) == [actual, *likeliest]
            assert list(row.values()) == pytest.approx([float(expected[token_id]) for token_id in row], abs=1e-5)
    assert bench.model.most_rows <= 64, "prompt logits of a whole budget at once take too much memory"


class Reads(TorchFunctionMode):
    """Counts reads of tensors on the host, for each of which the host would wait for a GPU."""

    READS: ClassVar = {"tolist", "item", "numpy", "cpu", "nonzero", "__int__", "__float__", "__bool__", "__index__"}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.READS
        return func(*args, **(kwargs or {}))


def test_prompt_log_probabilities_are_waited_for_only_when_the_step_is_collected() -> None:
    bench = Bench(token_budget=100)
    expected = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    bench.model.logits = lambda hidden: expected + hidden[:, 1:].sin()  # type: ignore[method-assign]
    prompts = [[5, 6, 7], list(range(150))]
    for prompt in prompts:
        bench.add(prompt, max_new_tokens=1, prompt_logprobs=1)
    schedule = bench.scheduler.schedule()
    assert schedule is not None
    bench.runner.sampler.launch = lambda logits, rows: lambda: []  # type: ignore[method-assign]
    step = Step(schedule, 0.0, 0.0)
    bench.runner.launch(step)
    with Reads() as reads:
        bench.runner.sample(step)
    assert reads.count == 0
    assert step.prompt_logprobs == ()
    step.rows = []
    with Reads() as reads:
        bench.runner.collect(step)
    assert reads.count > 0
    found = {piece.sequence.request.request_id: piece.logprobs for piece in step.prompt_logprobs}
    logprobs = expected.log_softmax(-1)
    for request_id, (prompt, count) in enumerate(zip(prompts, (2, 97), strict=True)):
        assert [next(iter(row)) for row in found[request_id]] == prompt[1 : count + 1]
        given = [row[token_id] for row, token_id in zip(found[request_id], prompt[1:], strict=False)]
        assert given == pytest.approx(logprobs[prompt[1 : count + 1]].tolist(), abs=1e-5)


def test_each_sampled_token_follows_from_its_own_sequence() -> None:
    bench = Bench(token_budget=16, num_blocks=20)
    requests = [bench.add(list(range(start, start + 9)), max_new_tokens=30) for start in (5, 50, 100, 150)]
    bench.run()
    assert sum(sequence.num_preemptions for request in requests for sequence in request.sequences) > 0
    for request in requests:
        tokens = list(request.prompt_ids)
        while len(tokens) < 39:
            tokens.append(int(bench.model.expected(tokens[-1], len(tokens) - 1).argmax()))
        assert request.sequences[0].token_ids == tokens


def test_a_prompt_without_usable_logits_is_reported_and_disturbs_no_other() -> None:
    bench = Bench(token_budget=64)
    bench.model.broken_position = 7
    bad = bench.add(list(range(12)), max_new_tokens=1, prompt_logprobs=0)
    good = bench.add(list(range(20, 25)), max_new_tokens=1, prompt_logprobs=0)
    (output,) = bench.run()
    by_request = {piece.sequence.request: piece for piece in output.prompt_logprobs}
    assert by_request[bad].logprobs == []
    assert "NaN" in str(by_request[bad].error)
    assert (by_request[good].error, len(by_request[good].logprobs)) == (None, 4)
    assert [token.error for _, token in output.sampled] == [None, None]


def test_blocks_are_copied_before_the_forward_pass() -> None:
    class Watching(CountingModel):
        seen: list[float]

        def __call__(self, batch: RaggedBatch, kv_cache: Any) -> Tensor:
            self.seen = kv_cache.layers[0].k[:, 0, 0, 0].tolist()
            return super().__call__(batch, kv_cache)

    cache = PagedKVCache([0, 1], [KVShape(1, 2)] * 2, num_blocks=9, block_size=4, dtype=torch.float32, device=CPU)
    for tensor in cache.storage[0]:
        tensor.copy_(torch.arange(9.0).view(9, 1, 1, 1).expand(tensor.shape))
    bench, model = Bench(token_budget=8), Watching()
    bench.runner.forward = Forward(cast(CausalLM, model), cache)
    bench.add([1, 2, 3], max_new_tokens=1)
    schedule = bench.scheduler.schedule()
    assert schedule is not None
    copies = (BlockCopy(0, 0, 5, 7), BlockCopy(1, 2, 2, 3), BlockCopy(0, 1, 1, 8))
    bench.run_step(schedule._replace(block_copies=copies))
    assert model.seen == [0, 1, 2, 2, 4, 5, 6, 5, 1]


@pytest.mark.parametrize(
    ("token_ids", "error_at", "num_counting"),
    [
        ([5, 6, 7, 9], None, 4),
        ([5, 6, 8, 9], None, 3),
        ([5, 1, 7, 9], None, 2),
        ([1, 6, 7, 9], None, 1),  # later drafts are right again, but behind another token
        ([5, 6, 7, 9], 1, 2),  # an error ends the sequence there
    ],
)
def test_tokens_count_up_to_the_first_draft_that_was_wrong(
    token_ids: list[int], error_at: int | None, num_counting: int
) -> None:
    """The drafts are 5, 6 and 7. A decode follows."""
    drafting, other = (Request(index, [1, 2], SamplingParams(), 0.0).sequences[0] for index in range(2))
    rows = [drafting, *(DraftedSequence(drafting, (5, 6, 7)[:num]) for num in (1, 2, 3)), other]
    errors = ["broken" if place == error_at else None for place in range(4)]
    tokens = [SampledToken(token_id, error=error) for token_id, error in zip(token_ids, errors, strict=True)]
    sampled, num_accepted = accept(rows, [*tokens, SampledToken(3)])
    assert sampled == [*((drafting, token) for token in tokens[:num_counting]), (other, SampledToken(3))]
    assert num_accepted == {drafting: num_counting - 1}
