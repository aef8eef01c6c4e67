"""A test draws the same numbers in every run, whatever ran before it in its process."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import begin_draws
from tests.draws import drawn


def draws() -> tuple[float, list[float]]:
    return random.random(), torch.randn(3).tolist()


@pytest.fixture(scope="module")
def of_a_fixture() -> tuple[float, list[float]]:
    return draws()


def test_what_is_drawn_without_a_generator_follows_from_the_name(request: pytest.FixtureRequest) -> None:
    found = draws()
    begin_draws("another test, in between")
    assert draws() != found
    begin_draws(request.node.nodeid)
    assert draws() == found


def test_so_it_does_in_a_fixture(of_a_fixture: tuple[float, list[float]]) -> None:
    begin_draws(f"{Path(__file__).relative_to(Path(__file__).parents[2]).as_posix()} of_a_fixture")
    assert draws() == of_a_fixture


@pytest.mark.parametrize(("profile", "cases"), [("repeatable", 20), ("fresh", 60)])
def test_all_cases_of_a_property_are_drawn_where_they_are_drawn_afresh(profile: str, cases: int) -> None:
    current = settings.get_current_profile_name()
    try:
        settings.load_profile(profile)
        assert drawn(60, in_short=20).max_examples == cases
    finally:
        settings.load_profile(current)


def examples() -> list[tuple[int, str]]:
    """All that Hypothesis draws for one test."""
    found = []

    @settings(settings.get_profile("repeatable"), max_examples=300)
    @given(number=st.integers(), text=st.text())
    def note(number: int, text: str) -> None:
        found.append((number, text))

    note()
    return found


def imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def test_what_hypothesis_draws_does_not_depend_on_the_modules_that_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = examples()
    file = tmp_path / "full_of_constants.py"
    file.write_text("".join(f"a{n} = {7919**5 + n}\nb{n} = 'word {n}'\n" for n in range(50)))
    assert imported(file, monkeypatch).b3 == "word 3"
    assert examples() == before
