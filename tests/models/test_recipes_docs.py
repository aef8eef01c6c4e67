"""The examples of docs/recipe-language.md load and resolve; its tables name every key, function and filter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastgen.models.recipe import expression_grammar
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.recipe.schema import json_schema
from fastgen.models.resolve import rope_config
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "recipe-language.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)( recipe)?\n(.*?)^```$", TEXT, flags=re.M | re.S)
WHOLE = {yaml.safe_load(text)["name"]: text for kind, whole, text in BLOCKS if kind == "yaml" and whole}
PIECES = [text for kind, whole, text in BLOCKS if kind == "yaml" and not whole]
(CONFIG,) = [json.loads(text) for kind, _, text in BLOCKS if kind == "json"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in WHOLE.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def with_piece(directory: Path, number: int, config: dict[str, Any]) -> ModelSpec:
    file = directory / "piece.yaml"
    file.write_text("name: piece\nextends: brook\n" + PIECES[number])
    return resolve(load_recipe(file), config)


def test_the_whole_recipe(directory: Path) -> None:
    spec = resolve(load_recipe(directory / "brook.yaml"), CONFIG)
    assert spec.architecture == "BrookForCausalLM"
    layer = 4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2 * 2048
    assert spec.num_parameters == 24 * layer + 2 * 32000 * 2048 + 2 * 2048


def test_the_variant(directory: Path) -> None:
    spec = resolve(load_recipe(directory / "river.yaml"), CONFIG | {"architectures": ["RiverForCausalLM"]})
    assert (spec.max_positions, spec.final_norm) == (None, None)
    assert all(branch.norm and branch.norm.bias is None for layer in spec.layers for branch in layer.branches)


def test_the_piece_for_old_and_new_files(directory: Path) -> None:
    old = with_piece(directory, 0, CONFIG)
    assert (old.num_kv_heads, old.tied) == (16, False)
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    new = with_piece(
        directory, 0, CONFIG | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": scaling}
    )
    assert (new.num_kv_heads, new.tied) == (4, True)
    rotary = next(new.attentions()).rotary
    assert rotary is not None
    assert rotary.scaling is not None
    assert (rotary.theta, rotary.scaling.kind, rotary.scaling.original_max_positions) == (5e5, "yarn", 4096)
    both = CONFIG | {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    rotary = next(with_piece(directory, 0, both).attentions()).rotary
    assert rotary is not None
    assert rotary.theta == 5e5, "of two, transformers reads rope_scaling alone"


def test_the_piece_that_some_have(directory: Path) -> None:
    for config, present in ((CONFIG, False), (CONFIG | {"use_post_norm": True}, True)):
        spec = with_piece(directory, 1, config)
        assert [layer.branches[0].sum_norm is not None for layer in spec.layers] == [present] * 24


def test_the_piece_by_layer(directory: Path) -> None:
    windows = [part.sliding_window for part in with_piece(directory, 2, CONFIG).attentions()]
    assert windows == [1024, 1024, 1024, None] * 6


def test_the_piece_with_parallel_parts(directory: Path) -> None:
    spec = with_piece(directory, 3, CONFIG)
    (branch,) = spec.layers[23].branches
    attention, mlp = (each.part for each in branch.parts)
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MlpSpec)
    assert attention.rotary is not None
    assert (attention.rotary.dim, attention.q.weight.stored_shape) == (64, (3 * 2048, 2048))
    assert (
        spec.num_parameters == 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 128 + 2 * 2048) + 2 * 32000 * 2048 + 2 * 2048
    )


def test_the_piece_with_experts(directory: Path) -> None:
    spec = with_piece(directory, 4, CONFIG)
    parts = [layer.branches[1].parts[0].part for layer in spec.layers]
    assert [type(part) for part in parts] == [MlpSpec] * 2 + [MoeSpec] * 22
    assert len(PIECES) == 5


def test_every_key_of_the_language_is_in_the_tables() -> None:
    schema = json_schema()
    told = {part for row in re.findall(r"^\|(.*?[^\\])\|", TEXT, flags=re.M) for part in re.findall(r"[a-z_]+", row)}
    told |= set(re.findall(r"\*\*`?(?:model\.)?(\w+)`?\*\*", TEXT))
    for section in (schema["else"], *schema["$defs"].values()):
        assert set(section["properties"]) - {"layers", "final_norm", "embedding", "head"} <= told
    for key in ("layers", "final_norm", "embedding", "head"):
        assert f"`model.{key}`" in TEXT


def test_every_function_and_kind_of_scaling_is_in_the_tables() -> None:
    for name in (*expression_grammar.FUNCTIONS, "first"):
        assert f"`{name}(" in TEXT
    for name in expression_grammar._FILTERS:
        assert rf"`x \| {name}(v)`" in TEXT
    for kind, keys in rope_config._KEYS.items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{kind}` |"))
        assert all(f"`{key}`" in row for key in keys if (kind, key) != ("dynamic", "original_max_position_embeddings"))
