"""``fastgen generate``, on a stub that remembers what it was asked, and on a built-in model."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields

import pytest

import fastgen
from fastgen.cli import options
from fastgen.errors import InvalidArgumentError, ModelNotFoundError
from fastgen.runtime.requests.outputs import RequestMetrics

# One value of each flag, as typed and as it must arrive.
LOAD_FLAGS = {
    "recipe": (["--recipe", "r.yaml"], "r.yaml"),
    "device": (["--device", "cpu"], "cpu"),
    "dtype": (["--dtype", "float32"], "float32"),
    "token_budget": (["--token-budget", "64"], 64),
    "max_num_seqs": (["--max-num-seqs", "8"], 8),
    "kv_cache_memory": (["--kv-cache-memory", "4GiB"], "4GiB"),
    "memory": (["--memory", "8GiB"], "8GiB"),
    "block_size": (["--block-size", "16"], 16),
    "max_model_len": (["--max-model-len", "99"], 99),
    "policy": (["--policy", "orca"], "orca"),
    "itl_target_ms": (["--itl-target-ms", "40"], 40.0),
    "aging_s": (["--aging-s", "5"], 5.0),
    "prefix_caching": (["--no-prefix-caching"], False),
    "kv_reservation": (["--kv-reservation", "context"], "context"),
    "num_threads": (["--num-threads", "2"], 2),
    "tensor_parallel": (["--tensor-parallel", "2"], 2),
    "target": (["--target", "torch"], "torch"),
    "quantize": (["--quantize", "int8"], "int8"),
    "speculative": (["--speculative", "ngram"], "ngram"),
    "num_draft_tokens": (["--num-draft-tokens", "6"], 6),
    "sealed": (["--sealed"], True),
    "revision": (["--revision", "main"], "main"),
    "allow_config_keys": (["--allow-config-key", "a", "--allow-config-key", "b"], ["a", "b"]),
}
SAMPLING_FLAGS = {
    "max_new_tokens": (["--max-new-tokens", "7"], 7),
    "min_new_tokens": (["--min-new-tokens", "0"], 0),
    "temperature": (["--temperature", "0"], 0.0),
    "top_p": (["--top-p", "0.5"], 0.5),
    "top_k": (["--top-k", "0"], 0),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", "17=-100", "--logit-bias", "3=0.5"], {17: -100.0, 3: 0.5}),
    "seed": (["--seed", "-3"], -3),
    "n": (["--n", "2"], 2),
    "stop": (["--stop", "\n\n", "--stop", "END"], ["\n\n", "END"]),
    "stop_token_ids": (["--stop-token-id", "0", "--stop-token-id", "5"], [0, 5]),
    "ignore_eos": (["--ignore-eos"], True),
    "logprobs": (["--json", "--logprobs", "0"], 0),
    "prompt_logprobs": (["--json", "--prompt-logprobs", "2"], 2),
    "timeout_s": (["--timeout-s", "1.5"], 1.5),
    "response_format": (["--response-format", '{"type": "json_object"}'], {"type": "json_object"}),
    "beam_width": (["--beam-width", "4"], 4),
    "length_penalty": (["--length-penalty", "-0.5"], -0.5),
    "early_stopping": (["--early-stopping", "true"], True),
    "priority": (["--priority", "-2"], -2),
}


def test_every_argument_of_load_has_its_flag() -> None:
    arguments = inspect.signature(fastgen.load).parameters.keys() - {"model"}
    assert arguments == {argument.name for argument in options.LOAD_ARGUMENTS} == set(LOAD_FLAGS)


def test_every_sampling_field_has_its_flag() -> None:
    stated = {argument.name for argument in options.SAMPLING_ARGUMENTS}
    assert {item.name for item in fields(fastgen.SamplingParams)} == stated == set(SAMPLING_FLAGS)


def test_what_is_not_given_is_not_passed(run, stub) -> None:
    assert run("generate", "m", "one two").out == "owt eno\n"
    assert stub.loaded == ("m", {})
    assert stub.fields == {}
    assert stub.closed


@pytest.mark.parametrize("name", LOAD_FLAGS)
def test_a_load_flag_arrives_alone(run, stub, name) -> None:
    flags, value = LOAD_FLAGS[name]
    assert run("generate", "m", "p", *flags).status == 0
    assert stub.loaded == ("m", {name: value})
    assert stub.fields == {}


@pytest.mark.parametrize("flags", [["--bundle", "dir"], ["--sealed", "--bundle", "dir"]])
@pytest.mark.parametrize("command", [("generate", "m", "p"), ("chat", "m")])
def test_a_bundle_elsewhere_is_named_by_a_flag_of_its_own(run, stub, command, flags) -> None:
    assert run(*command, *flags).status == 0
    assert stub.loaded == ("m", {"sealed": "dir"})


@pytest.mark.parametrize("name", SAMPLING_FLAGS)
def test_a_sampling_flag_arrives_alone(run, stub, name) -> None:
    flags, value = SAMPLING_FLAGS[name]
    assert run("generate", "m", "p", *flags).status == 0
    assert stub.loaded == ("m", {})
    assert stub.fields == {name: value}


def test_several_prompts_are_generated_together_and_printed_in_order(run, stub) -> None:
    done = run("generate", "m", "abc", "", "de", "-n", "2", "--echo")
    assert stub.asked == [["abc", "", "de"]]
    assert done.out.splitlines() == [
        *("[prompt 1, answer 1]", "abccba", "[prompt 1, answer 2]", "abccba1"),
        *("[prompt 2, answer 1]", "", "[prompt 2, answer 2]", "1"),
        *("[prompt 3, answer 1]", "deed", "[prompt 3, answer 2]", "deed1"),
    ]


def test_one_prompt_is_streamed_to_a_terminal(run, stub) -> None:
    stub.answers["p"] = ["Once", " upon", " a time"]
    done = run("generate", "m", "p", "--seed", "1", "--stats", terminal=True)
    assert (done.status, done.out) == (0, "Once upon a time\n")
    assert stub.asked == ["p"]  # by stream, not by generate
    assert stub.fields == {"seed": 1}
    assert re.fullmatch(r"3 tokens in \d+\.\d\d s: [\d.]+ tokens/s, first token after \d+ ms\n", done.err)
    assert run("generate", "m", "p", "--echo", terminal=True).out == "pOnce upon a time\n"


def test_what_cannot_be_streamed_is_not(run, stub) -> None:
    for arguments in (["a", "b"], ["a", "-n", "2"], ["a", "--json"]):
        stub.asked.clear()
        assert run("generate", "m", *arguments, terminal=True).status == 0
        assert isinstance(stub.asked[0], list)


def test_a_prompt_from_stdin_loses_only_the_newline_that_ends_it(run, stub) -> None:
    run("generate", "m", "-", stdin=" zwei\n\nZeilen – ja\n\n")
    assert stub.asked == [[" zwei\n\nZeilen – ja\n"]]


def test_each_line_of_stdin_is_a_prompt(run, stub) -> None:
    run("generate", "m", "-", "--lines", stdin="one\n\n  two \nthree\x0bstill three\r\n \nfour")
    assert stub.asked == [["one", "  two ", "three\x0bstill three", "four"]]


def test_json_is_an_object_a_prompt(run, stub) -> None:
    stub.answers["odd"] = stub.make_output(
        "x y",
        logprobs=[{1: -0.5, 2: float("-inf")}, {3: -1.0}],
        prompt_logprobs=[None, {4: -2.0}],
        finish_reason="length",
    )
    done = run("generate", "m", "plain\n\u2028é", "odd", "--json", "--logprobs", "1")
    plain, odd = map(json.loads, done.out.splitlines())
    metrics = {"queue_s": 0.25, "ttft_s": 0.5, "gaps_s": [0.125], "cached_tokens": 0, "preemptions": 0}
    metrics["accepted_drafts"] = 0
    assert plain == {
        "prompt": "plain\n\u2028é",
        "text": "é\u2028\nnialp",
        "token_ids": [0, 1],
        "finish_reason": "stop",
        "metrics": metrics,
    }
    assert odd["finish_reason"] == "length"
    assert odd["logprobs"] == [{"1": -0.5, "2": None}, {"3": -1.0}]
    assert odd["prompt_logprobs"] == [None, {"4": -2.0}]


def test_json_holds_the_scores_of_beams(run, stub) -> None:
    stub.answers["ab"] = stub.make_output("ba", score=-0.5, others=(stub.make_output("bb", score=-1.25),))
    record = json.loads(run("generate", "m", "ab", "--beam-width", "2", "-n", "2", "--json").out)
    assert record["score"] == -0.5
    assert [completion["score"] for completion in record["completions"]] == [-0.5, -1.25]


def test_json_holds_all_completions(run, stub) -> None:
    record = json.loads(run("generate", "m", "ab", "--n", "3", "--json").out)
    assert record["text"] == "ba"
    assert [completion["text"] for completion in record["completions"]] == ["ba", "ba1", "ba2"]
    assert "completions" not in record["completions"][0]


def test_stats_go_to_stderr(run, stub) -> None:
    stub.answers["none"] = stub.make_output("", metrics=RequestMetrics(queue_s=0.0, ttft_s=None))
    done = run("generate", "m", "a b", "c", "none", "-n", "2", "--stats")
    assert "tokens/s" not in done.out
    assert re.fullmatch(
        r"6 tokens in \d+\.\d\d s: [\d.]+ tokens/s, first token after 500 ms \(median of 2\)\n", done.err
    )


def test_a_request_that_failed_is_told_and_fails_the_command(run, stub) -> None:
    stub.answers["bad"] = stub.make_output("so far", finish_reason="error", error="logits became NaN")
    done = run("generate", "m", "ok", "bad")
    assert done.status == 1
    assert done.out == "[prompt 1]\nko\n[prompt 2]\nso far\n"
    assert done.err == "fastgen: prompt 2: logits became NaN\n"
    done = run("generate", "m", "bad", terminal=True)
    assert (done.status, done.out, done.err) == (1, "sofar\n", "fastgen: prompt 1: logits became NaN\n")
    record = json.loads(run("generate", "m", "bad", "--json").out)
    assert (record["finish_reason"], record["error"]) == ("error", "logits became NaN")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], "", "Missing argument"),
        (["-", "p"], "", "stands alone"),
        (["p", "--lines"], "", "--lines"),
        (["-"], "", "stdin holds no prompt"),
        (["-", "--lines"], "\n  \n", "stdin holds no prompt"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["\udcff"], "", "not UTF-8"),
        (["p", "--logprobs", "1"], "", "--json"),
        (["p", "--logit-bias", "x=1"], "", "ID=BIAS"),
        (["p", "--logit-bias", "1"], "", "ID=BIAS"),
        (["p", "--temperature", "hot"], "", "--temperature"),
        (["p", "--no-such-flag"], "", "--no-such-flag"),
    ],
)
def test_wrong_usage_is_status_2_before_anything_is_loaded(run, stub, arguments, stdin, message) -> None:
    done = run("generate", "m", *arguments, stdin=stdin)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert stub.loaded is None


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("never", "never")])
def test_early_stopping_is_a_word(run, stub, text, value) -> None:
    assert run("generate", "m", "p", "--beam-width", "2", "--early-stopping", text).status == 0
    assert stub.fields == {"beam_width": 2, "early_stopping": value}
    done = run("generate", "m", "p", "--early-stopping", text.upper())
    assert done.status == 1
    assert "early_stopping must be true, false or 'never'" in done.err


def test_a_parameter_out_of_range_is_told_before_anything_is_loaded(run, stub) -> None:
    done = run("generate", "m", "p", "--temperature", "-1")
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(r"fastgen: temperature must be .* -1.0\n", done.err)
    assert stub.loaded is None


def test_an_error_of_fastgen_is_one_message_and_no_traceback(run, stub, monkeypatch) -> None:
    stub.answers["p"] = InvalidArgumentError("p is no prompt; take q")
    done = run("generate", "m", "p")
    assert (done.status, done.out, done.err) == (1, "", "fastgen: p is no prompt; take q\n")
    assert stub.closed

    def load(model: str) -> None:
        raise ModelNotFoundError(f"{model} is nowhere")

    monkeypatch.setattr(fastgen, "load", load)
    assert run("generate", "m", "p").err == "fastgen: m is nowhere\n"


def test_a_bug_is_not_dressed_up(run, stub, monkeypatch) -> None:
    stub.answers["p"] = ZeroDivisionError("bug")
    with pytest.raises(ZeroDivisionError):
        run("generate", "m", "p")


def test_ctrl_c_is_status_130(run, stub) -> None:
    stub.answers["p"] = ["Once", KeyboardInterrupt()]
    done = run("generate", "m", "p", terminal=True)
    assert (done.status, done.out) == (130, "Once\n")
    assert "Traceback" not in done.err
    assert stub.closed


def test_a_built_in_model_goes_on_with_a_story(run) -> None:
    arguments = ("generate", "tiny-llama", "Once upon a time", "--temperature", "0", "--max-new-tokens", "12")
    record = json.loads(run(*arguments, "--json", "--logprobs", "2").out)
    assert len(record["token_ids"]) == len(record["logprobs"]) == 12
    assert record["finish_reason"] == "length"
    for token_id, entry in zip(record["token_ids"], record["logprobs"], strict=True):
        assert entry[str(token_id)] == max(entry.values()) <= 0
    assert len(record["metrics"]["gaps_s"]) == 11
    assert run(*arguments).out == record["text"] + "\n"
    assert run(*arguments, terminal=True).out == record["text"] + "\n"
