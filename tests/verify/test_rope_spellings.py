"""Rotary settings in the spellings of transformers 4 and 5 give the same model as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from fastgen.models.registry.registry import named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, RotarySpec
from fastgen.verify.cases import Cases
from fastgen.verify.compare import Comparer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 96,
    **{"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
THETA, FRACTION = 300.0, 0.75
INSIDE = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": FRACTION}
OTHER = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25}
SPELLINGS: dict[str, dict[str, Any]] = {
    "of today": {"rope_parameters": INSIDE},
    "of transformers 4": {"rope_scaling": INSIDE},
    "both, the older wins": {"rope_scaling": INSIDE, "rope_parameters": OTHER},
    "an empty old one": {"rope_scaling": None, "rope_parameters": INSIDE},
}
FLAT: dict[str, dict[str, Any]] = {
    "phi": {"rope_theta": THETA, "partial_rotary_factor": FRACTION},
    "phi3": {"rope_theta": THETA, "partial_rotary_factor": FRACTION},
    "gpt_neox": {"rotary_emb_base": THETA, "rotary_pct": FRACTION},
}


def rotary_of(name: str, config: dict[str, Any]) -> RotarySpec:
    (attention,) = resolve(named_recipe(name), config).attentions()
    assert isinstance(attention, AttentionSpec)
    assert attention.rotary is not None
    return attention.rotary


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("spelling", [*SPELLINGS, "flat"])
def test_every_spelling_is_read_as_transformers_reads_it(name: str, spelling: str, tmp_path: Path) -> None:
    recipe = named_recipe(name)
    config = {**SIZES, **(FLAT[name] if spelling == "flat" else SPELLINGS[spelling])}
    if name != "phi3":
        del config["rms_norm_eps"]
    rotary = rotary_of(name, config)
    assert (rotary.theta, rotary.dim) == (THETA, 12)
    cases = Cases(tmp_path, num_configs=1, seed=0)
    case = cases.case(getattr(transformers, recipe.architectures[0]), config, 1)
    assert not isinstance(case, Exception), case
    comparison = Comparer().compare(recipe, case)
    assert comparison.disagreement is None, comparison.disagreement
    assert {"theta", "frequencies", "attention 0 keys"} <= comparison.agreed.keys()
