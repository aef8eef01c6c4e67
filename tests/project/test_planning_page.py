"""docs/planning.md shows what ``fastgen plan`` prints."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.project.course import PAGE, followed

PLANNING = PAGE.parent / "planning.md"


@pytest.mark.slow
def test_all_plans_of_the_page_are_as_shown(tmp_path: Path) -> None:
    text = PLANNING.read_text("utf-8")
    lines = text.splitlines(), followed(text, tmp_path).splitlines()
    difference = "\n".join(difflib.unified_diff(*lines, "shown in the page", "what happens", lineterm=""))
    assert not difference, difference


def test_the_page_lists_the_published_models() -> None:
    from fastgen.lab.models import published_names

    listed = " ".join(PLANNING.read_text("utf-8").split("## ")[0].split())
    families: dict[str, list[str]] = {}
    for name in published_names():
        family = next(
            each for each in ("llama-2", "llama-3.1", "mistral-7b", "falcon", "qwen3", name) if name.startswith(each)
        )
        families.setdefault(family, []).append(name)
    for family, names in families.items():
        assert any(f"`{name}`" in listed for name in names), family
        assert all(f"`{name}`" in listed or f"`{name.removeprefix(family)}`" in listed for name in names), family
