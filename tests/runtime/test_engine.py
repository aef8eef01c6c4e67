"""The engine without a model: a scripted runner and a clock in hand, so that every act is seen by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import PromptLogprobs, SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import DynamicBatching, Policy
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.scheduler import Scheduler
from fastgen.runtime.step.model_runner import ModelRunner
from fastgen.runtime.step.step import Step
from fastgen.runtime.step_cost.work import StepWork

EOS = 2
VOCAB_SIZE = 50
PROMPT = [5, 6, 7]


class ScriptedRunner:
    """Gives every sequence the token that ``choose`` says, and each prompt chunk its positions as log-probabilities."""

    def __init__(self) -> None:
        self.choose: Callable[[Sequence], SampledToken] = lambda sequence: SampledToken(9)
        self.fail_prompts = False

    def launch(self, step: Step) -> None:
        pass

    def sample(self, step: Step) -> None:
        pieces = []
        for entry in step.schedule.entries:
            sequence, sampling = entry.seq, entry.seq.request.sampling
            end = min(entry.end + 1, sequence.num_prompt_tokens)
            if sampling.prompt_logprobs is not None and sequence.index == 0 and entry.start + 1 < end:
                error = "the prompt gave NaN" if self.fail_prompts else None
                values = [] if error else [{sequence.token_ids[p]: -float(p)} for p in range(entry.start + 1, end)]
                pieces.append(PromptLogprobs(sequence, entry.start + 1, values, error))
        step.sampled = [(entry.seq, self.choose(entry.seq)) for entry in step.schedule.entries if entry.samples]
        step.prompt_logprobs = pieces

    def collect(self, step: Step) -> None:
        pass


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    def __init__(
        self,
        *,
        token_budget: int = 8,
        max_num_seqs: int = 4,
        num_blocks: int = 33,
        policy: Policy | None = None,
    ) -> None:
        self.runner, self.clock = ScriptedRunner(), Clock()
        scheduler = Scheduler(
            KVCacheManager(num_blocks, 4), token_budget=token_budget, max_num_seqs=max_num_seqs, policy=policy
        )
        self.engine = Engine(
            cast(ModelRunner, self.runner),
            scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=40,
            eos_token_ids=frozenset({EOS}),
            new_detokenizer=None,
            clock=self.clock,
        )

    def submit(self, prompt: list[int] = PROMPT, **fields: Any) -> Any:
        return self.engine.submit(prompt, SamplingParams(**fields))

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()
            self.engine.check_integrity()
            self.clock.now_s += 1
        assert self.engine.scheduler.kv.pool.num_free == self.engine.scheduler.kv.pool.capacity


@pytest.fixture
def bench() -> Bench:
    return Bench()


# What is refused


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "message"),
    [
        ([], {}, InvalidArgumentError, "the prompt has no tokens"),
        ([1, VOCAB_SIZE], {}, InvalidArgumentError, "prompt token 1 is id 50; the model's ids are 0 to 49"),
        ([-1], {}, InvalidArgumentError, "prompt token 0 is id -1"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, InvalidArgumentError, "50"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidArgumentError, "50"),
        ([1], {"stop": "x"}, InvalidArgumentError, "stop strings need a tokenizer"),
        ([1] * 38, {"max_new_tokens": 3}, RequestTooLargeError, "41 tokens, max_model_len is 40; ask for at most 2"),
        ([1] * 39, {"max_new_tokens": 3}, RequestTooLargeError, "ask for at most 1 new tokens"),
        ([1] * 40, {"max_new_tokens": 3}, RequestTooLargeError, "max_model_len is 40; shorten the prompt$"),
        ([1] * 50, {"max_new_tokens": 3}, RequestTooLargeError, "max_model_len is 40; shorten the prompt$"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_changes_nothing(
    bench: Bench, prompt: list[int], fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    for act in (bench.engine.check, bench.engine.submit):
        with pytest.raises(error, match=message):
            act(prompt, SamplingParams(**fields))
    assert not bench.engine.has_work
    bench.engine.check_integrity()


def test_a_cache_too_small_is_noticed_before_anything_is_queued() -> None:
    bench = Bench(num_blocks=4)
    with pytest.raises(RequestTooLargeError, match="= 4 blocks, the KV cache has 3"):
        bench.engine.check(PROMPT, SamplingParams(max_new_tokens=11))
    bench.submit(max_new_tokens=10)
    bench.run()


# How requests end


def test_eos_stop_ids_and_length(bench: Bench) -> None:
    def answer(token_id: int, **fields: Any) -> tuple[str, list[int]]:
        bench.runner.choose = lambda sequence: SampledToken(token_id if sequence.num_tokens == 4 else 9)
        generation = bench.submit(max_new_tokens=4, **fields)
        bench.run()
        output = generation.output()
        return output.finish_reason, output.token_ids

    assert answer(EOS) == ("stop", [9, EOS])
    assert answer(EOS, ignore_eos=True) == ("length", [9, EOS, 9, 9])
    assert answer(EOS, stop_token_ids=[8]) == ("stop", [9, EOS])
    assert answer(8, stop_token_ids=[8]) == ("stop", [9, 8])
    assert answer(8, stop_token_ids=[8], ignore_eos=True) == ("stop", [9, 8])
    assert answer(8) == ("length", [9, 8, 9, 9])
    assert answer(EOS, stop_token_ids=[EOS], ignore_eos=True) == ("stop", [9, EOS])


def test_a_seed_is_drawn_once_a_request_and_a_given_one_is_kept(bench: Bench) -> None:
    seeds = [bench.submit(temperature=1.0, max_new_tokens=1).request.sampling.seed for _ in range(4)]
    assert None not in seeds
    assert len(set(seeds)) == 4
    assert bench.submit(temperature=1.0, max_new_tokens=1, seed=0).request.sampling.seed == 0
    bench.engine.cancel_all()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_timeouts_come_in_the_order_of_their_deadlines(order: tuple[int, ...]) -> None:
    bench = Bench(token_budget=64)
    timed = {timeout_s: bench.submit(max_new_tokens=30, timeout_s=timeout_s + 0.5) for timeout_s in order}
    other = bench.submit(max_new_tokens=30)
    bench.run()
    for timeout_s, generation in timed.items():  # a step a second
        output = generation.output()
        assert output.finish_reason == "timeout"
        assert len(output.token_ids) == timeout_s + 1
    assert other.output().finish_reason == "length"


def test_several_deadlines_pass_in_one_step_and_one_of_a_request_long_done(bench: Bench) -> None:
    done = bench.submit(max_new_tokens=1, timeout_s=3)
    late = [bench.submit(max_new_tokens=30, timeout_s=seconds) for seconds in (4, 5)]
    bench.engine.step()
    assert done.output().finish_reason == "length"
    bench.clock.now_s += 5  # as late as the last deadline
    bench.engine.step()
    assert [generation.output().finish_reason for generation in late] == ["timeout"] * 2
    assert done.output().finish_reason == "length"
    assert not bench.engine.has_work
    bench.engine.step()


def test_deadlines_of_requests_that_have_ended_are_not_kept(bench: Bench) -> None:
    open_requests = [bench.submit(max_new_tokens=30, timeout_s=50) for _ in range(3)]
    for _ in range(200):
        bench.engine.cancel(bench.submit(max_new_tokens=1, timeout_s=1000))
        assert len(bench.engine.answers.deadlines) <= 2 * len(bench.engine.answers.open) + 1
    for generation in open_requests:
        bench.engine.cancel(generation)
    assert len(bench.engine.answers.deadlines) == 0


def test_while_a_policy_waits_for_more_the_engine_says_for_how_long() -> None:
    bench = Bench(policy=DynamicBatching(batch_size=2, max_delay_s=3.0))
    first = bench.submit(max_new_tokens=1)
    assert bench.engine.idle_s == 0.0
    bench.engine.step()
    assert bench.engine.idle_s == 3.0
    bench.clock.now_s += 2
    assert bench.engine.idle_s == 1.0
    bench.submit(max_new_tokens=1)
    bench.engine.step()
    assert bench.engine.idle_s == 0.0
    assert first.output().token_ids == [9]


def test_the_policy_learns_what_steps_took(bench: Bench) -> None:
    learned = []

    class Watching(SplitFuse):
        observes = True

        def observe(self, work: StepWork, step_s: float) -> None:
            learned.append((work, step_s))

    bench = Bench(policy=Watching())

    def slow(step: Step) -> None:
        bench.clock.now_s += 0.25

    bench.runner.launch = slow  # type: ignore[method-assign]
    bench.submit([1] * 3, max_new_tokens=2)
    bench.run()
    assert learned == [(StepWork(3, 3, 6, 1, 1, 1), 0.25), (StepWork(1, 4, 0, 1), 0.25)]


def test_a_request_may_time_out_before_it_is_scheduled() -> None:
    bench = Bench(max_num_seqs=1, token_budget=1)
    bench.submit([1] * 30, max_new_tokens=1)
    waiting = bench.submit(max_new_tokens=1, timeout_s=7, prompt_logprobs=0)
    bench.run()
    output = waiting.output()
    assert (output.finish_reason, output.token_ids, output.metrics.queue_s) == ("timeout", [], 7.0)
    assert output.metrics.ttft_s is None
    assert output.prompt_logprobs == [None] * 3


def test_a_prompt_left_in_the_middle_has_an_entry_for_every_token() -> None:
    bench = Bench(token_budget=4)
    generation = bench.submit([1] * 12, max_new_tokens=1, prompt_logprobs=0)
    bench.engine.step()
    bench.engine.cancel(generation)
    assert generation.output().prompt_logprobs == [None, *({1: -float(p)} for p in range(1, 5)), *[None] * 7]


def test_cancelling_keeps_what_is_finished(bench: Bench) -> None:
    bench.runner.choose = lambda sequence: SampledToken(EOS if sequence.index == 1 else 9)
    generation = bench.submit(n=3, max_new_tokens=9)
    bench.engine.step()  # two of the three prompts fit a budget of 8, and a part of the last
    bench.engine.step()
    assert not generation.finished
    for _ in range(2):
        bench.engine.cancel(generation)
    outputs = generation.output().completions
    assert [output.finish_reason for output in outputs] == ["cancelled", "stop", "cancelled"]
    assert not bench.engine.has_work
    bench.engine.check_integrity()


def test_an_error_in_one_completion_ends_its_request_and_no_other(bench: Bench) -> None:
    good = bench.submit(max_new_tokens=3)

    def choose(sequence: Sequence) -> SampledToken:
        broken = sequence.request is not good.request and sequence.index == 0 and sequence.num_tokens == 4
        return SampledToken(0, error="NaN here") if broken else SampledToken(9)

    bench.runner.choose = choose
    bad = bench.submit(n=2, max_new_tokens=3)
    bench.run()
    assert good.output().token_ids == [9, 9, 9]
    assert [(each.finish_reason, each.error) for each in bad.output().completions] == [("error", "NaN here")] * 2
    assert bad.output().token_ids == [9]


def test_a_prompt_that_cannot_be_scored_ends_its_request_and_no_other(bench: Bench) -> None:
    bench.runner.fail_prompts = True
    bad = bench.submit(n=2, max_new_tokens=3, prompt_logprobs=0)
    good = bench.submit(max_new_tokens=3)
    bench.run()
    assert [(each.finish_reason, each.error) for each in bad.output().completions] == [
        ("error", "the prompt gave NaN")
    ] * 2
    assert bad.output().token_ids == []
    assert good.output().finish_reason == "length"


# What is kept of a request


@pytest.mark.parametrize("token_budget", [4, 5, 64])
def test_prompt_log_probabilities_are_put_together_from_chunks(token_budget: int) -> None:
    bench = Bench(token_budget=token_budget)
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 9, 30)]
    generations = [bench.submit(prompt, max_new_tokens=2, prompt_logprobs=0, n=2) for prompt in prompts]
    bench.run()
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = [{token_id: -float(position)} if position else None for position, token_id in enumerate(prompt)]
        assert [output.prompt_logprobs for output in generation.output().completions] == [expected] * 2


def test_times_are_the_clocks() -> None:
    bench = Bench(token_budget=4)
    first = bench.submit([1] * 6, max_new_tokens=3)  # two steps of its prompt, then a token a step
    bench.clock.now_s += 2
    second = bench.submit([1] * 4, max_new_tokens=1)
    bench.run()
    metrics = first.output().metrics
    assert metrics.queue_s == 2.0
    assert metrics.ttft_s is not None
    assert metrics.ttft_s > 2.0
    assert metrics.gaps_s == [1.0, 1.0]
    assert second.output().metrics.gaps_s == []
    assert 0 < second.output().metrics.queue_s <= cast(float, second.output().metrics.ttft_s)


def test_a_preempted_request_continues_and_reports_it() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2)
    generations = [bench.submit([1] * 8, max_new_tokens=14) for _ in range(2)]
    bench.run()
    first, second = (generation.output() for generation in generations)
    assert first.token_ids == second.token_ids == [9] * 14
    assert first.metrics.preemptions == 0
    assert second.metrics.preemptions > 0
    assert second.metrics.queue_s <= 2.0, "queueing ends with the first schedule, whatever comes after"


def test_a_step_that_fails_ends_its_requests_and_no_other() -> None:
    bench = Bench(max_num_seqs=2)
    running = [bench.submit(max_new_tokens=3, n=2), bench.submit(max_new_tokens=3)]
    waiting = bench.submit([1] * 12, max_new_tokens=3, prompt_logprobs=0)
    sample = bench.runner.sample
    bench.engine.step()
    bench.runner.sample = lambda step: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    bench.engine.step()
    bench.engine.check_integrity()
    bench.runner.sample = sample  # type: ignore[method-assign]
    bench.run()
    failed = running[0].output()
    assert [each.finish_reason for each in failed.completions] == ["error"] * 2
    assert {each.error for each in failed.completions} == {"ZeroDivisionError: division by zero"}
    output = waiting.output()
    assert output.token_ids == [9, 9, 9]
    assert output.prompt_logprobs == [None, *({1: -float(position)} for position in range(1, 12))]


def test_a_step_that_is_interrupted_is_run_again(bench: Bench) -> None:
    generation = bench.submit([1] * 12, max_new_tokens=3, prompt_logprobs=0)
    sample = bench.runner.sample

    def interrupted(step: Step) -> None:
        raise KeyboardInterrupt

    bench.engine.step()
    for _ in range(3):
        bench.runner.sample = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            bench.engine.step()
        bench.engine.check_integrity()
        bench.runner.sample = sample  # type: ignore[method-assign]
        bench.engine.step()
    bench.run()
    output = generation.output()
    assert output.token_ids == [9, 9, 9]
    assert output.prompt_logprobs == [None, *({1: -float(position)} for position in range(1, 12))]
