"""Sampling parameters: every field's type and range, near spellings, model defaults, and what must survive a pickle."""

import ast
import copy
import dataclasses
import inspect
import math
import pickle
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationOutput, RequestMetrics
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams, default_sampling, not_followed, resolve_seed


def test_the_defaults_are_the_documented_ones():
    assert vars(SamplingParams()) == {
        "max_new_tokens": 128, "min_new_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logit_bias": {}, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": None, "n": 1, "stop": (), "stop_token_ids": (), "ignore_eos": False, "logprobs": None,
        "prompt_logprobs": None, "timeout_s": None, "beam_width": 1, "length_penalty": 1.0, "early_stopping": False,
        "priority": 0, "response_format": None,
    }  # fmt: skip
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=1e-9).greedy


ACCEPTED = [
    ("max_new_tokens", 1, 1),
    ("min_new_tokens", 128, 128),
    ("max_new_tokens", np.int64(7), 7),
    ("temperature", 0, 0.0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Fraction(1, 4), 0.25),
    ("temperature", 1e300, 1e300),
    ("top_k", 10**30, 10**30),
    ("top_p", 1, 1.0),
    ("top_p", 5e-324, 5e-324),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 1e-6, 1e-6),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2, 2.0),
    ("frequency_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", None, {}),
    ("logit_bias", {np.int32(3): -100, 5: np.float64(100)}, {3: -100.0, 5: 100.0}),
    ("seed", -(2**200), -(2**200)),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("n", 3, 3),
    ("n", 16384, 16384),
    ("stop", "END", ("END",)),
    ("stop", ["a", "ab"], ("a", "ab")),
    ("stop", None, ()),
    ("stop_token_ids", [0, np.int64(4)], (0, 4)),
    ("stop_token_ids", np.array([2, 3]), (2, 3)),
    ("ignore_eos", True, True),
    ("logprobs", 0, 0),
    ("prompt_logprobs", 20, 20),
    ("timeout_s", 1e-3, 1e-3),
    ("beam_width", np.int64(4), 4),
    ("beam_width", 16384, 16384),
    ("length_penalty", -10, -10.0),
    ("length_penalty", 10, 10.0),
    ("early_stopping", True, True),
    ("early_stopping", "never", "never"),
    ("priority", np.int64(-3), -3),
    ("response_format", {"type": "text"}, None),
    ("response_format", {"type": "regex", "pattern": "a+"}, ResponseFormat("regex", "a+")),
    ("response_format", ResponseFormat("json_object"), ResponseFormat("json_object")),
]


@pytest.mark.parametrize(("name", "given", "kept"), ACCEPTED)
def test_values_in_range_are_kept_as_plain_python(name, given, kept):
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == kept
    assert type(value) is type(kept) or name == "logit_bias"


NOT_INTEGERS = [True, False, 1.0, "1", None, math.nan, np.bool_(True), [1]]
NOT_NUMBERS = [True, "1", None, math.nan, math.inf, -math.inf, 1j, np.float32("nan"), 10**400, [1.0]]
REFUSED = {
    "max_new_tokens": [0, -1, *NOT_INTEGERS],
    "min_new_tokens": [-1, 129, *NOT_INTEGERS],
    "temperature": [-1e-9, *NOT_NUMBERS],
    "top_k": [-1, *NOT_INTEGERS],
    "top_p": [0, 1.0000001, -0.5, *NOT_NUMBERS],
    "min_p": [-1e-9, 1.0000001, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, *NOT_NUMBERS],
    "presence_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "frequency_penalty": [-2.01, 2.01, *NOT_NUMBERS],
    "logit_bias": [
        {1: 100.5},
        {1: -101},
        {-1: 1},
        {"1": 1},
        {1: True},
        {True: 1},
        {1: None},
        {1: math.nan},
        [1],
        "x",
        5,
    ],
    "seed": [True, 1.0, "1", math.nan],
    "n": [0, -1, 16385, 10**30, *NOT_INTEGERS],
    "stop": ["", ["a", ""], [1], 5, b"x", {"a": 1}, [None], True],
    "stop_token_ids": [[-1], [True], [1.0], ["1"], "12", 5, {1: 2}, [[1]]],
    "ignore_eos": [0, 1, None, "true"],
    "logprobs": [-1, True, 1.0, "1"],
    "prompt_logprobs": [-1, True, 1.0, "1"],
    "timeout_s": [0, -1, True, "1", math.nan, math.inf],
    "beam_width": [0, -1, 16385, *NOT_INTEGERS],
    "length_penalty": [-10.01, 10.01, *NOT_NUMBERS],
    "early_stopping": [0, 1, None, "true", "always", np.array(["never"])],
    "priority": NOT_INTEGERS,
    "response_format": ["json_object", {}, {"type": 1}, {"type": "regex"}, 5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_bad_value_is_refused_by_name_with_its_range_and_the_value(name, value):
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert " must be " in message
    assert ", not " in message


def test_every_field_is_tried_above():
    assert REFUSED.keys() == vars(SamplingParams()).keys()
    assert {name for name, _, _ in ACCEPTED} == REFUSED.keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda **fields: SamplingParams(**fields),
        lambda **fields: SamplingParams.from_fields(SamplingParams(temperature=1.0), **fields),
    ],
)
@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "'temperature'"), ("max_tokens", "'max_new_tokens'"), ("logit_biases", "'logit_bias'")],
)
def test_an_unknown_field_is_refused_with_a_near_spelling(make, name, hint):
    with pytest.raises(InvalidArgumentError, match=f"'{name}' is not known; did you mean {hint}"):
        make(**{name: 1})


def test_fields_replace_defaults_and_the_whole_is_checked():
    defaults = SamplingParams(temperature=0.7, max_new_tokens=10)
    made = SamplingParams.from_fields(defaults, top_p=0.9, max_new_tokens=5)
    assert (made.temperature, made.top_p, made.max_new_tokens) == (0.7, 0.9, 5)
    assert defaults == SamplingParams(temperature=0.7, max_new_tokens=10)
    assert SamplingParams.from_fields(defaults) == defaults
    with pytest.raises(InvalidArgumentError, match=r"min_new_tokens must be at most max_new_tokens \(10\), not 11"):
        SamplingParams.from_fields(defaults, min_new_tokens=11)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, "beam_width=4 needs temperature=0, since a beam search draws nothing; it is 0.7, "),
        ({"stop": "x"}, "beam_width=4 does not go with stop strings; end beams with stop_token_ids"),
        ({"response_format": ResponseFormat("regex", "a")}, "does not go with response_format; ask for one of them"),
        ({"n": 5}, "n=5 completions of beam_width=4 beams: ask for at most as many as there are beams"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(beam_width=4, **fields)
    SamplingParams(beam_width=1, **fields)


def test_parameters_are_values():
    bias = {1: 2.0}
    sampling = SamplingParams(seed=5, stop=["a"], logit_bias=bias, temperature=0.5)
    bias[2] = 3.0
    assert sampling.logit_bias == {1: 2.0}
    twin = pickle.loads(pickle.dumps(sampling))
    assert twin == sampling
    assert hash(twin) == hash(sampling)
    assert sampling != SamplingParams(seed=5, stop=["a"], temperature=0.5)
    with pytest.raises(AttributeError):
        sampling.seed = 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {99: 1, 100: 1}}, "logit_bias holds token id 100; the model's ids are 0 to 99"),
        ({"stop_token_ids": [5, 100]}, "stop_token_ids holds token id 100; the model's ids are 0 to 99"),
        ({"logprobs": 101}, "logprobs must be at most the vocabulary's size, 100, not 101"),
        ({"prompt_logprobs": 101}, "prompt_logprobs must be at most the vocabulary's size, 100, not 101"),
    ],
)
def test_what_the_vocabulary_cannot_hold_is_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(**fields).check_against(100)
    SamplingParams(**fields).check_against(101)


def test_top_k_beyond_the_vocabulary_keeps_all_and_is_no_error():
    SamplingParams(top_k=1000).check_against(100)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "max_length": 4096, "eos_token_id": [1, 2]}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"repetition_penalty": 1.5, "top_k": 5}, {"repetition_penalty": 1.5}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "temperature": None, "top_k": None, "max_new_tokens": 2048}, {"temperature": 1.0}),
    ],
)
def test_model_defaults_come_from_a_generation_config(config, expected):
    assert default_sampling(config) == SamplingParams(**expected)


def test_keys_that_are_not_followed_are_named_unless_they_do_nothing():
    off = {"num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None, "guidance_scale": 1, "typical_p": 0.5}
    assert not_followed({}) == not_followed(off) == not_followed({"max_length": 20, "temperature": 0.6}) == []
    assert not_followed({"do_sample": True, "typical_p": 1.0, "num_beams": 4}) == ["num_beams"]
    assert not_followed({"do_sample": True, "typical_p": 0.5}) == ["typical_p"]
    assert not_followed({"suppress_tokens": [3], "forced_eos_token_id": 0}) == [
        "suppress_tokens",
        "forced_eos_token_id",
    ]


def test_type_checkers_see_every_field_with_its_default():
    """The class states the types that are taken for them alone."""
    (defined,) = ast.parse(inspect.getsource(SamplingParams)).body
    (stated,) = (each for each in ast.walk(defined) if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    names = [each.arg for each in stated.args.kwonlyargs]
    defaults = [ast.literal_eval(each) for each in stated.args.kw_defaults]
    wanted = {item.name: item.default for item in fields(SamplingParams)}
    assert dict(zip(names, defaults, strict=True)) == wanted | {"logit_bias": None}
    assert list(inspect.signature(SamplingParams).parameters) == names


def test_a_bad_generation_config_is_named():
    with pytest.raises(InvalidArgumentError, match=r"generation_config\.json: top_p must be"):
        default_sampling({"do_sample": True, "top_p": 0})


def test_a_seed_is_kept_and_a_missing_one_drawn():
    seeded = SamplingParams(seed=0)
    assert resolve_seed(seeded) is seeded
    drawn = [resolve_seed(SamplingParams(temperature=0.5)) for _ in range(20)]
    assert len({sampling.seed for sampling in drawn}) == 20
    assert all(0 <= sampling.seed < 2**64 and sampling.temperature == 0.5 for sampling in drawn)


def test_an_output_leads_its_completions():
    def output(text, others=()):
        metrics = RequestMetrics(queue_s=0.1, ttft_s=None)
        return GenerationOutput(
            request_id=0,
            text=text,
            token_ids=[1],
            finish_reason="length",
            prompt_token_ids=[2],
            metrics=metrics,
            others=others,
        )

    first = output("a", (output("b"), output("c")))
    assert first.completions[0] is first
    assert [item.text for item in first.completions] == ["a", "b", "c"]
    assert [item.text for item in first.completions[1].completions] == ["b"]
    assert pickle.loads(pickle.dumps(first)) == first
    assert "text='a'" in repr(first)


@pytest.mark.parametrize(
    "change",
    [
        lambda biases: biases.update({1: 200.0}),
        lambda biases: biases.__setitem__(-1, 1.0),
        lambda biases: biases.__delitem__(5),
        lambda biases: biases.__ior__({6: 1.0}),
        lambda biases: biases.setdefault(6, 1.0),
        lambda biases: biases.pop(5),
        lambda biases: biases.popitem(),
        lambda biases: biases.clear(),
    ],
)
def test_biases_cannot_be_changed_after_the_check(change):
    sampling = SamplingParams(logit_bias={5: 1.0})
    for params in (sampling, SamplingParams()):
        with pytest.raises(TypeError, match=r"dataclasses\.replace"):
            change(params.logit_bias)
    assert (sampling.logit_bias, SamplingParams().logit_bias) == ({5: 1.0}, {})


def test_biases_are_a_dict_that_can_be_copied():
    given = {5: 1.0, 7: -2.5}
    sampling = SamplingParams(logit_bias=given)
    given[5] = 3.0
    assert sampling.logit_bias == {5: 1.0, 7: -2.5}
    assert repr(sampling.logit_bias) == "{5: 1.0, 7: -2.5}"
    for same in (pickle.loads(pickle.dumps(sampling)), copy.deepcopy(sampling), dataclasses.replace(sampling, seed=1)):
        assert same.logit_bias == sampling.logit_bias
        with pytest.raises(TypeError):
            same.logit_bias[5] = 1.0
    changed = dataclasses.replace(sampling, logit_bias={**sampling.logit_bias, 6: 1.0})
    assert changed.logit_bias == {5: 1.0, 7: -2.5, 6: 1.0}
