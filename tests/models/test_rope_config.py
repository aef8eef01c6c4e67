"""Rotary scaling mappings are read as transformers reads them, and wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastgen.models.frequencies import inverse_frequencies
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.resolve.rope_config import RopeConfigError, rotary_scaling
from fastgen.models.spec import RotarySpec

TRAINED = 2048


def read(mapping: Any, trained_positions: int | None = TRAINED) -> Any:
    return rotary_scaling(mapping, trained_positions=trained_positions)


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    factors = st.sampled_from([1, 1.0, 1.5, 4, 32.0])
    mapping: dict[str, Any] = {draw(st.sampled_from(["rope_type", "type"])): kind}
    if kind != "default":
        mapping["factor"] = draw(factors)
    if kind in ("llama3", "yarn") and draw(st.booleans()):
        mapping["original_max_position_embeddings"] = draw(st.sampled_from([128, 512, TRAINED]))
    if kind == "llama3":
        mapping |= {
            "low_freq_factor": draw(st.sampled_from([1, 0.5])),
            "high_freq_factor": draw(st.sampled_from([4, 2.5])),
        }
    if kind == "yarn":
        optional = {
            "attention_factor": st.sampled_from([None, 0.5, 1.25]),
            "beta_fast": st.sampled_from([None, 16, 48.0]),
            "beta_slow": st.sampled_from([None, 1, 2.5]),
            "mscale": st.sampled_from([None, 0, 0.707, 1.5]),
            "mscale_all_dim": st.sampled_from([None, 0, 1.0, 0.5]),
            "truncate": st.booleans(),
        }
        chosen = draw(st.sets(st.sampled_from(sorted(optional))))
        mapping |= {key: draw(optional[key]) for key in sorted(chosen)}
    return mapping


@settings(max_examples=80, deadline=None)
@given(
    mapping=mappings(),
    theta=st.sampled_from([None, 10000.0, 500000]),
    theta_inside=st.booleans(),
    spelling=st.sampled_from(["rope_scaling", "rope_parameters"]),
    head_dim=st.sampled_from([8, 32, 64]),
)
def test_as_in_transformers(
    mapping: dict[str, Any], theta: float | None, theta_inside: bool, spelling: str, head_dim: int
) -> None:
    """Compares frequencies and attention factor of a ``config.json`` in both spellings, with theta inside or
    outside.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 2 * head_dim,
        "intermediate_size": 16,
        "max_position_embeddings": TRAINED,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32,
    }
    config[spelling] = dict(mapping)
    if theta is not None:
        (config[spelling] if theta_inside else config)["rope_theta"] = theta

    reference = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
    rotary = next(resolve(find_recipe(config), config).attentions()).rotary
    assert rotary is not None
    torch.testing.assert_close(inverse_frequencies(rotary), reference.inv_freq, rtol=1e-6, atol=0)
    found = rotary.scaling.attention_factor if rotary.scaling else 1.0
    assert found == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "mapping",
    [
        *(None, {}, {"rope_type": "default"}, {"type": "default"}, {"rope_theta": 1e6}, {"rope_type": None}),
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ],
)
def test_mappings_that_describe_no_scaling(mapping: Any) -> None:
    assert read(mapping) is None
    assert read(mapping, None) is None


def test_the_choice_of_the_trained_length() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    yarn = {"rope_type": "yarn", "factor": 8}
    stated = {"original_max_position_embeddings": 100}
    assert read(llama3).original_max_positions == read(yarn).original_max_positions == TRAINED
    assert read(llama3 | stated).original_max_positions == read(yarn | stated, None).original_max_positions == 100
    assert read({"rope_type": "dynamic", "factor": 2}).original_max_positions == TRAINED
    for mapping in (llama3, yarn, {"rope_type": "dynamic", "factor": 2}):
        with pytest.raises(RopeConfigError, match=r"states (none|no length)$"):
            read(mapping, None)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    scaling = read({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512})
    assert scaling.factor == 4.0


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("linear", "must be a mapping or null"),
        ([], "must be a mapping or null"),
        (False, "must be a mapping or null"),
        (0, "must be a mapping or null"),
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            "'longrope' is not supported; the supported kinds are default, linear",
        ),
        ({"type": "su", "factor": 2}, "'su' is not supported"),
        ({"rope_type": "mrope"}, "not supported"),
        ({"rope_type": ["linear"]}, "not supported"),
        ({"rope_type": 7}, "not supported"),
        ({"rope_type": "Linear", "factor": 2}, "not supported"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "both rope_type 'linear' and type 'yarn'"),
        ({"factor": 2.0}, "of kind 'default' has no key 'factor'"),
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({"rope_type": "linear", "factor": None}, "lacks 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a number"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor must be a number"),
        ({"rope_type": "linear", "factor": 10**400}, "factor must be a number"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_type": "linear", "factor": -2}, "at least 1"),
        ({"rope_type": "linear", "factr": 2}, "no key 'factr'; did you mean 'factor'"),
        ({"rope_type": "linear", "factor": 2, "low_freq_factor": 1}, "no key 'low_freq_factor'"),
        (
            {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5, but the recipe rotates 1 of each",
        ),
        ({"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 512}, "starts at"),
        ({"rope_type": "dynamic", "factor": 2, "alpha": 1000}, "no key 'alpha'"),
        (LLAMA3 | {"high_freq_factor": 1}, "below high_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 0}, "must be above 0"),
        (LLAMA3 | {"low_freq_factor": None}, "lacks 'low_freq_factor'"),
        (LLAMA3 | {"original_max_position_embeddings": 8192.0}, "must be a positive integer"),
        (LLAMA3 | {"original_max_position_embeddings": "8192"}, "must be a positive integer"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "must be a positive integer"),
        (LLAMA3 | {"original_max_position_embeddings": True}, "must be a positive integer"),
        ({"rope_type": "yarn", "factor": 2, "finetuned": True}, "no key 'finetuned'"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}, "at most beta_fast"),
        ({"rope_type": "yarn", "factor": 2, "beta_slow": -1}, "above 0"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": 0}, "attention_factor must be above 0"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": "1"}, "attention_factor must be a number"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "truncate must be true or false"),
        ({"rope_type": "yarn", "factor": 2, "truncate": None}, "truncate must be true or false"),
        ({"rope_type": "yarn", "factor": 2, "mscale": [1]}, "mscale must be a number"),
        ({"rope_type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -1}, "must not be negative"),
    ],
)
def test_what_is_refused(mapping: Any, message: str) -> None:
    with pytest.raises(RopeConfigError, match=message):
        read(mapping)


@settings(max_examples=300, deadline=None)
@given(
    mapping=st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "mscale", "x"])
        | st.sampled_from(["low_freq_factor", "high_freq_factor", "attention_factor", "truncate", "mscale_all_dim"]),
        st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"])
        | st.none()
        | st.booleans()
        | st.integers(-2, 5000)
        | st.floats()
        | st.text(max_size=2)
        | st.lists(st.integers(), max_size=1),
    )
)
def test_any_mapping_gives_finite_frequencies_or_one_kind_of_error(mapping: dict[str, Any]) -> None:
    try:
        scaling = read(mapping)
    except RopeConfigError:
        return
    rotary = RotarySpec(10000.0, 16, scaling, node=None)  # type: ignore[arg-type]
    assert inverse_frequencies(rotary).isfinite().all()
