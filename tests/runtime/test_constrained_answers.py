"""Answers with a ``response_format``, by the public face: each has its format, is made of the tokens that the format
and the logits leave, and is the same alone, beside any requests, in any chunks, and when preempted.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.compile.ops.sampling.reference import gumbel_noise
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.replay import first_difference
from fastgen.runtime.llm import LLM
from fastgen.runtime.requests.constraint import Mask
from fastgen.runtime.requests.sampling_params import resolve_seed
from fastgen.runtime.sampling import kept_formats
from fastgen.runtime.sampling.matcher import CompiledFormat, Matcher
from fastgen.runtime.step import late_masks
from fastgen.runtime.step.step import Step
from tests.runtime.checkpoints import families, save_checkpoint
from tests.runtime.constrained import (
    EOS,
    KNOWN_CASES,
    VOCAB_SIZE,
    Case,
    check_json,
    drawn_schema,
    pattern,
    save_writer,
)

MARGIN = 1e-3
LONGEST = 90  # tokens of prompt and answer
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 30, "logit_bias": {5: 3.0}},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 1.0},
    {"temperature": 1.0, "min_new_tokens": 6},
    {"temperature": 1.0, "n": 3},
]


def drawn_request(index: int) -> tuple[list[int], SamplingParams]:
    """Returns a request: of each four, one has a known format, two have a drawn schema, and one has none."""
    rng = random.Random(f"request {index}")
    fields = dict(WAYS[index // 4 % len(WAYS)])
    match index % 4:
        case 0:
            fields["response_format"] = KNOWN_CASES[index // 4 % len(KNOWN_CASES)].format
        case 1 | 2:
            fields["response_format"] = {"type": "json_schema", "schema": drawn_schema(rng)}
    prompt = [rng.randrange(VOCAB_SIZE - 10) for _ in range(rng.randint(1, 30))]
    return prompt, SamplingParams(
        seed=index, max_new_tokens=LONGEST - len(prompt), logprobs=2 if index % 3 else None, **fields
    )


PROMPTS, SAMPLINGS = zip(*map(drawn_request, range(4 * max(len(WAYS), len(KNOWN_CASES)))), strict=True)


@pytest.fixture(scope="module", params=families("llama", of=("llama", "opt")))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    with fastgen.load(directory, target="cpp") as llm:
        return [llm.generate(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


def result_of(output: GenerationOutput) -> list[object]:
    return [(each.text, each.token_ids, each.finish_reason, each.error, each.logprobs) for each in output.completions]


def assert_same(alone: list[GenerationOutput], outputs: list[GenerationOutput]) -> None:
    for index, (one, other) in enumerate(zip(alone, outputs, strict=True)):
        assert result_of(other) == result_of(one), f"request {index}: {SAMPLINGS[index]}"


# The answers


def test_every_answer_that_ends_has_its_format(alone: list[GenerationOutput]) -> None:
    num_ended = 0
    for index, output in enumerate(alone):
        for completion in output.completions:
            assert completion.finish_reason in ("stop", "length"), completion.error
            if index % 4 == 3 or completion.finish_reason == "length":
                continue
            num_ended += 1
            if index % 4 == 0:
                assert KNOWN_CASES[index // 4 % len(KNOWN_CASES)].has_it(completion.text), completion.text
            else:
                schema = drawn_schema(random.Random(f"request {index}"))
                check_json(completion.text, schema)
    assert num_ended > 0.6 * sum(len(output.completions) for index, output in enumerate(alone) if index % 4 != 3)


def test_the_same_beside_others(directory: Path, alone: list[GenerationOutput]) -> None:
    for options in ({"token_budget": 48, "max_num_seqs": 40}, {"token_budget": 7, "max_num_seqs": 6}):
        with fastgen.load(directory, target="cpp", **options) as llm:
            assert_same(alone, llm.generate(PROMPTS, SAMPLINGS))


def test_the_same_when_preempted(directory: Path, alone: list[GenerationOutput]) -> None:
    with fastgen.load(directory, target="cpp", block_size=4, kv_cache_memory="1MiB") as llm:
        assert llm._engine is not None
        block_bytes = llm._engine.runner.kv_cache.size_bytes // llm.config.num_blocks
    cache = block_bytes * (2 + LONGEST // 4)
    with fastgen.load(directory, target="cpp", block_size=4, kv_cache_memory=cache, token_budget=16) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS)
    assert sum(each.metrics.preemptions for output in outputs for each in output.completions) >= 10
    assert_same(alone, outputs)


def test_a_step_that_was_interrupted_is_made_again(directory: Path, alone: list[GenerationOutput]) -> None:
    with fastgen.load(directory, target="cpp", max_num_seqs=4) as llm:
        assert llm._engine is not None
        sample, calls = llm._engine.runner.sample, []

        def failing_sample(step: Step) -> None:
            calls.append(step)
            sample(step)
            if len(calls) % 3 == 2:
                raise KeyboardInterrupt

        llm._engine.runner.sample = failing_sample  # type: ignore[method-assign]
        streams = [llm.stream(PROMPTS[index], SAMPLINGS[index]) for index in range(8)]
        for index, stream in enumerate(streams):
            while not stream._generation.finished:
                try:
                    next(stream, None)
                except KeyboardInterrupt:
                    continue
            assert result_of(stream.output) == result_of(alone[index])


class _BusyLock:
    """A lock that a thread gets only if it waits for as long as it takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def release(self) -> None:
        self._lock.release()

    def acquire(self, timeout: float = -1) -> bool:
        return timeout < 0 and self._lock.acquire()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def with_late_end(output: GenerationOutput) -> GenerationOutput:
    sampling = SAMPLINGS[PROMPTS.index(output.prompt_token_ids)]
    is_last = output.finish_reason == "stop" and len(output.token_ids) == sampling.max_new_tokens
    reason = "length" if is_last and sampling.response_format is not None else output.finish_reason
    return replace(output, finish_reason=reason, others=tuple(map(with_late_end, output.others)))


def test_the_same_when_masks_come_late(
    directory: Path, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps leave out what is late, and parsers get their tokens late. So ends are noticed late, too: an answer that
    its last token completes says "length".
    """
    rng, find, init = random.Random(0), Matcher._next_mask, CompiledFormat.__init__

    def begin(compiled: CompiledFormat, *given: Any) -> None:
        init(compiled, *given)
        monkeypatch.setattr(compiled, "lock", _BusyLock())

    def find_late(matcher: Matcher) -> Mask:
        time.sleep(rng.choice((0.0, 0.001, 0.01)))
        return find(matcher)

    monkeypatch.setattr(Matcher, "_next_mask", find_late)
    monkeypatch.setattr(CompiledFormat, "__init__", begin)
    monkeypatch.setattr(late_masks, "MAX_WAIT_S", 0.001)
    for options in ({"token_budget": 48, "max_num_seqs": 40}, {"token_budget": 7, "max_num_seqs": 6, "block_size": 4}):
        with fastgen.load(directory, target="cpp", **options) as llm:
            assert_same(list(map(with_late_end, alone)), list(map(with_late_end, llm.generate(PROMPTS, SAMPLINGS))))
            recording = llm.recording()
            assert llm._engine is not None
            llm._engine.check_integrity()
        assert sum(len(step.postponed) for step in recording.steps) > 100
        assert first_difference(recording) is None


def test_the_format_of_an_answer_that_has_ended_is_let_go(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flight recorder keeps requests, but not what their formats take."""
    compiled: list[weakref.ref[CompiledFormat]] = []
    init = CompiledFormat.__init__

    def noted(each: CompiledFormat, *given: Any) -> None:
        init(each, *given)
        compiled.append(weakref.ref(each))

    monkeypatch.setattr(CompiledFormat, "__init__", noted)
    monkeypatch.setattr(kept_formats, "MAX_KEPT", 1)
    for letter in "ab":
        asked(llm, {"type": "regex", "pattern": f"{letter}{{7}}"}, max_new_tokens=20, n=2)
    gc.collect()
    assert [each() is None for each in compiled] == [True, False]


def test_the_engine_keeps_the_formats_that_its_ledger_has_room_for(llm: LLM) -> None:
    assert llm._engine is not None
    assert llm._engine.grammars is not None
    row = llm.ledger.size_bytes("compiled formats")
    assert llm._engine.grammars._kept._max_bytes == row
    assert row == min(128 << 20, llm.ledger.device_bytes // 64)
    assert llm._engine.grammars.max_in_use == kept_formats.most_in_use(llm.ledger.device_bytes)


def test_a_slow_mask_delays_no_other_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    find, may_end = Matcher._next_mask, threading.Event()

    def find_when_allowed(matcher: Matcher) -> Mask:
        assert may_end.wait(60)
        return find(matcher)

    monkeypatch.setattr(Matcher, "_next_mask", find_when_allowed)
    constrained = {"type": "regex", "pattern": "a{20}"}
    slow = [llm.stream([5, 6], max_new_tokens=30, response_format=constrained) for _ in range(3)]
    try:
        assert len(llm.generate([7, 8, 9], max_new_tokens=20, ignore_eos=True).token_ids) == 20
    finally:
        may_end.set()
    for stream in slow:
        list(stream)
        assert stream.output.text == "a" * 20


# By definition


def check_by_definition(output: GenerationOutput, sampling: SamplingParams, case: Case, texts: dict[int, str]) -> int:
    """Each token is the one that wins among those by which the text can still get the format, and the end where it has
    it. Returns how many were won by a margin; the first that was not ends the comparison.
    """
    assert output.logprobs is not None
    text, position = "", len(output.prompt_token_ids)
    for step, (token_id, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        scores = torch.tensor([row[each] for each in range(VOCAB_SIZE)])
        if sampling.temperature:
            seed, at, index = (torch.tensor([each]) for each in (sampling.seed, position + step, 0))
            scores = scores / sampling.temperature + gumbel_noise(seed, at, index, VOCAB_SIZE)[0]  # type: ignore[arg-type]
        possible = [each for each, added in texts.items() if case.can_become(text + added)]
        possible += [EOS] * case.has_it(text)
        ranked = sorted(possible, key=lambda each: -scores[each].item())
        if len(ranked) > 1 and scores[ranked[0]] - scores[ranked[1]] < MARGIN:
            return step
        assert token_id == ranked[0], f"{text!r} + {texts.get(token_id)!r}, not {texts.get(ranked[0])!r}"
        text += texts.get(token_id, "")
    if output.finish_reason == "stop":
        assert case.has_it(text)
    assert output.text == text
    return len(output.token_ids)


ASCII_CASES = [case for case in KNOWN_CASES if "é" not in str(case.format)]


def check_target(directory: Path, target: str, cases: list[Case], **options: Any) -> None:
    samplings = [
        SamplingParams(
            response_format=case.unforced,  # type: ignore[arg-type]
            temperature=temperature,
            seed=index,
            max_new_tokens=24,
            logprobs=VOCAB_SIZE,
        )
        for index, case in enumerate(cases)
        for temperature in (0.0, 1.2)
    ]
    prompts = [[random.Random(index).randrange(3, 300) for _ in range(1 + index)] for index in range(len(samplings))]
    free = SamplingParams(temperature=0.9, seed=3, max_new_tokens=8)
    with fastgen.load(directory, target=target, dtype="float32", **options) as llm:
        tokenizer = llm.tokenizer
        texts = {each: tokenizer.decode([each]) for each in tokenizer.get_vocab().values()}
        texts = {each: text for each, text in texts.items() if each > EOS and text.isascii()}
        *outputs, unconstrained = llm.generate([*prompts, prompts[0]], [*samplings, free])
        assert llm.generate(prompts[0], free).token_ids == unconstrained.token_ids
    certain = [
        check_by_definition(output, sampling, cases[index // 2], texts)
        for index, (output, sampling) in enumerate(zip(outputs, samplings, strict=True))
    ]
    assert sum(certain) > 0.9 * sum(len(output.token_ids) for output in outputs)


@pytest.mark.parametrize("target", ["torch", "cpp"])
def test_tokens_are_those_that_win_among_the_possible(directory: Path, target: str) -> None:
    check_target(directory, target, ASCII_CASES)


@pytest.mark.slow
def test_tokens_are_those_that_win_among_the_possible_on_interpreted_kernels(tmp_path: Path) -> None:
    """Masks go to the device between the forward pass and the captured sampling."""
    directory = save_writer("llama", tmp_path)
    check_target(directory, "triton", [ASCII_CASES[0], ASCII_CASES[-1]], token_budget=8, max_num_seqs=3)


# What ends a request


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return fastgen.load(save_writer("llama", tmp_path_factory.mktemp("model")), target="cpp")


def asked(llm: LLM, response_format: dict[str, Any], **fields: Any) -> GenerationOutput:
    fields = {"temperature": 1.0, "seed": 1, "max_new_tokens": 30} | fields
    return llm.generate([5, 6, 7], response_format=response_format, **fields)


def test_a_complete_answer_stops_without_an_end_token(llm: LLM) -> None:
    output = asked(llm, {"type": "regex", "pattern": "cat"})
    assert (output.text, output.finish_reason) == ("cat", "stop")
    assert EOS not in output.token_ids
    last = asked(llm, {"type": "regex", "pattern": "[0-9]{3}"}, max_new_tokens=3, logit_bias={EOS: -100})
    assert (len(last.text), last.finish_reason) == (3, "stop")


def test_an_answer_that_is_cut_off_says_so(llm: LLM) -> None:
    output = asked(llm, {"type": "regex", "pattern": "[a-z]{200}"}, max_new_tokens=4)
    assert output.finish_reason == "length"
    assert output.text.isalpha()


def test_stop_strings_still_cut(llm: LLM) -> None:
    output = asked(llm, {"type": "regex", "pattern": "(ab){9}c"}, stop="ba")
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_log_probabilities_are_those_of_the_raw_logits(llm: LLM) -> None:
    free = llm.generate([5, 6, 7], max_new_tokens=1, logprobs=VOCAB_SIZE)
    constrained = asked(llm, {"type": "regex", "pattern": "[xyz]!"}, max_new_tokens=2, logprobs=VOCAB_SIZE)
    assert free.logprobs is not None
    assert constrained.logprobs is not None
    assert constrained.logprobs[0] == free.logprobs[0]


def test_a_format_wins_over_biases(llm: LLM) -> None:
    output = asked(llm, {"type": "regex", "pattern": "q{3}"}, logit_bias=dict.fromkeys(range(3, 320), -100.0))
    assert output.text == "qqq"


def test_a_format_that_costs_too_much_ends_its_request_alone(llm: LLM) -> None:
    """After the x the parser has more ways to continue than the limits allow."""
    rules = [f'way{number}: "k{number}" "-"' for number in range(2100)]
    ways = " ".join(f"way{number}?" for number in range(2100))
    costly = {"type": "grammar", "grammar": "\n".join([f'start: "x" {ways}', *rules])}
    samplings = [
        SamplingParams(response_format=costly, max_new_tokens=20),  # type: ignore[arg-type]
        SamplingParams(max_new_tokens=20, ignore_eos=True),
    ]
    failed, fine = llm.generate([[5], [6]], samplings)
    assert failed.finish_reason == "error"
    assert "response_format cannot be followed: Parser Error" in (failed.error or "")
    assert fine.token_ids == llm.generate([6], samplings[1]).token_ids


@pytest.mark.parametrize("target", ["torch", "cpp", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_mask_that_cannot_be_made_ends_its_request_alone(
    directory: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with what is no ``Exception``, as a panic of the library's."""
    compute, broken = Matcher._next_mask, pattern("b{9}").format

    class PanicError(BaseException):
        pass

    def fails(self: Matcher) -> Mask:
        if self._num_tokens == 2 and self._constraint.min_new_tokens == 1:
            raise PanicError("broken")
        return compute(self)

    samplings = [
        SamplingParams(response_format=broken, max_new_tokens=4, min_new_tokens=1),  # type: ignore[arg-type]
        SamplingParams(response_format=pattern("[xyz]{9}").format, max_new_tokens=4),  # type: ignore[arg-type]
        SamplingParams(max_new_tokens=4, ignore_eos=True),
    ]
    with fastgen.load(directory, target=target, dtype="float32", token_budget=8, max_num_seqs=3) as llm:
        whole = llm.generate([[5], [6], [7]], samplings)
        monkeypatch.setattr(Matcher, "_next_mask", fails)
        failed, *others = llm.generate([[5], [6], [7]], samplings)
    assert (failed.finish_reason, failed.token_ids) == ("error", whole[0].token_ids[:2])
    assert failed.error == "response_format cannot be followed: PanicError: broken"
    assert [result_of(output) for output in others] == [result_of(output) for output in whole[1:]]


def test_a_thread_that_cannot_start_ends_its_request_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if self.name.startswith("fastgen-mask"):
            raise RuntimeError("can't start new thread")
        start(self)

    samplings = [
        SamplingParams(response_format=pattern("b{9}").format, max_new_tokens=4),  # type: ignore[arg-type]
        SamplingParams(max_new_tokens=4, ignore_eos=True),
    ]
    with fastgen.load(directory, dtype="float32", token_budget=8, max_num_seqs=3) as llm:
        alone = llm.generate([7], samplings[1])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            failed, other = llm.generate([[5], [7]], samplings)
        again = llm.generate([5], samplings[0])
    assert failed.finish_reason == "error"
    assert failed.error == "response_format cannot be followed: RuntimeError: can't start new thread"
    assert result_of(other) == result_of(alone)
    assert again.finish_reason == "length"


def test_a_model_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    with (
        fastgen.load(save_checkpoint("llama", tmp_path)) as llm,
        pytest.raises(InvalidArgumentError, match="response_format needs a tokenizer, and this model has none"),
    ):
        llm.generate([5], response_format={"type": "json_object"})


def test_a_bad_format_among_several_prompts_names_its_prompt_and_none_runs(llm: LLM) -> None:
    bad = SamplingParams(response_format={"type": "regex", "pattern": "("})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"prompt 1: response_format \(regex\) is refused"):
        llm.generate([[5], [6]], [SamplingParams(), bad])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-opt"])
def test_the_built_in_models_write_json(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "colour": {"enum": ["red", "blue", "green"]},
        },
        "required": ["name", "colour"],
        "additionalProperties": False,
    }
    sampling = resolve_seed(
        SamplingParams(
            response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}},  # type: ignore[arg-type]
            temperature=0.7,
            max_new_tokens=350,
            seed=2,
        )
    )
    with fastgen.load(name) as llm:
        outputs = llm.generate(["There once was a fox named"] * 4, [replace(sampling, seed=seed) for seed in range(4)])
        plan = llm.chat([{"role": "user", "content": "Tell me a story."}], sampling)
    for output in [*outputs, plan]:
        assert output.finish_reason == "stop"
        check_json(output.text, schema)


def test_the_masks_of_cancelled_requests_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, num_computed = threading.Event(), 0
    find = Matcher._next_mask

    def held(matcher: Matcher) -> Mask:
        nonlocal num_computed
        assert may_go.wait(60)
        num_computed += 1
        return find(matcher)

    monkeypatch.setattr(Matcher, "_next_mask", held)
    with fastgen.load(save_writer("llama", tmp_path), target="cpp") as llm:
        engine = llm._engine
        assert engine is not None
        sampling = SamplingParams(response_format=pattern("[a-z]{40}").format, n=12)
        generation = engine.submit([1, 2, 3], sampling)
        engine.step()
        for completion in generation.completions:
            assert completion.sequence.matcher is not None
            completion.sequence.matcher.prepare()
        (compiled,) = engine.grammars._kept._all  # type: ignore[union-attr]
        assert len(compiled.due) >= 12
        engine.cancel(generation)
        may_go.set()
        deadline_s = time.monotonic() + 60
        while compiled.due and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert (len(compiled.due), num_computed) == (0, 1)
