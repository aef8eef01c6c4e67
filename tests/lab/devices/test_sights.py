"""Models read back as far as their recipes say, and the cost of their steps follows from that."""

from __future__ import annotations

import pytest

from fastgen.lab.devices.sights import sights_of
from fastgen.models.spec import AttentionSpec
from fastgen.runtime.step_cost.sight import Sight
from tests.fast import cases
from tests.lab.devices.specs import PUBLISHED, published_spec


def test_models_without_windows_read_everything() -> None:
    assert sights_of(published_spec("Llama-2-70b")) == ()
    assert sights_of(published_spec("Mistral-7B-v0.2")) == ()


def test_every_layer_of_mistral_reads_its_window() -> None:
    assert sights_of(published_spec("Mistral-7B-v0.1")) == (Sight(4096, 1.0, 1.0),)


def test_layers_alternate_where_the_recipe_says_so() -> None:
    windows, full = sights_of(published_spec("gemma-2-9b"))
    assert (windows, full) == (Sight(4096, 0.5, 0.5), Sight(None, 0.5, 0.5))


@pytest.mark.parametrize("name", cases(sorted(PUBLISHED), fast=sorted(PUBLISHED)[::3]))
def test_shares_add_up(name: str) -> None:
    spec = published_spec(name)
    found = sights_of(spec)
    has_windows = any(isinstance(each, AttentionSpec) and each.sliding_window for each in spec.attentions())
    assert bool(found) == has_windows
    if found:
        assert sum(each.context_share for each in found) == pytest.approx(1)
        assert sum(each.pair_share for each in found) == pytest.approx(1)
