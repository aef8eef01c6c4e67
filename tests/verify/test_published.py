"""The additions that verify assumes are in published files, and transformers does not write them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from fastgen.models.resolve.config_keys import HARMLESS, INERT
from fastgen.verify.keys import read_spellings
from fastgen.verify.published import published
from tests.models import test_recipe_published_families as families

FILES: list[dict[str, Any]] = [
    value for value in vars(families).values() if isinstance(value, dict) and "architectures" in value
]

# Keys that classes read although they do not write them.
READ = {"rope_scaling", "rotary_emb_base", "rotary_pct", "head_dim"}


@pytest.mark.parametrize("config", FILES, ids=lambda config: config["architectures"][0])
def test_a_key_that_a_class_does_not_know_is_listed(config: dict[str, Any]) -> None:
    (architecture,) = config["architectures"]
    cls = getattr(transformers, architecture, None)
    if cls is None:
        pytest.skip("transformers does not know it")
    known = cls.config_class().to_dict().keys()
    unknown = {key for key in config.keys() - known - INERT if key == "auto_map" or key not in HARMLESS}
    unknown -= read_spellings(cls.config_class, unknown).keys() | READ
    assert unknown <= published(architecture).config.keys()


def test_no_class_writes_the_listed_additions() -> None:
    for architecture in {config["architectures"][0] for config in FILES}:
        cls = getattr(transformers, architecture, None)
        if cls is not None:
            listed = published(architecture).config.keys() - {"apply_residual_connection_post_layernorm"}
            assert not listed & cls.config_class().to_dict().keys(), architecture


def test_of_an_unknown_class_nothing_is_assumed() -> None:
    assert published("SomeModelForCausalLM") == published("OtherModelForCausalLM")
    assert not published("SomeModelForCausalLM").config
