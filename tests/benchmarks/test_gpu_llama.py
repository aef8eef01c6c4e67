"""The model of the GPU benchmark's whole-model parts: it is the recipe's, and runs as a checkpoint's would."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.llama import (
    LLAMA_2_7B,
    TOY,
    LlamaShape,
    RandomWeights,
    kv_tokens_that_fit,
    llama_engine,
    llama_spec,
    submit,
)
from fastgen.compile.host.device import Device, current
from fastgen.models.registry.registry import named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import NodeRef


def config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
    }


def without_places(spec: Any) -> Any:
    """The same, whatever file and line of a recipe it came from, with the nodes' paths."""
    if isinstance(spec, NodeRef):
        return spec.path
    if isinstance(spec, tuple):
        return tuple(map(without_places, spec))
    if is_dataclass(spec):
        return {each.name: without_places(getattr(spec, each.name)) for each in fields(spec)}
    return spec


@pytest.mark.parametrize("shape", [LLAMA_2_7B, TOY], ids=["Llama-2-7B", "toy"])
def test_the_spec_is_what_the_recipe_makes(shape: LlamaShape) -> None:
    expected = without_places(resolve(named_recipe("llama"), config(shape)))
    assert without_places(llama_spec(shape)) == expected


def test_llama_2_7b_has_the_published_size() -> None:
    spec = llama_spec(LLAMA_2_7B)
    assert spec.num_parameters == 6_738_415_616
    assert spec.kv_bytes_per_token(2) == 512 << 10


def test_weights_are_drawn_the_same_each_time_and_keep_the_size_of_activations() -> None:
    weights = RandomWeights.of(llama_spec(TOY), torch.float32, torch.device("cpu"))
    reads = [weights.read(name) for name in weights.tensors]
    once, again = ({read.name: tensor for read, tensor in weights.stream(reads)} for _ in range(2))
    assert {name: tensor.shape for name, tensor in once.items()} == {
        name: header.shape for name, header in weights.tensors.items()
    }
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name])
        gain = {"model.embed_tokens.weight": TOY.hidden**0.5, "lm_head.weight": 3.0}.get(name, 1.0)
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert float(tensor.std()) == pytest.approx(gain * tensor.shape[1] ** -0.5, rel=0.1)


def answers(target: str, token_budget: int) -> list[list[int]]:
    engine = llama_engine(TOY, current("cpu"), kv_tokens=200, max_num_seqs=4, token_budget=token_budget, target=target)
    generations = submit(engine, [(3, 4), (11, 2), (1, 5)], seed=7)
    while engine.has_work:
        engine.step()
    return [each.output().token_ids for each in generations]


def test_an_engine_answers_every_request_to_its_full_length() -> None:
    found = answers("torch", 8)
    assert [len(each) for each in found] == [4, 2, 5]
    assert found == answers("torch", 16)


def test_what_fits_beside_the_weights() -> None:
    h200 = Device("cuda", "H200", 150_000_000_000, index=0, capability=(9, 0), num_sms=132)
    room = 0.9 * h200.memory_bytes - 2 * 6_738_415_616
    assert kv_tokens_that_fit(LLAMA_2_7B, h200) == int(room) // (512 << 10)
    assert kv_tokens_that_fit(LLAMA_2_7B, replace(h200, memory_bytes=1 << 30)) == 0
