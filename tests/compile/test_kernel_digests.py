"""Rendered kernels are what they were when someone last looked at them: see :mod:`tests.compile.kernel_sources`."""

from __future__ import annotations

import difflib

import pytest

from fastgen.models.registry.registry import list_recipes
from tests.compile.kernel_sources import ARCHES, COMMAND, PLACE, READABLE, digests, index, readable

ADVICE = f"`python -m tools.kernel_diff HEAD` shows what changed; if it is what you want, `{COMMAND}` records it"


def recorded(target: str, arch: str) -> set[str]:
    """Returns name and digest of each kernel that is recorded for an architecture."""
    lines = [line.split(" | ") for line in index(target).read_text(encoding="utf-8").splitlines()[1:]]
    return {kernel for kernel, arches, *_ in lines if arch in arches.split() or arches == "all"}


# The others differ from them in their tilings and sets of instructions alone.
ONCE = [("triton", "sm_90"), ("triton", "gfx942"), ("cpp", "avx512bf16"), ("cpp", "portable")]


@pytest.mark.parametrize(("target", "arch"), ONCE)
def test_kernels_of_an_architecture_have_the_recorded_digests(target: str, arch: str) -> None:
    rendered = {line.split(" | ")[0] for line in digests(target, [arch]).splitlines()[1:]}
    changed = sorted(rendered ^ recorded(target, arch))
    assert not changed, "\n".join([*changed[:40], f"{len(changed)} lines differ. {ADVICE}"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ARCHES)
def test_kernels_have_the_recorded_digests(target: str) -> None:
    recorded, rendered = index(target).read_text(encoding="utf-8").splitlines(), digests(target).splitlines()
    changed = [line for line in difflib.ndiff(recorded, rendered) if line[0] in "+-"]
    assert not changed, "\n".join([*changed[:40], f"{len(changed)} lines differ. {ADVICE}"])


@pytest.mark.parametrize("target", ARCHES)
def test_the_digests_cover_every_shipped_recipe_architecture_and_kernel_name(target: str) -> None:
    lines = [line.split(" | ") for line in index(target).read_text(encoding="utf-8").splitlines()[1:]]
    arches, formats, recipes = ({each for line in lines for each in line[i].split()} for i in (1, 2, 3))
    assert arches - {"all"} <= set(ARCHES[target])
    assert "all" in arches or arches == set(ARCHES[target])
    assert recipes - {"all"} == {listed.recipe.name for listed in list_recipes() if listed.origin == "built-in"}
    assert {"all", "bf16", "int8_weight_only"} <= formats


@pytest.mark.parametrize("name", READABLE)
def test_the_sources_stored_for_reading_are_up_to_date(name: str) -> None:
    stored, rendered = (PLACE / "sources" / name).read_text(encoding="utf-8"), readable(READABLE[name])
    lines = list(difflib.unified_diff(stored.splitlines(), rendered.splitlines(), "stored", "rendered", lineterm=""))
    assert not lines, "\n".join([*lines[:80], ADVICE])


def test_no_other_sources_are_stored_and_all_together_stay_few() -> None:
    files = [*(PLACE / "sources").iterdir()]
    assert {file.name for file in files} == READABLE.keys()
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in [*files, *map(index, ARCHES)]) <= 4300
