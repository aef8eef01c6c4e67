"""Files made to look old contain the same weights, under other names and with more tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel

from fastgen.verify.old_files import make_old


@pytest.mark.parametrize("bare", [False, True])
def test_a_gpt2_of_old(tmp_path: Path, bare: bool) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=8, n_layer=2, n_head=2, n_positions=16))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    before = load_file(file)
    surplus = make_old(file, model, bare=bare)
    prefix = "" if bare else "transformer."
    assert surplus == {f"{prefix}h.0.attn.bias", f"{prefix}h.1.attn.bias"}  # the causal mask, which the class ignores
    after = load_file(file)
    assert after.keys() - surplus == {prefix + name.removeprefix("transformer.") for name in before}
    assert all(torch.equal(after[prefix + name.removeprefix("transformer.")], before[name]) for name in before)


def test_what_a_class_ignores_by_a_pattern(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 31,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "n_routed_experts": 8,
    }
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, intermediate_size=8, kv_lora_rank=8, q_lora_rank=8))
    model.save_pretrained(tmp_path)
    names = make_old(tmp_path / "model.safetensors", model, bare=False)
    assert names == {"model.layers.61.weight", "model.rotary_emb.inv_freq"}
