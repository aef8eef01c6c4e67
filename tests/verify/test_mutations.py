"""The mutation hunt: its page matches the current recipes and mistakes, few are missed, and a sample is
judged again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgen.models.recipe.tree import NodePath
from fastgen.models.registry.registry import named_recipe
from fastgen.verify.edits import replaced
from tests.draws import number
from tests.verify import mutation_report
from tests.verify.hunt import NUM_CONFIGS, Hunt, judge, mutants_of, names_it, report, shipped
from tests.verify.mutation_report import Row

MIN_REJECTED, MIN_RIGHT = 0.95, 0.90
SEED = 3


def assert_rates(row: Row) -> None:
    assert row.num_rejected >= MIN_REJECTED * row.num_judged, row
    assert row.num_right >= MIN_RIGHT * row.num_rejected, row


@pytest.mark.slow
def test_the_page_is_of_all_recipes_and_holds_the_rates() -> None:
    rows = mutation_report.read()
    assert rows.keys() == shipped().keys()
    for name, recipe in shipped().items():
        found = mutants_of(recipe)
        now = len(found), mutation_report.digest(found)
        assert (rows[name].num_mutants, rows[name].digest) == now, f"{name}: run `python -m tests.verify.hunt` again"
    assert_rates(mutation_report.total(list(rows.values())))


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Hunt:
    return Hunt(named_recipe("phi"), tmp_path_factory.mktemp("hunt"), number(NUM_CONFIGS, in_short=8))


@pytest.mark.slow  # test_verify has mistakes of each kind
def test_a_sample_is_rejected_at_its_nodes(hunt: Hunt) -> None:
    drawn = random.Random(SEED).sample(mutants_of(named_recipe("phi")), number(12, in_short=8))
    verdicts = {mutant.what: hunt.verdict(mutant) for mutant in drawn}
    judged = [each["verdict"] for each in verdicts.values() if each["verdict"] not in ("equivalent", "apart")]
    assert judged.count("missed") <= 1, (SEED, verdicts)
    assert judged.count("right") >= 0.75 * len(drawn), (SEED, verdicts)


BOTH = "model.layers.residual.both"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(f"{BOTH}.norm.eps", 1e-5, marks=pytest.mark.slow),
        pytest.param(f"{BOTH}.attention.rotary.kind", "interleaved", marks=pytest.mark.slow),
        pytest.param(f"{BOTH}.attention.rotary.theta", 10000, marks=pytest.mark.slow),
        pytest.param("config.max_positions", "max_position_embeddings | default(2049)", marks=pytest.mark.slow),
    ],
)
def test_no_mistake_passes_for_none(hunt: Hunt, path: str, value: str | float) -> None:
    """The comparison of survivors would detect real mistakes if verify did not."""
    assert fate(hunt, {tuple(path.split(".")): value}) == "missed"


@pytest.mark.slow
def test_no_other_spelling_passes_for_a_mistake(hunt: Hunt) -> None:
    at = (*BOTH.split("."), "norm", "when")
    assert fate(hunt, {at: True}) == "equivalent"


@pytest.mark.slow
def test_a_recipe_that_refuses_what_the_reference_reads_is_missed(hunt: Hunt) -> None:
    assert fate(hunt, requiring("not (qk_layernorm | default(false))")) == "missed"


@pytest.mark.slow
def test_a_recipe_that_refuses_what_the_reference_refuses_is_set_apart(hunt: Hunt) -> None:
    normed = "qk_layernorm | default(false)"  # whose norms have a size that transformers derives from the hidden size
    assert fate(hunt, requiring(f"not ({normed}) or head_dim == hidden_size / num_heads")) == "apart"


@pytest.mark.slow
def test_a_recipe_that_no_longer_ignores_a_tensor_is_missed(hunt: Hunt) -> None:
    assert fate(hunt, {("ignores", "tensors"): None}) == "missed"


def requiring(text: str) -> dict[NodePath, Any]:
    architectures = named_recipe("phi").tree.find(("architectures",))
    return {("requires",): replace(architectures, value=(replace(architectures, value=text),))}


def fate(hunt: Hunt, changes: dict[NodePath, Any]) -> str:
    changed = replaced(named_recipe("phi"), changes)
    assert changed is not None
    return hunt.survivors.fate(changed)[0]


def test_the_nodes_that_count_as_right() -> None:
    touched = ("model.layers.residual.attend.attention.qkv.q",)
    right = ["", ".x", ".x.y"]
    assert all(names_it(touched[0] + below, touched) for below in right)
    assert names_it("model.layers.residual.attend.attention.qkv", touched)
    assert names_it("model.layers.residual.attend.attention", touched)
    assert not names_it("model.layers.residual.attend", touched)
    assert not names_it("model.layers.residual.attend.attention.qkv.k", touched)
    assert names_it("define.a", ("define.b", "define.a"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_hunt(name: str, tmp_path: Path) -> None:
    judge(name, tmp_path)
    (row,) = report([name], tmp_path, tmp_path / "page.md")
    assert row == mutation_report.read()[name]
