"""From spec to modules: where every tensor goes, what layers share, and layers that differ from each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MinistralConfig, MinistralForCausalLM, MistralConfig, OPTConfig

import fastgen
from fastgen.errors import RecipeError
from fastgen.layers.attention import Attention
from fastgen.layers.rotary import Rotary
from fastgen.models.builder import build, kv_groups
from fastgen.models.causal_lm import CausalLM
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, MlpSpec, ModelSpec
from fastgen.runtime.kv_cache.block_tables import max_blocks_held
from tests.reference import assert_equal_to_reference, randomise, save
from tests.runtime.held import assert_nothing_held

VOCAB_SIZE = 61
NUM_LAYERS = 5
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "sliding_window": WINDOW,
}


def spec_of(config: Any, architecture: str) -> ModelSpec:
    values = config.to_dict() | {"architectures": [architecture]}
    return resolve(find_recipe(values), values)


def mistral() -> ModelSpec:
    return spec_of(MistralConfig(**SIZES), "MistralForCausalLM")


def opt() -> ModelSpec:
    config = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        ffn_dim=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=12,
        max_position_embeddings=96,
        do_layer_norm_before=False,
    )
    return spec_of(config, "OPTForCausalLM")


def change_parts(spec: ModelSpec, change: Callable[[int, Any], Any]) -> ModelSpec:
    """``spec`` with ``change(layer, part)`` in place of every attention and feed-forward part."""
    return replace(
        spec,
        layers=tuple(
            replace(
                layer,
                branches=tuple(
                    replace(
                        branch, parts=tuple(replace(each, part=change(layer.index, each.part)) for each in branch.parts)
                    )
                    for branch in layer.branches
                ),
            )
            for layer in spec.layers
        ),
    )


def is_attention(part: AttentionSpec | MlpSpec) -> bool:
    return isinstance(part, AttentionSpec)


def with_windows(spec: ModelSpec, windows: list[int | None]) -> ModelSpec:
    return change_parts(
        spec, lambda layer, part: replace(part, sliding_window=windows[layer]) if is_attention(part) else part
    )


def build_on_cpu(spec: ModelSpec) -> tuple[CausalLM, list[Any]]:
    return build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=96)


def attentions(model: CausalLM) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


# Where tensors go


@pytest.mark.parametrize("make_spec", [mistral, opt])
def test_every_tensor_has_one_slot_and_every_parameter_is_filled(make_spec: Callable[[], ModelSpec]) -> None:
    spec = make_spec()
    model, slots = build_on_cpu(spec)
    assert sorted(slot.spec.names for slot in slots) == sorted(tensor.names for tensor in spec.tensors())
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    for number, slot in enumerate(slots):
        assert slot.target.shape == slot.spec.shape, slot.spec.names
        slot.target.fill_(number)
    assert all((slot.target == number).all() for number, slot in enumerate(slots)), "two slots overlap"
    assert all((parameter >= 0).all() for parameter in model.parameters()), "a parameter is not filled"
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters


def test_an_unknown_activation_is_a_recipe_error_with_its_place() -> None:
    spec = change_parts(mistral(), lambda layer, part: part if is_attention(part) else replace(part, activation="sine"))
    with pytest.raises(RecipeError, match=r"mistral|llama") as caught:
        build_on_cpu(spec)
    assert "mlp.activation: activation 'sine' is not known; known are gelu, " in str(caught.value)
    assert "the recipe says `hidden_act | default('silu')`" in str(caught.value)
    assert "mlp" in str(caught.value)


def test_numbers_of_the_spec_reach_the_layers() -> None:
    """Those too that every published model of a family has alike."""
    spec = change_parts(mistral(), lambda layer, part: replace(part, scale=layer + 0.5) if is_attention(part) else part)
    scales = [attention.attend.attention.shape.scale for attention in attentions(build_on_cpu(spec)[0])]
    assert scales == [0.5, 1.5, 2.5, 3.5, 4.5]
    spec = opt()
    assert spec.embedding.positions is not None
    positions = replace(spec.embedding.positions, offset=5)
    model, _ = build_on_cpu(replace(spec, embedding=replace(spec.embedding, positions=positions)))
    assert model.embedding.positions is not None
    assert model.embedding.positions.offset == 5


# What layers share


def test_layers_share_a_rotary_table_where_they_rotate_alike() -> None:
    def change(layer: int, part: AttentionSpec | MlpSpec) -> AttentionSpec | MlpSpec:
        if not isinstance(part, AttentionSpec):
            return part
        assert part.rotary is not None
        other = [
            part.rotary,
            replace(part.rotary, theta=77.0),
            replace(part.rotary, dim=4),
            part.rotary,
            replace(part.rotary, scaling=fastgen.models.spec.RotaryScaling("linear", 2.0, 96)),
        ][layer]
        return replace(part, rotary=other)

    model, _ = build_on_cpu(change_parts(mistral(), change))
    rotaries = [attention.rotary for attention in attentions(model)]
    assert all(isinstance(rotary, Rotary) for rotary in rotaries)
    assert rotaries[0] is rotaries[3]
    assert len({id(rotary) for rotary in rotaries}) == 4
    steps = [rotary.cos_sin[1] for rotary in rotaries if rotary is not None]
    assert [len(step) for step in steps] == [8, 8, 4, 8, 8]
    assert steps[0][1] != steps[1][1]
    torch.testing.assert_close(steps[4][0], torch.tensor(0.5).cos())


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None] * 5, [0] * 5),
        ([8] * 5, [0] * 5),
        ([8, None, 8, None, None], [0, 1, 0, 1, 1]),
        ([None, 8, 4, 8, None], [0, 1, 2, 1, 0]),
    ],
)
def test_layers_with_the_same_window_share_a_kv_group(windows: list[int | None], groups: list[int]) -> None:
    spec = with_windows(mistral(), windows)
    assert kv_groups(spec) == groups
    assert [
        attention.attend.attention.shape.sliding_window for attention in attentions(build_on_cpu(spec)[0])
    ] == windows


# Layers of different windows, against transformers


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ("sffsf", {"token_budget": 8, "max_num_seqs": 3, "block_size": 4}),
        pytest.param("fsfff", {"token_budget": 9, "max_num_seqs": 4, "block_size": 1}, marks=pytest.mark.slow),
        pytest.param("fsssf", {"block_size": 16}, marks=pytest.mark.slow),
        ("sssss", {"token_budget": 8, "max_num_seqs": 3, "block_size": 4}),
    ],
)
def test_layers_of_different_windows(
    kinds: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two KV groups, each with its own block tables, over storage they share; with preemptions, as with one group."""
    layer_types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    windows = [WINDOW if kind == "s" else None for kind in kinds]
    reference = MinistralForCausalLM._from_config(
        MinistralConfig(**SIZES, layer_types=layer_types), attn_implementation="eager"
    )
    save(randomise(reference, seed=3), tmp_path)
    config = MistralConfig(**SIZES)
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("fastgen.runtime.model_source.resolve", lambda *a, **k: with_windows(resolve(*a, **k), windows))

    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 30, 7, 19, 2, 40)]
    longest = 40 + 20
    num_groups, depth = len(set(kinds)), max(kinds.count(kind) for kind in set(kinds))
    block_size = options["block_size"]
    block_bytes = 2 * depth * block_size * 2 * 8 * 4  # keys and values, layers, tokens, KV heads, head size, fp32
    num_blocks = 1 + num_groups * (-(-longest // block_size) + 2)
    if "f" not in kinds:  # a window's blocks are few
        num_blocks = 2 + max_blocks_held(longest, WINDOW, block_size, max_chunk=options["token_budget"])
    with fastgen.load(tmp_path, dtype="float32", kv_cache_memory=num_blocks * block_bytes, **options) as llm:
        assert (llm.config.num_kv_groups, llm.config.num_blocks) == (num_groups, num_blocks)
        outputs = llm.generate(
            prompts, temperature=0, max_new_tokens=20, ignore_eos=True, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE
        )
        assert_nothing_held(llm._engine)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        assert_equal_to_reference(reference, output, tolerance=1e-4, vocab_size=VOCAB_SIZE)
