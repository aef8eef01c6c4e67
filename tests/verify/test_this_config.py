"""``verify CHECKPOINT --this-config``: the checkpoint at hand alone, whatever the family's other files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from fastgen.errors import FastgenError
from fastgen.verify import verify
from tests.recipe_tools.tiny_checkpoints import make

# Llama with another meaning of an absent key: right for a file that states it.
STRICT = """
name: strict
extends: llama
architectures: [LlamaForCausalLM]
config:
  max_positions: max_position_embeddings | default(77)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("this") / "llama"
    make("llama", directory)
    return directory


def recipe(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "strict.yaml"
    file.write_text(text)
    return file


def test_a_default_of_the_family_does_not_matter_if_the_file_states_the_key(tiny: Path, tmp_path: Path) -> None:
    file = recipe(tmp_path, STRICT)
    report = verify(tiny, recipe=file, this_config=True)
    assert report.passed, report.finding
    assert report.checks.keys() >= {"numbers", "weights", "nodes", "log-probabilities", "alone", "chunked"}
    assert report.shrunk == {}
    family = verify(file, configs=4)
    assert family.finding is not None
    assert "max_positions is 77" in family.finding.message


def test_a_mistake_for_this_checkpoint_is_found(tiny: Path, tmp_path: Path) -> None:
    text = STRICT + "model: {layers: {residual: {attend: {attention: {rotary: {kind: interleaved}}}}}}\n"
    report = verify(tiny, recipe=recipe(tmp_path, text), this_config=True)
    assert report.finding is not None
    assert report.finding.cause is not None
    assert report.finding.cause.change == "kind interleaved -> half"


@pytest.mark.slow  # test_shrink has the sizes
def test_a_large_checkpoint_is_run_small(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **{"vocab_size": 300, "hidden_size": 1280, "intermediate_size": 640, "num_hidden_layers": 6},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 64},
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")  # no weight is read
    content = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    report = verify(tmp_path, this_config=True)
    assert report.passed, report.finding
    assert report.shrunk["hidden_size"] == (1280, 160)
    assert report.shrunk["num_hidden_layers"] == (6, 4)
    assert report.configs[0]["hidden_size"] == 160
    assert report.configs[1] == content


def test_the_checkpoints_own_tensors_are_compared(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    save_file(tensors | {"model.layers.2.extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    report = verify(tmp_path, this_config=True)
    assert report.finding is not None
    assert report.finding.message == "1 tensors are claimed by no node: model.layers.2.extra.weight"
    assert report.finding.config == 1


def test_a_key_that_nothing_reads_is_found(tiny: Path, tmp_path: Path) -> None:
    content = json.loads((tiny / "config.json").read_text()) | {"warp_factor": 3}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").hardlink_to(tiny / "model.safetensors")
    report = verify(tmp_path, this_config=True)
    assert report.finding is not None
    assert "warp_factor is not known to the recipe" in report.finding.message


def test_a_dtype_in_the_file_does_not_make_a_reference_of_few_bits(tiny: Path, tmp_path: Path) -> None:
    content = json.loads((tiny / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").hardlink_to(tiny / "model.safetensors")
    report = verify(tmp_path, this_config=True)
    assert report.passed, report.finding


GPT_NEO = """
name: neo
architectures: [GPTNeoForCausalLM]
ignores: {config: [attention_layers, attention_types, window_size, "*dropout*", "summary_*"]}
config:
  vocab_size: vocab_size
  hidden_size: hidden_size
  num_layers: num_layers
  num_heads: num_heads
  num_kv_heads: num_heads
  head_dim: hidden_size // num_heads
  max_positions: max_position_embeddings
model:
  embedding: {tokens: transformer.wte, positions: {weight: transformer.wpe, offset: 0, rows: max_position_embeddings}}
  layers:
    at: transformer.h.{layer}
    residual:
      attend:
        norm: {kind: layer, weight: ln_1, bias: true, eps: layer_norm_epsilon}
        attention:
          qkv: {q: attn.attention.q_proj, k: attn.attention.k_proj, v: attn.attention.v_proj, bias: false}
          scale: 1
          sliding_window: WINDOW
          output: {weight: attn.attention.out_proj, bias: true}
      transform:
        norm: {kind: layer, weight: ln_2, bias: true, eps: layer_norm_epsilon}
        mlp: {kind: plain, size: 4 * hidden_size, activation: activation_function, up: mlp.c_fc, down: mlp.c_proj,
              bias: true}
  final_norm: {kind: layer, weight: transformer.ln_f, bias: true, eps: layer_norm_epsilon}
  head: {weight: lm_head, tied: tie_word_embeddings}
"""


@pytest.mark.parametrize(
    ("window", "passes"),
    [("window_size if attention_layers[layer] == 'local' else none", True), ("none", False), ("window_size", False)],
)
def test_a_window_of_any_name_is_shorter_than_the_prompts(tmp_path: Path, window: str, passes: bool) -> None:
    config = GPTNeoConfig(
        vocab_size=97, hidden_size=48, num_layers=2, num_heads=6, attention_types=[[["global", "local"], 1]],
        window_size=256, max_position_embeddings=512,
    )  # fmt: skip
    GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    text = GPT_NEO.replace("WINDOW", window)
    if passes:
        text = text.replace("attention_layers, attention_types, window_size", "attention_types")
    text = text.replace('"*dropout*", "summary_*"', ", ".join(key for key in config.to_dict() if _is_harmless(key)))
    report = verify(tmp_path, recipe=recipe(tmp_path, text), this_config=True)
    assert report.passed is passes, report.finding
    assert report.finding is None or "attention" in str(report.finding.node)


def _is_harmless(key: str) -> bool:
    return "dropout" in key or key.startswith("summary_") or key == "intermediate_size"


def test_a_window_that_no_prompt_reaches_is_not_called_right(tiny: Path, tmp_path: Path) -> None:
    content = json.loads((tiny / "config.json").read_text()) | {"reach": 300, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").hardlink_to(tiny / "model.safetensors")
    text = STRICT + "model: {layers: {residual: {attend: {attention: {sliding_window: reach}}}}}\n"
    report = verify(tmp_path, recipe=recipe(tmp_path, text), this_config=True)
    assert report.finding is not None
    assert "layer 0 sees 300 tokens, and no prompt has more than" in report.finding.message
    assert "its configuration has no sliding_window" in report.finding.message


def test_what_has_no_configuration_of_its_own_is_refused(tiny: Path) -> None:
    with pytest.raises(FastgenError, match="a recipe has no configuration of its own"):
        verify("llama", this_config=True)
    with pytest.raises(FastgenError, match="compared on the model's own configuration anyway"):
        verify(tiny, this_config=True, reference="recorded.safetensors")
