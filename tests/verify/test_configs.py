"""Drawn configurations are those that files of the architecture could have."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from fastgen.verify.cases import draws_of
from fastgen.verify.configs import flattened


def drawn(name: str, mentioned: set[str]) -> list[dict[str, Any]]:
    draws = draws_of(getattr(transformers, f"{name}ForCausalLM"), mentioned, seed=0)
    return [draws.config(index, attempt) for index in range(20) for attempt in range(4)]


def test_a_private_key_that_the_class_does_not_have_is_not_invented() -> None:
    mentioned = {"_sliding_window_pattern", "sliding_window", "layer_types"}
    assert not any("_sliding_window_pattern" in config for config in drawn("Cohere2", mentioned))


def test_a_private_flag_that_the_class_has_is_drawn() -> None:
    values = {config.get("_remove_final_layer_norm") for config in drawn("OPT", {"_remove_final_layer_norm"})}
    assert {False, True} <= values


@pytest.mark.parametrize(("name", "fraction"), [("StableLm", 0.25), ("GPTNeoX", 0.25), ("Phi", 0.5), ("Glm4", 0.5)])
def test_a_head_is_large_enough_to_rotate_a_pair(name: str, fraction: float) -> None:
    for config in drawn(name, {"rope_parameters", "rope_scaling", "rope_theta"}):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        stated = [value for path, value in flattened(config) if path[-1] in ("partial_rotary_factor", "rotary_pct")]
        assert int(head_dim * next(iter(stated), fraction)) >= 2, config
