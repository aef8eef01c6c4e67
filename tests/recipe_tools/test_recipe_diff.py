"""Differences of recipes are complete, symmetric and minimal; and differences of the models they make."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fastgen.errors import RecipeError
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.recipe.tree import NodePath, Tree
from fastgen.models.recipe.yaml_reader import parse_recipe_yaml
from fastgen.recipe_tools.diff.diff import Difference, recipe_differences, tree_differences
from fastgen.recipe_tools.diff.lines import lines_of
from fastgen.recipe_tools.diff.specs import spec_differences
from fastgen.verify.edits import nodes, replaced, replaced_tree
from tests.fast import cases
from tests.recipe_tools.published import CONFIGS

FILES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
RECIPES = {file.stem: load_recipe(file) for file in FILES}
BRANCHES = ("model", "layers", "residual")


def meaning(tree: Tree) -> str:
    """Returns the content of a tree, with the types of its scalars, and the order of keys if it matters."""
    ordered = [
        (path, list(node.value))
        for path, node in nodes(tree)
        if isinstance(node.value, Mapping) and (path == BRANCHES or path[-1:] == ("split",))
    ]
    return json.dumps([tree.plain(), sorted(ordered)], sort_keys=True)


def applied(tree: Tree, differences: Iterable[Difference]) -> Tree:
    """Returns ``tree`` with a list of differences applied."""
    for each in sorted(differences, key=lambda each: each.kind == "reordered"):
        if each.kind != "reordered":
            tree = replaced_tree(tree, {each.path: each.b})
            continue
        assert each.b is not None
        found = tree.find(each.path)
        reordered = dataclasses.replace(found, value=MappingProxyType({key: found.value[key] for key in each.b.value}))
        tree = replaced_tree(tree, {each.path: reordered})
    return tree


def told(differences: Iterable[Difference], *, swapped: bool = False) -> set[str]:
    other = {"only in a": "only in b", "only in b": "only in a"}
    rows = [
        (each.path, other.get(each.kind, each.kind), each.b and meaning(each.b), each.a and meaning(each.a))
        if swapped
        else (each.path, each.kind, each.a and meaning(each.a), each.b and meaning(each.b))
        for each in differences
    ]
    assert len(rows) == len(set(map(repr, rows)))
    return set(map(repr, rows))


def test_a_recipe_does_not_differ_from_itself() -> None:
    for recipe in RECIPES.values():
        assert recipe_differences(recipe, recipe) == []


@pytest.mark.parametrize("name", RECIPES)
def test_differences_are_complete_and_symmetric(name: str) -> None:
    a = RECIPES[name]
    for b in RECIPES.values():
        found = recipe_differences(a, b)
        assert meaning(applied(a.tree, found)) == meaning(b.tree), b.name
        assert told(found) == told(recipe_differences(b, a), swapped=True), b.name
        assert (found == []) == (a is b)
        paths = [each.path for each in found if each.kind != "reordered"]
        for one, other in itertools.permutations(paths, 2):
            assert one != other[: len(one)], f"{b.name}: {one} says what {other} says"


@pytest.mark.parametrize("name", RECIPES)
def test_one_changed_node_is_the_only_difference(name: str) -> None:
    tree = RECIPES[name].tree
    for path, node in list(nodes(tree))[1:]:
        in_list = next(
            (path[:size] for size in range(len(path)) if isinstance(tree.find(path[:size]).value, tuple)), None
        )
        if not isinstance(node.value, Mapping | tuple):
            changed = replaced_tree(tree, {path: Tree("another thing", "elsewhere.yaml", 7)})
            (found,) = tree_differences(tree, changed)
            assert (found.path, found.kind) == (in_list or path, "changed")
            assert found.a is not None
            assert found.a.line == tree.find(in_list or path).line
            if in_list is None:
                assert (found.b.value, found.b.file, found.b.line) == ("another thing", "elsewhere.yaml", 7)
        if in_list is None:
            gone = replaced_tree(tree, {path: None})
            missing = [each for each in tree_differences(tree, gone) if each.kind != "reordered"]
            assert [(each.path, each.kind, each.a) for each in missing] == [(path, "only in a", node)]


def _random_tree(draw: random.Random, depth: int = 0) -> Tree:
    kind = draw.random()
    if depth == 0 or (kind < 0.5 and depth < 4):
        keys = draw.sample(["split", "a", "b", "c", "d"], draw.randrange(0 if depth else 1, 5))
        return Tree(MappingProxyType({key: _random_tree(draw, depth + 1) for key in keys}), "f", draw.randrange(99))
    if kind < 0.7 and depth < 5:
        return Tree(tuple(_random_tree(draw, 5) for _ in range(draw.randrange(3))), "f", draw.randrange(99))
    return Tree(draw.choice([True, 1, 1.0, None, False, 0, "", "x", "1", "none"]), "f", draw.randrange(99))


@pytest.mark.parametrize("seed", cases(range(60), fast=range(30)))
def test_differences_of_any_trees_lead_from_one_to_the_other(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        a, b = (parse(_random_tree(draw)) for _ in range(2))
        found = list(tree_differences(a, b))
        assert meaning(applied(a, found)) == meaning(b), f"seed {seed}"
        assert told(found) == told(tree_differences(b, a), swapped=True), f"seed {seed}"


def parse(tree: Tree) -> Tree:
    return parse_recipe_yaml(json.dumps(tree.plain()), "f")


@pytest.mark.parametrize(
    ("a", "b"), [("true", "1"), ("1", "1.0"), ("1", "'1'"), ("~", "none"), ("[1]", "1"), ("{}", "[]")]
)
def test_what_only_looks_alike_differs(a: str, b: str) -> None:
    (found,) = tree_differences(*(parse_recipe_yaml(f"x: {text}", "f") for text in (a, b)))
    assert (found.path, found.kind) == (("x",), "changed")


def test_the_order_of_branches_is_a_difference_and_that_of_numbers_none() -> None:
    llama = RECIPES["llama"].tree
    residual, config = llama.find(BRANCHES), llama.find(("config",))
    (found,) = tree_differences(llama, replaced_tree(llama, {BRANCHES: backwards(residual)}))
    assert (found.path, found.kind) == (BRANCHES, "reordered")
    assert found.as_json()["a"]["value"] == ["attend", "transform"]
    assert list(tree_differences(llama, replaced_tree(llama, {("config",): backwards(config)}))) == []
    split: NodePath = (*BRANCHES, "attend", "attention", "qkv", "split")
    phi3 = RECIPES["phi3"].tree
    (found,) = tree_differences(phi3, replaced_tree(phi3, {split: backwards(phi3.find(split))}))
    assert (found.path, found.kind) == (split, "reordered")


def backwards(tree: Tree) -> Tree:
    assert isinstance(tree.value, Mapping)
    return dataclasses.replace(tree, value=MappingProxyType(dict(reversed(tree.value.items()))))


# ------------------------------------------------------------------------------------------------------------- lines


def test_lines_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = (FILES[0].parent / "llama.yaml").read_text()
    (tmp_path / "llama.yaml").write_text(base)
    (tmp_path / "odd.yaml").write_text(
        'name: odd\nextends: llama\narchitectures: [Odd, LlamaForCausalLM]\nignores: {tensors: ["\\x1b[31m"]}\n'
        "model:\n  embedding: {scale: 2}\n  layers:\n    residual:\n      attend: {norm: null}\n"
        "      transform: {scale: 0.5, mlp: {activation: \"'silu'\"}}\n"
        "      more: {norm: {kind: rms, weight: x, eps: 0}, mlp: {kind: plain, size: 1, activation: y, up: u, down: d,"
        " bias: true}}\n"
    )
    a, b = load_recipe(tmp_path / "llama.yaml"), load_recipe(tmp_path / "odd.yaml", find=lambda name, _: None)
    text = "\n".join(line.text for line in lines_of(a, b, recipe_differences(a, b)))
    assert text == (
        """\
--- llama  llama.yaml
+++ odd    odd.yaml

name
  - llama.yaml:2  llama
  + odd.yaml:1    odd

architectures
  - llama.yaml:3  LLaMAForCausalLM
  + odd.yaml:3    Odd

ignores.tensors
  - llama.yaml:17  "*.rotary_emb.inv_freq"
  + odd.yaml:4     "\\u001b[31m"

model.embedding.scale: only in odd
  + odd.yaml:6  2

model.layers.residual.attend.norm: only in llama
  - llama.yaml:24  kind: rms
  - llama.yaml:24  weight: input_layernorm
  - llama.yaml:24  eps: eps

model.layers.residual.transform.mlp.activation
  - llama.yaml:37  hidden_act | default('silu')
  + odd.yaml:10    "'silu'"

model.layers.residual.transform.scale: only in odd
  + odd.yaml:10  0.5

model.layers.residual.more: only in odd
  + odd.yaml:11  norm:
  + odd.yaml:11    kind: rms
  + odd.yaml:11    weight: x
  + odd.yaml:11    eps: 0
  + odd.yaml:11  mlp:
  + odd.yaml:11    kind: plain
  + odd.yaml:11    size: 1
  + odd.yaml:11    activation: y
  + odd.yaml:11    up: u
  + odd.yaml:11    down: d
  + odd.yaml:11    bias: true"""
    )


def test_every_difference_has_its_locations() -> None:
    for a, b in itertools.permutations(
        [RECIPES[name] for name in ("llama", "falcon", "deepseek_v2", "gpt2", "opt")], 2
    ):
        found = recipe_differences(a, b)
        titles = [line.text.split(":")[0] for line in lines_of(a, b, found) if line.style == "title"]
        assert titles == [".".join(each.path) for each in found]
        lines = [line.text for line in lines_of(a, b, found)]
        for each in found:
            for side, tree in (("-", each.a), ("+", each.b)):
                if tree is not None and not isinstance(tree.value, Mapping | tuple):
                    assert any(line.startswith(f"  {side} {Path(tree.file).name}:{tree.line} ") for line in lines)


def test_files_with_the_same_name_have_distinct_labels(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        text = (FILES[0].parent / "gpt2.yaml").read_text()
        (tmp_path / folder / "r.yaml").write_text(text.replace("wte", "wxe") if folder == "two" else text)
    a, b = (load_recipe(tmp_path / folder / "r.yaml") for folder in ("one", "two"))
    text = "\n".join(line.text for line in lines_of(a, b, recipe_differences(a, b)))
    assert f"- {tmp_path}/one/r.yaml:" in text
    assert f"+ {tmp_path}/two/r.yaml:" in text
    assert "transformer.wxe: only in the second" in text


# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_does_not_differ_from_itself(name: str) -> None:
    recipe_name, config = CONFIGS[name]
    assert spec_differences(RECIPES[recipe_name], RECIPES[recipe_name], config) == []


def test_the_effect_of_a_difference() -> None:
    _, config = CONFIGS["mistral"]
    found = spec_differences(RECIPES["llama"], RECIPES["mistral"], config)
    assert [(each.place, each.a, each.b) for each in found] == [
        (
            "keys of the configuration it does not account for",
            (
                "sliding_window is 4096: a token sees only the tokens in a window before it; only null is known to "
                "change nothing",
            ),
            (),
        ),
        ("layers 0–31: attend.attention.sliding_window", (), ("4,096",)),
    ]
    back = spec_differences(RECIPES["mistral"], RECIPES["llama"], config)
    assert [(each.place, each.b, each.a) for each in back] == [(each.place, each.a, each.b) for each in found]


EDITS: list[tuple[NodePath, Any, str, tuple[str, ...], tuple[str, ...]]] = [
    ((*BRANCHES, "attend", "scale"), 0.5, "layers 0–31: attend.scale", ("1",), ("0.5",)),
    ((*BRANCHES, "transform", "norm", "eps"), "1e-3 * layer", "", (), ()),
    ((*BRANCHES, "attend", "when"), "layer != 3", "layer 3: attend", (), ()),
    (("model", "head", "softcap"), 30, "head.softcap", (), ("30",)),
    (
        (*BRANCHES, "attend", "attention", "qkv", "q"),
        "self_attn.other",
        "layers 0–31: attend.attention.q.weight",
        ("model.layers.{layer}.self_attn.q_proj.weight [4096, 4096]",),
        ("model.layers.{layer}.self_attn.other.weight [4096, 4096]",),
    ),
    (
        (*BRANCHES, "transform", "moe", "experts", "gate"),
        "w9",
        "layers 0–31: transform.moe.experts.each.gate.weight",
        ("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight [14336, 4096]",),
        ("model.layers.{layer}.block_sparse_moe.experts.{expert}.w9.weight [14336, 4096]",),
    ),
]


@pytest.mark.parametrize(("path", "value", "place", "a", "b"), EDITS)
def test_an_edit_is_found_in_the_model(
    path: NodePath, value: Any, place: str, a: tuple[str, ...], b: tuple[str, ...]
) -> None:
    _, config = CONFIGS["mixtral"]
    edited = replaced(RECIPES["mixtral"], {path: value})
    assert edited is not None
    found = {each.place: each for each in spec_differences(RECIPES["mixtral"], edited, config)}
    if path[-1] == "when":  # the list of branches of the layer, the branch, and the parameter count
        assert {*found} == {"num_parameters", "kv_bytes_per_token", "layer 3: branches", place}
        assert found[place].b == ()
        assert len(found[place].a) > 5
    elif not place:  # a number of its own in each layer
        assert [*found] == [f"layer {layer}: transform.norm.eps" for layer in range(32)]
    else:
        assert [*found] == [place]
        assert (found[place].a, found[place].b) == (a, b)


def test_layers_that_only_one_has() -> None:
    _, config = CONFIGS["mistral"]
    edited = replaced(RECIPES["mistral"], {("config", "num_layers"): "num_hidden_layers - 2"})
    assert edited is not None
    found = {each.place: each for each in spec_differences(RECIPES["mistral"], edited, config)}
    assert {*found} == {"num_layers", "layers.count", "num_parameters", "kv_bytes_per_token", "layers 30–31"}
    assert found["layers 30–31"].b == ()
    assert found["num_layers"].as_json() == {"path": "num_layers", "layers": None, "a": ("32",), "b": ("30",)}


def test_a_recipe_that_makes_no_model_of_the_configuration_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"deepseek_v3\.yaml:\d+: config.head_dim: "):
        spec_differences(RECIPES["llama"], RECIPES["deepseek_v2"], CONFIGS["mistral"][1])


def test_recipe_is_left_as_it_was() -> None:
    recipe: Recipe = RECIPES["mixtral"]
    before = meaning(recipe.tree)
    recipe_differences(recipe, RECIPES["llama"])
    assert meaning(recipe.tree) == before
