"""References given by the user: a module, and activations recorded from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry.registry import named_recipe
from fastgen.verify import verify
from fastgen.verify.cases import randomise
from fastgen.verify.edits import replaced
from fastgen.verify.reference import ModuleReference
from tests.verify.internlm2 import InternLM2ForCausalLM


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    config = LlamaConfig(
        vocab_size=71,
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    randomise(model, 5)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def changed(path: str, value: object) -> Recipe:
    recipe = replaced(named_recipe("llama"), {tuple(path.split(".")): value})  # type: ignore[dict-item]
    assert recipe is not None
    return recipe


WRONG = "model.layers.residual.transform.norm.kind"


def test_a_module_is_a_reference(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    assert verify(directory, reference=model).passed
    report = verify(directory, recipe=changed(WRONG, "layer"), reference=model)
    assert report.finding is not None
    assert report.finding.node is not None
    assert report.finding.node.path == WRONG
    assert report.finding.cause is not None
    assert report.finding.cause.change == "kind layer -> rms"


def test_recorded_activations_are_a_reference(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    prompt = [3, 14, 15, 9, 2, 6, 5, 35]
    trace = ModuleReference(model).trace([prompt])
    assert trace.logits is not None
    tensors = {name: x.contiguous() for name, x in trace.outputs.items() if name.startswith("model.layers.")}
    tensors |= {"input_ids": torch.tensor(prompt), "logits": trace.logits}
    file = directory / "recorded" / "activations.safetensors"
    file.parent.mkdir()
    save_file(tensors, file)
    report = verify(directory, reference=file)
    assert report.passed, report.finding
    assert report.checks["nodes"].num_compared >= 2 * 9
    report = verify(
        directory, recipe=changed("model.layers.residual.transform.mlp.activation", "'relu'"), reference=file
    )
    assert report.finding is not None
    assert report.finding.node is not None
    assert report.finding.node.path == "model.layers.residual.transform.mlp.activation"
    save_file({"input_ids": torch.tensor([1, 2]), "x": torch.zeros(3, 4)}, file)
    with pytest.raises(InvalidArgumentError, match=r"x is \[3, 4\], but there are 2 tokens"):
        verify(directory, reference=file)


@pytest.mark.slow  # a module is one by the same way
def test_a_class_is_a_reference() -> None:
    """Configurations are drawn also for an architecture that transformers does not know."""
    report = verify("internlm2", reference=InternLM2ForCausalLM, configs=3)
    assert report.passed, report.finding
    assert len(report.configs) == 3
    qkv = ("model", "layers", "residual", "attend", "attention", "qkv")
    recipe = replaced(named_recipe("internlm2"), {(*qkv, "layout"): "(part num_kv_heads head_dim) in"})
    assert recipe is not None
    finding = verify(recipe, reference=InternLM2ForCausalLM, configs=4).finding
    assert finding is not None
    assert finding.node is not None
    assert finding.node.path.startswith(".".join(qkv[:-1]))


def test_without_a_reference_it_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nextends: llama\narchitectures: [NobodyKnowsForCausalLM]\n")
    with pytest.raises(FastgenError, match=r"transformers knows none of .*; give a model's directory"):
        verify(file)
    with pytest.raises(InvalidArgumentError, match="give the model's directory"):
        verify(file, reference=torch.nn.Linear(2, 2))


def test_a_report_is_json(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    report = verify(directory, recipe=changed(WRONG, "layer"), reference=model)
    content = json.loads(json.dumps(report.as_json()))
    assert not content["passed"]
    assert content["finding"]["node"]["path"] == WRONG
    assert content["finding"]["cause"]["complete"]
