"""Files that are no checkpoint of a decoder are named for what they are, with what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastgen.errors import CheckpointError, ModelNotFoundError, RecipeError, UnknownArchitectureError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.kinds import other_format, other_model
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve

GGUF = "a model in GGUF, the format of llama.cpp, which fastgen does not read. Take the checkpoint in safetensors"
ADAPTER = "an adapter such as LoRA's (PEFT), which changes another model"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize("name", ["tiny.Q4_0.gguf", "without-a-suffix"])
def test_a_gguf_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ModelNotFoundError) as caught:
        hub.locate(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: it is {GGUF}")


@pytest.mark.parametrize("has_config", [False, True])
def test_a_directory_of_gguf_files(tmp_path: Path, has_config: bool) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ModelNotFoundError, CheckpointError)) as caught:
        Checkpoint.open(hub.locate(tmp_path))
    assert f"; tiny.Q4_0.gguf shows that it is {GGUF}" in str(caught.value)
    assert "quantize=" in str(caught.value)


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter(tmp_path: Path, has_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "r": 8}')
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ModelNotFoundError, CheckpointError)) as caught:
        Checkpoint.open(hub.locate(tmp_path))
    assert f"adapter_config.json shows that it is {ADAPTER}" in str(caught.value)
    assert "merge_and_unload()" in str(caught.value)
    assert str(caught.value).endswith("(the model it changes is 'meta-llama/Llama-3.2-1B')")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"base_model_name_or_path": 7}'])
def test_an_adapter_whose_configuration_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelNotFoundError, match=r"and give that directory$"):
        hub.locate(tmp_path)


def test_formats_are_known_by_names_alone() -> None:
    """Names are all that is known of a repository on the hub."""
    assert "GGUF" in str(other_format(["README.md", "a.gguf"]))
    assert "diffusers" in str(other_format(["model_index.json", "unet"]))
    assert "ONNX" in str(other_format(["model.onnx"]))
    assert "its maker's own format" in str(other_format(["params.json", "consolidated.00.pth"]))
    assert other_format(["README.md", "data.csv"]) is None


OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "an encoder, which sees the tokens on both sides"),
    ({"architectures": ["BertForPreTraining"]}, "an encoder"),
    ({"architectures": ["BertModel"]}, "a model without a head that predicts tokens, such as an encoder"),
    ({"architectures": ["RobertaForSequenceClassification"]}, "a classifier"),
    ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder-decoder"),
    ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder-decoder"),
    ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"x": 1}}, "a multimodal model"),
    ({"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "openai/clip"}, "a multimodal model"),
    ({"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {"x": 1}}, "a multimodal model"),
]


@pytest.mark.parametrize(("config", "what"), OTHER_MODELS)
def test_another_kind_of_model_is_named_and_no_recipe_is_proposed(
    config: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        find_recipe(config, checkpoint_dir=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"no recipe is for {config['architectures'][0]}: it is {what}")
    assert "fastgen " in message
    assert "; take a" in message
    assert "recipe new" not in message


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["UnheardOfForCausalLM"], "is_encoder_decoder": False, "vision_config": None},
        {"architectures": ["GPT9LMHeadModel"]},
        {"architectures": ["ChatModel"], "auto_map": {"AutoModelForCausalLM": "modeling.Chat"}},
        {"architectures": "BertModel"},
        {"architectures": [], "auto_map": "x"},
        {},
    ],
)
def test_an_unknown_decoder_is_taken_for_nothing_else(config: dict[str, Any]) -> None:
    assert other_model(config) is None


def test_no_architecture_that_a_recipe_claims_is_taken_for_another_kind() -> None:
    for file in RECIPES.glob("*.yaml"):
        for architecture in load_recipe(file).architectures:
            assert other_model({"architectures": [architecture]}) is None, architecture


def test_the_refusal_of_a_quantized_checkpoint_recommends_the_plain_weights() -> None:
    config = json.loads((BUILTINS["tiny-llama"] / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    recipe = load_recipe(RECIPES / "llama.yaml")
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, config | quantized)
    assert "gptq" in str(caught.value)
    assert "Take the checkpoint with unquantized weights" in str(caught.value)
    assert "quantize='int4'" in str(caught.value)
    assert "allow_config_keys" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"(?s)Take the checkpoint with unquantized.*allow it once with allow_config"):
        resolve(recipe, config | quantized | {"warp_factor": 3})
