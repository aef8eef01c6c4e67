"""Sources are what they were when someone last looked at them: see :mod:`tests.compile.golden`."""

from __future__ import annotations

import json

import pytest

from fastgen.models.registry.registry import list_recipes
from tests.compile.golden import COMMAND, TARGETS, difference, kept, sources


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_rendered_to_what_is_kept(target: str) -> None:
    found = difference(kept(target), sources(target))
    assert not found, f"{found}\n\nif this is what you want, `{COMMAND}` keeps it"


@pytest.mark.parametrize("target", TARGETS)
def test_every_shipped_recipe_is_there_and_every_file_is_some_recipes(target: str) -> None:
    files = kept(target)
    index = json.loads(files.pop("recipes.json"))
    assert index.keys() == {listed.recipe.name for listed in list_recipes() if listed.origin == "built-in"}
    assert {file for needed in index.values() for file in needed} == files.keys()


def test_a_difference_is_shown_line_by_line() -> None:
    before, after = {"same": "x", "gone": "a\n", "changed": "1\n2\n"}, {"same": "x", "changed": "1\n3\n", "new": "b\n"}
    lines = difference(before, after).splitlines()
    assert [line for line in lines if line.startswith(("---", "+++"))] == [
        *("--- changed", "+++ changed", "--- gone", "+++ (none)", "--- (none)", "+++ new"),
    ]
    assert {"-2", "+3", "-a", "+b"} <= set(lines)
    assert difference(before, dict(before)) == ""
    assert difference({}, {"long": "line\n" * 1000}).splitlines()[-1].startswith("… and ")
