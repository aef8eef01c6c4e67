"""Scalars as YAML: a recipe reads each as what it was, quoted or not."""

from __future__ import annotations

import pytest

from fastgen.models.recipe.tree import Scalar
from fastgen.models.recipe.yaml_reader import parse_recipe_yaml
from fastgen.recipe_tools.explain.plain_text import yaml_scalar

SCALARS: list[Scalar] = [
    *(None, True, False, 0, -3, 0.5, 1e-05),
    *("", "a", "a b", " a", "a: b", "a #b", "a, b", "[a]", "{i}", "- a", "# a", "*a", "&a b", "!a", "%a", "@a", "a:"),
    *("null", "true", "1", "1.5", "yes", "y", "1:30", "2020-01-01", "1_000", "0x10", "~", "---", "'a'", '"a"'),
    *("a\nb", "a\n b", "a\tb", "Größe", "model.layers.{i}.mlp", "x" * 300),
]


@pytest.mark.parametrize("value", SCALARS)
def test_a_recipe_reads_a_scalar_as_what_it_was(value: Scalar) -> None:
    assert repr(parse_recipe_yaml(f"x: {yaml_scalar(value)}", "").plain()) == repr({"x": value})
    listed = f"x: [{yaml_scalar(value, flow=True)}, {yaml_scalar(value, flow=True)}]"
    assert repr(parse_recipe_yaml(listed, "").plain()) == repr({"x": (value, value)})


def test_a_text_is_quoted_only_if_it_must_be() -> None:
    assert [yaml_scalar(each) for each in ("a b", "yes", "1:30", "a, b")] == ["a b", "yes", "1:30", "a, b"]
    assert [yaml_scalar(each, flow=True) for each in ("a b", "a, b")] == ["a b", '"a, b"']
    assert [yaml_scalar(each) for each in ("null", "1", "a: b", "")] == ['"null"', '"1"', '"a: b"', '""']
