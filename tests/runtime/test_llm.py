"""A loaded model as its user sees it: generate, stream, chat, their arguments, their errors, their ends."""

from __future__ import annotations

import gc
import io
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen import GenerationChunk, SamplingParams
from fastgen.errors import CheckpointError, FastgenError, InvalidArgumentError, OutOfMemoryError, RequestTooLargeError
from fastgen.runtime import loading
from fastgen.runtime.answers.generation import Completion
from fastgen.runtime.interrupts import interrupt_deferred
from fastgen.runtime.llm import LLM, Stream
from fastgen.runtime.step.step import Step
from tests.runtime.checkpoints import MAX_POSITIONS, VOCAB_SIZE, save_checkpoint, save_tokenizer
from tests.runtime.held import assert_nothing_held

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Iterator[LLM]:
    with fastgen.load(directory, max_num_seqs=6, token_budget=64) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """The model, and the promise that nothing is held when the test ends."""
    yield loaded
    assert_nothing_held(loaded._engine)


def num_blocks_held(llm: LLM) -> int:
    pool = llm._engine.scheduler.kv.pool
    return pool.capacity - pool.num_free


# Prompts in, outputs out


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(llm: LLM) -> None:
    text = llm.generate("the cat", max_new_tokens=3)
    assert text.prompt_token_ids == llm.tokenizer("the cat")["input_ids"]
    ids = llm.generate(text.prompt_token_ids, max_new_tokens=3)
    assert ids.token_ids == text.token_ids
    several = llm.generate(["the dog", PROMPT, "the cat"], max_new_tokens=3)
    assert [output.prompt_token_ids for output in several][1:] == [PROMPT, text.prompt_token_ids]
    assert several[2].token_ids == text.token_ids
    assert [output.token_ids for output in llm.generate([PROMPT], max_new_tokens=3)] == [several[1].token_ids]
    assert llm.generate([], max_new_tokens=3) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_how_many_of_many_prompts_are_done(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    llm.generate([PROMPT] * 7, max_new_tokens=1)
    assert terminal.getvalue() == "", "fewer are done before a bar is of use"
    llm.generate([PROMPT] * 8, max_new_tokens=1)
    assert "prompts" in terminal.getvalue()
    assert "8/8" in terminal.getvalue()


def test_sampling_is_fields_or_one_or_a_list(llm: LLM) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    assert len(llm.generate(PROMPT, sampling).token_ids) == 2
    outputs = llm.generate([PROMPT, PROMPT], [sampling, SamplingParams(max_new_tokens=4)])
    assert [len(output.token_ids) for output in outputs] == [2, 4]
    assert [len(output.token_ids) for output in llm.generate([PROMPT, PROMPT], sampling)] == [2, 2]
    with pytest.raises(InvalidArgumentError, match="2 prompts, but 1 SamplingParams"):
        llm.generate([PROMPT, PROMPT], [sampling])
    with pytest.raises(InvalidArgumentError, match="not both"):
        llm.generate(PROMPT, sampling, temperature=1.0)
    with pytest.raises(InvalidArgumentError, match="must be a SamplingParams"):
        llm.generate(PROMPT, {"temperature": 1.0})


@pytest.mark.parametrize("sampling", [5, "greedy", [SamplingParams(), 5], [5, SamplingParams()]])
def test_what_is_no_sampling_is_refused(llm: LLM, sampling: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a SamplingParams, or a list of one for each prompt"):
        llm.generate([PROMPT, PROMPT], sampling)


@pytest.mark.parametrize(("idle_s", "slept_s"), [(0.0, []), (0.002, [0.002]), (3.0, [0.005])])
def test_a_step_that_waits_for_more_requests_sleeps_for_five_milliseconds_at_most(
    idle_s: float, slept_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fastgen.runtime.llm.time", SimpleNamespace(sleep=slept.append))
    engine = SimpleNamespace(step=lambda: None, idle_s=idle_s)
    LLM._step(SimpleNamespace(_lock=threading.RLock(), _open_engine=lambda: engine))  # type: ignore[arg-type]
    assert slept == slept_s


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, VOCAB_SIZE], rf"prompt token 1 is id {VOCAB_SIZE}; the model's ids are 0 to {VOCAB_SIZE - 1}"),
        ([-1], "prompt token 0 is id -1"),
        ([5, -1], "prompt token 1 is id -1"),
        ([5, True], "prompt token 1 is True"),
        ([5, 2.0], "prompt token 1 is 2.0"),
        ("", "no tokens"),
        ([[]], "no tokens"),
        (None, "not NoneType"),
        (7, "not int"),
        ({"prompt": "x"}, "not dict"),
        (b"bytes", "not bytes"),
        ({"a", "b"}, "not set"),
        (torch.tensor(5), "not Tensor"),
        (["text", 5], "prompt 1: a prompt is a string or a list of token ids, not 5"),
        ([b"abc"], "not b'abc'"),
        ([{5: 1}], "not {5: 1}"),
        ([None, "text"], "prompt 0: .*not None"),
        ([[1.5]], "prompt token 0 is 1.5"),
        (torch.tensor([0.5]), "not 0.5"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(prompt, max_new_tokens=2)


def test_arrays_and_tensors_are_lists_of_ids(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=3).token_ids
    for ids in (np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT)):
        assert llm.generate(ids, max_new_tokens=3).token_ids == expected
        assert [output.token_ids for output in llm.generate([ids, PROMPT], max_new_tokens=3)] == [expected, expected]
    assert len(llm.generate(torch.tensor([PROMPT, PROMPT]), max_new_tokens=3)) == 2


def test_all_prompts_are_checked_before_any_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine, "step", lambda: pytest.fail("a step was run"))
    with pytest.raises(InvalidArgumentError, match="prompt 1: prompt token 0 is id 999"):
        llm.generate([PROMPT, [999]], max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match=r"prompt 2: .*max_model_len is 160"):
        llm.generate([PROMPT, PROMPT, [1] * 150], max_new_tokens=20)


def test_an_unknown_field_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean 'temperature'"):
        llm.generate(PROMPT, temprature=1.0)


def test_what_can_never_fit_is_refused_with_the_arithmetic(llm: LLM, directory: Path) -> None:
    room = MAX_POSITIONS - len(PROMPT)
    assert len(llm.generate(PROMPT, max_new_tokens=room, ignore_eos=True).token_ids) == room
    too_large = rf"makes {MAX_POSITIONS + 1} tokens.*at most {room} new tokens"
    with pytest.raises(RequestTooLargeError, match=too_large) as refused:
        llm.generate(PROMPT, max_new_tokens=room + 1)
    assert refused.value.room == room
    with pytest.raises(RequestTooLargeError, match=f"prompt 1: .*{too_large}") as refused:
        llm.generate([[1], PROMPT], max_new_tokens=room + 1)
    assert refused.value.room == room
    block_bytes = 2 * 2 * 16 * 1 * 8 * 4  # keys and values, layers, tokens, KV heads, head size, fp32
    with fastgen.load(directory, kv_cache_memory=4 * block_bytes) as small:
        assert len(small.generate(PROMPT, max_new_tokens=45, ignore_eos=True).token_ids) == 45  # 48 places, 3 blocks
        with pytest.raises(RequestTooLargeError, match="= 4 blocks, the KV cache has 3"):
            small.generate(PROMPT, max_new_tokens=46)


def test_outputs_hold_what_was_asked_for(llm: LLM) -> None:
    output = llm.generate(PROMPT, max_new_tokens=6, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    assert (output.finish_reason, output.error) == ("length", None)
    assert [len(row) for row in output.logprobs] == [3] * 6
    assert output.prompt_logprobs[0] is None
    assert [list(row) for row in output.prompt_logprobs[1:]] == [[token_id] for token_id in PROMPT[1:]]
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        assert row[token_id] == max(row.values()) < 0
    plain = llm.generate(PROMPT, max_new_tokens=2)
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    metrics = output.metrics
    assert 0 <= metrics.queue_s <= metrics.ttft_s
    assert len(metrics.gaps_s) == 5
    assert all(gap > 0 for gap in metrics.gaps_s)
    assert (metrics.cached_tokens, metrics.preemptions) == (0, 0)


def test_prompt_logprobs_do_not_depend_on_chunks(llm: LLM, directory: Path) -> None:
    prompt = [(7 * index) % VOCAB_SIZE for index in range(100)]
    whole = llm.generate(prompt, max_new_tokens=1, prompt_logprobs=0).prompt_logprobs
    with fastgen.load(directory, token_budget=8) as other:
        pieces = other.generate(prompt, max_new_tokens=1, prompt_logprobs=0, n=2).completions[1].prompt_logprobs
    for one, two in zip(whole[1:], pieces[1:], strict=True):
        assert list(one) == list(two)
        assert math.isclose(*one.values(), *two.values(), abs_tol=1e-4)


def test_n_completions_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    output = llm.generate(PROMPT, n=4, temperature=1.5, seed=3, max_new_tokens=8, ignore_eos=True)
    assert output.completions[0] is output
    answers = [tuple(completion.token_ids) for completion in output.completions]
    assert len(set(answers)) == 4
    again = llm.generate(PROMPT, n=4, temperature=1.5, seed=3, max_new_tokens=8, ignore_eos=True)
    assert [tuple(completion.token_ids) for completion in again.completions] == answers
    one, two = (llm.generate(PROMPT, temperature=1.5, max_new_tokens=12, ignore_eos=True) for _ in range(2))
    assert one.token_ids != two.token_ids


# How answers end


def test_stop_ids_eos_and_length(llm: LLM) -> None:
    free = llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    token_id = free.token_ids[4]
    first = free.token_ids.index(token_id)
    stopped = llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True, stop_token_ids=[token_id])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[: first + 1])
    later = llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True, stop_token_ids=[token_id], min_new_tokens=8)
    assert (later.finish_reason, len(later.token_ids)) == ("length", 8)
    assert token_id not in later.token_ids[:7]
    eos = llm.generate(PROMPT, max_new_tokens=8, logit_bias={2: 100})
    assert (eos.finish_reason, eos.token_ids, eos.text) == ("stop", [2], "")
    ignored = llm.generate(PROMPT, max_new_tokens=3, logit_bias={2: 100}, ignore_eos=True)
    assert (ignored.finish_reason, ignored.token_ids) == ("length", [2, 2, 2])


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    free = llm.generate("the cat", max_new_tokens=30, ignore_eos=True)
    assert len(free.text) > 12
    stop = free.text[6:9]
    stopped = llm.generate("the cat", max_new_tokens=30, ignore_eos=True, stop=stop)
    assert (stopped.finish_reason, stopped.text) == ("stop", free.text[: free.text.index(stop)])
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    never = llm.generate("the cat", max_new_tokens=30, ignore_eos=True, stop=["no such text"])
    assert (never.text, never.finish_reason) == (free.text, "length")


def test_a_timeout_ends_the_request_with_what_it_has(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm._engine
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.01
        return now_s

    monkeypatch.setattr(engine, "clock", clock)
    slow, quick = llm.generate(
        [PROMPT, PROMPT],
        [
            SamplingParams(max_new_tokens=100, timeout_s=0.5, ignore_eos=True),
            SamplingParams(max_new_tokens=100, ignore_eos=True),
        ],
    )
    assert slow.finish_reason == "timeout"
    assert 0 < len(slow.token_ids) < 100
    assert quick.token_ids[: len(slow.token_ids)] == slow.token_ids
    assert quick.finish_reason == "length"


def test_logits_that_are_not_numbers_end_only_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, marked = llm._engine.runner.sampler, [9, 9, 9]
    launch = sampler.launch

    def broken(logits, sequences):  # type: ignore[no-untyped-def]
        for row, sequence in enumerate(sequences):
            if list(sequence.request.prompt_ids) == marked and sequence.num_tokens > len(marked):
                logits[row, 5] = math.nan
        return launch(logits, sequences)

    monkeypatch.setattr(sampler, "launch", broken)
    good, bad = llm.generate([PROMPT, marked], max_new_tokens=5, ignore_eos=True)
    assert (good.finish_reason, len(good.token_ids)) == ("length", 5)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 1)
    assert "NaN" in bad.error


def test_a_step_that_fails_loses_no_other_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, [8] * 70, [9, 5], *([index + 3] * 5 for index in range(8))]
    expected = llm.generate(prompts, max_new_tokens=9, ignore_eos=True)
    forward = llm._engine.runner.forward
    hidden, num_calls = forward.hidden, 0

    def fails_once(*arguments):  # type: ignore[no-untyped-def]
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("a kernel failed")
        return hidden(*arguments)

    monkeypatch.setattr(forward, "hidden", fails_once)
    outputs = llm.generate(prompts, max_new_tokens=9, ignore_eos=True)
    failed = [output.finish_reason == "error" for output in outputs]
    assert any(failed)
    assert not all(failed)
    for output, has_failed, alone in zip(outputs, failed, expected, strict=True):
        if has_failed:
            assert output.error == "RuntimeError: a kernel failed"
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        else:
            assert output.token_ids == alone.token_ids
    assert_nothing_held(llm._engine)
    assert llm.generate(PROMPT, max_new_tokens=9, ignore_eos=True).token_ids == expected[0].token_ids


def test_steps_that_all_fail_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(llm._engine.runner.forward, "hidden", fails)
    outputs = llm.generate([PROMPT] * 20, max_new_tokens=9)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert {output.error for output in outputs} == {
        "out of memory, lower token_budget, max_num_seqs, max_model_len or kv_cache_memory when loading "
        "(OutOfMemoryError: tried to allocate 3 GiB)"
    }
    stream = llm.stream(PROMPT, max_new_tokens=9)
    assert [chunk.finish_reason for chunk in stream] == ["error"]


# Streams


def test_a_stream_gives_the_same_answer_piece_by_piece(llm: LLM) -> None:
    whole = llm.generate("the cat", max_new_tokens=20, ignore_eos=True)
    stream = llm.stream("the cat", max_new_tokens=20, ignore_eos=True)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) == 20
    assert stream.output.text == whole.text
    assert list(stream) == []


def test_a_stream_of_several_completions(llm: LLM) -> None:
    fields = {"n": 3, "temperature": 1.2, "seed": 8, "max_new_tokens": 10, "ignore_eos": True}
    whole = llm.generate("the cat", **fields)
    texts = ["", "", ""]
    for chunk in llm.stream("the cat", **fields):
        texts[chunk.index] += chunk.text
    assert texts == [completion.text for completion in whole.completions]


def test_a_closed_stream_frees_its_blocks_at_once(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
    next(stream)
    assert num_blocks_held(llm) == 1
    stream.close()
    assert num_blocks_held(llm) == 0
    assert stream.output.finish_reason == "cancelled"
    assert list(stream) == []
    stream.close()


def test_a_dropped_or_broken_off_stream_frees_its_blocks(llm: LLM) -> None:
    for chunk in llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True):
        assert chunk.index == 0
        break
    gc.collect()
    assert num_blocks_held(llm) == 0
    llm.stream(PROMPT, max_new_tokens=50)  # never asked for a chunk
    gc.collect()
    assert_nothing_held(llm._engine)
    with llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True) as stream:
        next(stream)
    assert num_blocks_held(llm) == 0


def test_a_stream_dropped_during_a_step_is_cancelled_by_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True)]
    launch = llm._engine.runner.launch

    def launch_and_drop(step: Step) -> None:
        if streams:
            streams.clear()
            gc.collect()
        launch(step)

    monkeypatch.setattr(llm._engine.runner, "launch", launch_and_drop)
    other = llm.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    assert len(other.token_ids) == 5


def test_streams_and_generate_interleave(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    one, two = (llm.stream(PROMPT, max_new_tokens=12, ignore_eos=True) for _ in range(2))
    found = list(next(one).token_ids)
    assert llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids == expected[:4]
    for chunk in one:
        found += chunk.token_ids
    assert found == expected
    assert [token_id for chunk in two for token_id in chunk.token_ids] == expected
    with pytest.raises(InvalidArgumentError, match="stream takes one prompt"):
        llm.stream([PROMPT, PROMPT])


def test_threads_share_the_engine(llm: LLM) -> None:
    expected = {
        length: llm.generate([3] * length, max_new_tokens=10, ignore_eos=True).token_ids for length in (1, 5, 9, 40)
    }
    found: dict[int, list[int]] = {}

    def work(length: int) -> None:
        found[length] = llm.generate([3] * length, max_new_tokens=10, ignore_eos=True).token_ids

    threads = [threading.Thread(target=work, args=(length,)) for length in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_stream_loses_nothing_while_another_thread_runs_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("the cat", max_new_tokens=60, ignore_eos=True)
    take_chunk = Completion.take_chunk

    def slow(completion: Completion) -> GenerationChunk | None:
        """As :meth:`Completion.take_chunk`, with a step of the other thread in the middle of it, if it can."""
        num_tokens = len(completion.token_ids)
        stepped.clear()
        stepped.wait(0.005)
        assert len(completion.token_ids) == num_tokens
        return take_chunk(completion)

    stepped, ended = threading.Event(), threading.Event()

    def others() -> None:
        while not ended.is_set():
            llm.generate([4], max_new_tokens=5, ignore_eos=True)
            stepped.set()

    monkeypatch.setattr(Completion, "take_chunk", slow)
    thread = threading.Thread(target=others)
    thread.start()
    try:
        chunks = list(llm.stream("the cat", max_new_tokens=60, ignore_eos=True))
    finally:
        ended.set()
        thread.join()
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text


def test_a_stream_whose_end_was_interrupted_is_found_by_the_next_act(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "__del__", lambda stream: None)  # as when a Ctrl-C arrives in it
    for _ in llm.stream(PROMPT, max_new_tokens=50, ignore_eos=True):
        break
    gc.collect()
    assert num_blocks_held(llm) == 1
    llm.generate(PROMPT, max_new_tokens=1)
    assert_nothing_held(llm._engine)


# Chat


def test_chat_renders_the_checkpoints_own_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    output = llm.chat(messages, max_new_tokens=3)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "<user>the cat\n<assistant>"
    several = llm.chat([messages, messages + messages], max_new_tokens=3)
    assert several[0].token_ids == output.token_ids
    assert [chunk.text for chunk in llm.stream_chat(messages, max_new_tokens=3)]
    with pytest.raises(InvalidArgumentError, match="stream_chat takes one conversation"):
        llm.stream_chat([messages, messages])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "not str"),
        ([None], "a conversation is a list of messages, not None"),
        ([{"content": "x"}], "message 0 must be"),
        ([{"role": "user"}], "message 0 must be"),
        ([{"role": "user", "content": None}], "message 0: content must be text"),
        ([{"role": "user", "content": "x"}, "y"], "message 1 must be"),
    ],
)
def test_a_bad_conversation_is_refused(llm: LLM, messages: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses this conversation"),
        ("{% for x in %}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "refuses this conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses this conversation"),
    ],
)
def test_a_template_that_is_absent_refuses_or_attacks(
    tmp_path: Path, directory: Path, template: str | None, message: str
) -> None:
    for file in directory.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_tokenizer(tmp_path, chat_template=template)
    with fastgen.load(tmp_path) as other, pytest.raises(InvalidArgumentError, match=message):
        other.chat([{"role": "user", "content": "x"}])


# Loading, closing, interrupting


def test_defaults_come_from_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "do_sample": True, "top_k": 3})
    )
    with fastgen.load(tmp_path) as llm:
        assert llm.generate(PROMPT, logit_bias={7: 100}).token_ids == [7]
        draws = {llm.generate(PROMPT, max_new_tokens=1, seed=seed).token_ids[0] for seed in range(60)}
        greedy = llm.generate(PROMPT, max_new_tokens=1, temperature=0, logprobs=2)
    assert 1 < len(draws) <= 3
    assert draws <= set(greedy.logprobs[0])
    for wrong in ("2", -1, [True]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(CheckpointError, match=rf"^{tmp_path}: generation_config.json: eos_token_id must be"):
            fastgen.load(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [3], "num_beams": 2}))
    with caplog.at_level("WARNING"):
        fastgen.load(tmp_path).close()
    assert "generation_config.json sets num_beams, suppress_tokens, by which transformers chooses" in caplog.text
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": -1}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature"):
        fastgen.load(tmp_path)


def test_without_a_tokenizer_token_ids_still_work(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with fastgen.load(tmp_path) as llm:
        output = llm.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
        assert (output.text, len(output.token_ids)) == ("", 3)
        with pytest.raises(InvalidArgumentError, match="needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(InvalidArgumentError, match="a conversation needs a tokenizer"):
            llm.check_can_chat()
        with pytest.raises(InvalidArgumentError, match="use stop_token_ids"):
            llm.generate(PROMPT, stop="x")


def test_a_tokenizer_smaller_than_the_vocabulary_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(loading._log, "warning", lambda text, *facts: said.append(text % facts))
    directory = save_checkpoint("llama", tmp_path / "x")
    with fastgen.load(directory, target="torch"):
        assert said == [], "there is no tokenizer"
    save_tokenizer(directory)
    with fastgen.load(directory, target="torch") as llm:
        num_known = len(llm.tokenizer)
        llm.generate("the cat", max_new_tokens=2)
    (sentence,) = said
    assert f"{num_known} of the model's {VOCAB_SIZE} token ids; the other {VOCAB_SIZE - num_known} have" in sentence
    with fastgen.load("tiny-llama", target="torch"):
        assert len(said) == 1, "its tokenizer knows all ids"


def test_a_broken_tokenizer_is_reported(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        fastgen.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": []}, InvalidArgumentError, r"dtype=\[\]"),
        ({"kv_cache_memory": "999TiB"}, OutOfMemoryError, r"KV cache .* GiB, but cpu has"),
        ({"token_budget": 10**12}, OutOfMemoryError, "activations of token_budget=1000000000000"),
        ({"token_budget": 10**9, "max_num_seqs": 10**9}, OutOfMemoryError, "block tables of max_num_seqs=1000000000"),
        ({"dtype": "float8"}, InvalidArgumentError, "dtype='float8': expected 'auto' or one of"),
        ({"device": "tpu"}, InvalidArgumentError, "device='tpu'"),
        ({"token_budget": 0}, InvalidArgumentError, "token_budget=0"),
        ({"block_size": True}, InvalidArgumentError, "block_size=True"),
        ({"num_threads": 0}, InvalidArgumentError, "num_threads=0"),
        ({"token_budget": 4, "max_num_seqs": 5}, InvalidArgumentError, "max_num_seqs=5 is above token_budget=4"),
        ({"max_model_len": 161}, InvalidArgumentError, "above the 160 positions"),
        ({"kv_cache_memory": "lots"}, InvalidArgumentError, "kv_cache_memory='lots'"),
        ({"kv_cache_memory": "1KiB"}, OutOfMemoryError, "one block of 16 tokens takes"),
    ],
)
def test_bad_options_are_refused(directory: Path, options: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fastgen.load(directory, **options)


def test_dynamic_rotary_scaling_is_refused_beyond_the_trained_length(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with fastgen.load(tmp_path) as llm:
        assert llm.config.max_model_len == MAX_POSITIONS
    with pytest.raises(InvalidArgumentError, match=r"dynamic rotary scaling .* depend on what else was asked"):
        fastgen.load(tmp_path, max_model_len=MAX_POSITIONS + 1)


@pytest.mark.parametrize("model", [None, 5, b"x", ["x"]])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(InvalidArgumentError, match="model is a directory, a built-in name or a hub id"):
        fastgen.load(model)


def test_max_model_len_bounds_a_request(directory: Path) -> None:
    with fastgen.load(directory, max_model_len=20) as llm:
        assert len(llm.generate(PROMPT, max_new_tokens=16, ignore_eos=True).token_ids) == 16
        with pytest.raises(RequestTooLargeError, match="max_model_len is 20"):
            llm.generate(PROMPT, max_new_tokens=17)


def test_a_closed_model_says_so(directory: Path) -> None:
    llm = fastgen.load(directory)
    stream = llm.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    next(stream)
    assert repr(llm) == f"<fastgen.LLM {directory}: LlamaForCausalLM, max_model_len={llm.config.max_model_len}>"
    llm.close()
    llm.close()
    assert repr(llm) == f"<fastgen.LLM {directory}: LlamaForCausalLM, closed>"
    assert stream.output.finish_reason == "cancelled"
    with pytest.raises(FastgenError, match="closed"):
        llm.generate(PROMPT)


def test_ctrl_c_is_left_alone_where_it_ends_the_process() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with interrupt_deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, previous)


def interrupted_while_failing() -> None:
    with interrupt_deferred():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("and then the step fails")


def test_ctrl_c_is_not_lost_where_the_step_fails() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_while_failing()
    assert isinstance(caught.value.__context__, ValueError)


def interrupted_in_a_long_block(acts: list[int]) -> None:
    with interrupt_deferred() as deferral:
        for act in range(3):
            with interrupt_deferred():
                signal.raise_signal(signal.SIGINT)
            acts.append(act)  # the inner block has ended, and the outer one holds it back still
            deferral.raise_received()


def test_ctrl_c_within_a_long_block_is_raised_between_two_acts() -> None:
    acts: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_in_a_long_block(acts)
    assert acts == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("during", ["step", "between"])
def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch, during: str) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=9, ignore_eos=True).token_ids
    forward = llm._engine.runner.forward
    hidden, num_calls = forward.hidden, 0

    def interrupts(*arguments):  # type: ignore[no-untyped-def]
        nonlocal num_calls
        num_calls += 1
        computed = hidden(*arguments)
        if num_calls == 2:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)  # were it not held back, it would be raised here, with the step half done
            assert during
        return computed

    def step_and_interrupt() -> None:
        step()
        signal.raise_signal(signal.SIGINT)

    if during == "step":
        monkeypatch.setattr(forward, "hidden", interrupts)
    else:
        step = llm._step
        monkeypatch.setattr(llm, "_step", step_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, [8] * 70], max_new_tokens=50, ignore_eos=True)
    monkeypatch.undo()
    assert_nothing_held(llm._engine)
    assert llm.generate(PROMPT, max_new_tokens=9, ignore_eos=True).token_ids == expected
