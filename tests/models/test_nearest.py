"""The nearest known recipe of a checkpoint, and the error about an unknown architecture that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fastgen
from fastgen.errors import CheckpointError, RecipeError, UnknownArchitectureError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.kinds import quantized
from fastgen.models.registry.nearest import fold, nearest_recipes
from fastgen.models.registry.registry import find_recipe, list_recipes
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import MoeSpec
from fastgen.recipe_tools.propose.propose import propose
from tests.models import test_recipe_published, test_recipe_published_families
from tests.recipe_tools.other_architectures import headers
from tests.recipe_tools.renamed import rename
from tests.recipe_tools.tiny_checkpoints import make

PUBLISHED = {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}


def test_indices_are_folded_from_the_front() -> None:
    assert fold("model.layers.12.mlp.experts.3.w1.weight") == "model.layers.{layer}.mlp.experts.{expert}.w1.weight"
    assert fold("h.0.conv1d.weight") == "h.{layer}.conv1d.weight"
    assert fold("a.1.experts.2.c.3.weight") == "a.{layer}.experts.{expert}.c.3.weight"


def test_layers_in_stages_are_compared_too() -> None:
    """No tensor has one index only, so that nothing says how many layers there are."""
    shapes = {f"stages.{stage}.{layer}.weight": (8, 8) for stage in range(2) for layer in range(3)}
    assert (
        nearest_recipes({"hidden_size": 8}, shapes, [find_recipe({"architectures": ["LlamaForCausalLM"]})])[0].explained
        == 0
    )


def test_only_the_index_of_an_expert_is_called_so() -> None:
    norm_of_a_head = "layers.{layer}.self_attn.q_layernorm.norms.{index}.weight"
    assert fold("layers.0.self_attn.q_layernorm.norms.3.weight") == norm_of_a_head


@pytest.mark.parametrize("name", ["phi", "gemma2", "gpt2", "opt"])
def test_it_is_the_own_recipe_in_whatever_words(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "published")
    for directory in (tmp_path / "published", rename(tmp_path / "published", tmp_path / "renamed")):
        opened = Checkpoint.open(directory)
        shapes = {tensor: header.shape for tensor, header in opened.tensors.items()}
        best = nearest_recipes(opened.config, shapes, [each.recipe for each in list_recipes()])[0]
        assert best.recipe.name == name
        assert best.explained == best.num_tensors == len(shapes)


def test_an_unknown_architecture_that_no_recipe_can_describe_says_so(tmp_path: Path) -> None:
    """Otherwise it would recommend a command that refuses the checkpoint."""
    config, shapes = headers("mamba2")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnknownArchitectureError) as error:
        find_recipe(config, checkpoint_dir=tmp_path)
    assert "backbone.layers.{layer}.mixer.conv1d.weight [128, 1, 4]. That is a convolution" in str(error.value)
    assert "fastgen recipe new" not in str(error.value)


def test_no_name_is_suggested_for_tensors_that_no_recipe_can_describe(tmp_path: Path) -> None:
    config, shapes = headers("mamba2")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnknownArchitectureError, match="did you mean 'LlamaForCausalLM'"):
        find_recipe(config | {"architectures": ["LlamasForCausalLM"]})
    with pytest.raises(UnknownArchitectureError, match=r"no recipe is for LlamasForCausalLM\. Of the tensors in its"):
        find_recipe(config | {"architectures": ["LlamasForCausalLM"]}, checkpoint_dir=tmp_path)


QUANTIZED = (
    "It is quantized ({}), but fastgen reads plain weights. Take the checkpoint with unquantized weights; quantize="
)


@pytest.mark.parametrize(
    ("keys", "last", "how"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "weight", "awq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "qweight", "gptq"),
        ({}, "qweight", "layers.0.q.qweight"),
        ({"quantization_config": {"bits": 4, "quant_method": None}}, "weight", "quantization_config"),
        ({}, "gate_up_proj_blocks", "layers.0.q.gate_up_proj_blocks"),
    ],
)
def test_quantized_weights_of_an_unknown_architecture_are_named(
    keys: dict[str, Any], last: str, how: str, tmp_path: Path
) -> None:
    """Otherwise a command would be recommended that fails, or writes a recipe for weights that cannot be read."""
    config = {"architectures": ["HeronForCausalLM"], "hidden_size": 8} | keys
    tensors = {"embed.weight": torch.zeros(9, 8), f"layers.0.q.{last}": torch.zeros(8, 8)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnknownArchitectureError) as unknown:
        find_recipe(config, checkpoint_dir=tmp_path)
    assert QUANTIZED.format(how) in str(unknown.value)
    assert "fastgen recipe new" not in str(unknown.value)
    with pytest.raises(CheckpointError) as refused:
        propose(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, [])
    assert f"no recipe can be proposed for this checkpoint. {QUANTIZED.format(how)}" in str(refused.value)


@pytest.mark.parametrize("name", ["head_scales", "logit_scales", "layers.0.scales", "skip_blocks", "num_blocks"])
@pytest.mark.parametrize("stated", [None, {}])
def test_plain_weights_are_not_taken_for_quantized_ones(name: str, stated: object) -> None:
    assert quantized({"quantization_config": stated}, ["embed.weight", "layers.0.q.weight", name]) == ""


def test_an_unknown_architecture_names_the_nearest_and_the_command(tmp_path: Path) -> None:
    make("phi", tmp_path / "published")
    directory = rename(tmp_path / "published", tmp_path / "renamed")
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(UnknownArchitectureError) as error:
        find_recipe(config, checkpoint_dir=directory)
    assert str(error.value) == (
        "no recipe is for HerringForCausalLM. The nearest known recipe is 'phi', which explains 47 of its 47 tensors. "
        f"`fastgen recipe new {directory}` proposes a recipe for it. `fastgen recipe list` lists all known recipes"
    )


def test_the_error_and_the_proposal_name_one_nearest_though_only_shapes_tell_the_size_of_a_head(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "published")
    directory = rename(tmp_path / "published", tmp_path / "renamed")
    config = json.loads((directory / "config.json").read_text())
    config["features"] = config.pop("head_dim")  # 12, where hidden_size / n_heads is 8
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {name: header.shape for name, header in Checkpoint.open(directory).tensors.items()}
    proposal = propose(config, shapes, [each.recipe for each in list_recipes()])
    assert proposal.nearest is not None
    assert (proposal.nearest.recipe.name, proposal.nearest.explained) == ("qwen3", len(shapes))
    with pytest.raises(UnknownArchitectureError, match=f"'qwen3', which explains {len(shapes)} of its {len(shapes)} "):
        find_recipe(config, checkpoint_dir=directory)


@pytest.mark.parametrize(
    ("dense", "sampled"),
    [
        ({"first_k_dense_replace": 3}, [0, 2, 3, 60]),
        pytest.param({"first_k_dense_replace": 0}, [0, 60], marks=pytest.mark.slow),
    ],
)
def test_a_large_mixture_is_measured_by_a_few_layers_and_one_expert_of_each(
    dense: dict[str, int], sampled: list[int]
) -> None:
    config = next(config for config, _ in PUBLISHED.values() if config.get("n_routed_experts") == 256) | dense
    shapes = {each.names[0]: each.stored_shape for each in resolve(find_recipe(config), config).tensors()}
    assert len(shapes) > 45_000
    best = nearest_recipes(config, shapes, [each.recipe for each in list_recipes()])[0]
    assert (best.recipe.name, best.explained, best.num_tensors) == ("deepseek_v3", len(shapes), len(shapes))
    assert best.spec is not None
    assert [layer.index for layer in best.spec.layers] == sampled
    assert {len(part.experts) for part in best.spec.parts() if isinstance(part, MoeSpec)} == {1}


def test_what_is_missing_in_one_layer_only_is_not_explained() -> None:
    config = next(config for config, _ in PUBLISHED.values() if config["architectures"] == ["LlamaForCausalLM"])
    recipes = [each.recipe for each in list_recipes()]
    shapes = {each.names[0]: each.stored_shape for each in resolve(find_recipe(config), config).tensors()}
    lacking = {name: shape for name, shape in shapes.items() if ".7.mlp.gate_proj" not in name}
    odd = {name: (*shape, 1) if ".5.self_attn.q_proj" in name else shape for name, shape in lacking.items()}
    best = next(each for each in nearest_recipes(config, odd, recipes) if each.recipe.name == "llama")
    assert (best.explained, best.num_tensors) == (len(shapes) - 2, len(shapes) - 1)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, None])
def test_a_broken_checkpoint_makes_no_other_error(damage: bytes | None, tmp_path: Path) -> None:
    config = {"architectures": ["HeronForCausalLM"], "vocab_size": "many"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if damage is not None:
        (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UnknownArchitectureError, match="no recipe is for HeronForCausalLM"):
        find_recipe(config, checkpoint_dir=tmp_path)


def test_a_checkpoint_that_says_it_is_another_architecture(tmp_path: Path) -> None:
    """The chosen recipe cannot read it; the error names the recipes that fit the tensors."""
    for file in BUILTINS["tiny-llama"].iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OPTForCausalLM"]}))
    expected = r"no key 'ffn_dim'.*says that this is OPTForCausalLM, but its tensors are those of another.*'llama'"
    with pytest.raises(RecipeError, match=expected):
        fastgen.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": None, "num_hidden_layers": "two"}))
    with pytest.raises(RecipeError) as found:  # it is a Llama: only its own mistake is reported
        fastgen.load(tmp_path)
    assert "those of another" not in str(found.value)


def test_a_wrong_key_does_not_make_it_another_architecture(tmp_path: Path) -> None:
    """Its recipe cannot be resolved, and a Llama's, which has the same tensors, can."""
    for file in BUILTINS["tiny-mistral"].iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": "wide"}))
    with pytest.raises(RecipeError, match="sliding_window") as found:
        fastgen.load(tmp_path)
    assert "those of another" not in str(found.value)
