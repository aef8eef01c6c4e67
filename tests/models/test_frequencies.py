"""Rotary frequencies equal those of transformers bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastgen.layers.rotary import Rotary
from fastgen.models.frequencies import inverse_frequencies
from fastgen.models.spec import NodeRef, RotaryScaling, RotarySpec

NODE = NodeRef("rotary", "test.yaml", 1)


def rotary_spec(theta: float, dim: int, scaling: RotaryScaling | None = None) -> RotarySpec:
    return RotarySpec(theta, dim, scaling, NODE)


def llama_config(spec: RotarySpec) -> LlamaConfig:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.theta}
    scaling = spec.scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling is not None and scaling.kind == "yarn":
        parameters |= {
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    return LlamaConfig(
        hidden_size=2 * spec.dim, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=parameters
    )


@st.composite
def specs(draw: st.DrawFn) -> RotarySpec:
    kind = draw(st.sampled_from([None, "linear", "dynamic", "llama3", "yarn"]))
    theta, dim = draw(st.sampled_from([10.0, 100.0, 1e4, 5e5, 1e6, 1e7])), 2 * draw(st.integers(2, 128))
    if kind is None:
        return rotary_spec(theta, dim)
    return rotary_spec(
        theta,
        dim,
        RotaryScaling(
            kind,
            factor=draw(st.floats(1.0, 64.0)),
            original_max_positions=draw(st.sampled_from([64, 512, 2048, 4096, 8192, 32768, 100_000])),
            attention_factor=draw(st.sampled_from([1.0, 0.7, 1.3])) if kind == "yarn" else 1.0,
            low_freq_factor=draw(st.sampled_from([0.5, 1.0, 2.0])),
            high_freq_factor=draw(st.sampled_from([2.5, 4.0, 32.0])),
            beta_fast=draw(st.sampled_from([4.0, 16.0, 32.0, 48.0])),
            beta_slow=draw(st.sampled_from([0.25, 1.0, 2.5, 4.0])),
            truncate=draw(st.booleans()),
        ),
    )


RAMP_OF_NO_WIDTH = RotaryScaling("yarn", 8.0, 64, beta_fast=32.0, beta_slow=11.0)  # both of its ends at pair 0


@example(rotary_spec(10000.0, 64, RAMP_OF_NO_WIDTH))
@settings(max_examples=300, deadline=None)
@given(specs())
def test_frequencies_are_the_trained_ones(spec: RotarySpec) -> None:
    kind = spec.scaling.kind if spec.scaling else None
    config = llama_config(spec)
    if kind is None:
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:  # a dynamic one at the trained length, the longest that is served
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    found = inverse_frequencies(spec)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert factor == (spec.scaling.attention_factor if spec.scaling else 1.0)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RotaryScaling("linear", 4.0, 4096),
        RotaryScaling("llama3", 8.0, 8192),
        RotaryScaling("yarn", 16.0, 4096, attention_factor=1.2772588722239782),
    ],
    ids=["plain", "linear", "llama3", "yarn"],
)
def test_cosines_and_sines_at_every_position_of_a_long_context(scaling: RotaryScaling | None) -> None:
    """They are exact also at position 131,071: angles are rounded as in training, and positions are not."""
    spec = rotary_spec(500000.0, 32, scaling)
    max_positions = 131072
    rotary = Rotary(
        inverse_frequencies(spec),
        attention_factor=scaling.attention_factor if scaling else 1.0,
        max_positions=max_positions,
        device=torch.device("cpu"),
    )
    reference = LlamaRotaryEmbedding(llama_config(spec))
    cos, sin = reference(torch.zeros(1), torch.arange(max_positions).unsqueeze(0))
    assert torch.equal(rotary.cos_sin, torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=-1))
