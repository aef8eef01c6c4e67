"""A proposal asks for everything that names, shapes and configuration leave open, whatever recipe is nearest."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry.registry import list_recipes
from fastgen.models.resolve.resolve import mentioned_paths
from fastgen.models.spec import AttentionSpec
from fastgen.recipe_tools.diff.specs import spec_differences
from fastgen.recipe_tools.propose.nodes import Node, leaf
from fastgen.recipe_tools.propose.propose import Proposal, propose
from fastgen.recipe_tools.propose.variant import Difference
from tests.recipe_tools.other_architectures import headers
from tests.recipe_tools.test_propose import ATTENTION, CONFIG, GATED, NORMS, heron
from tests.recipe_tools.tiny_checkpoints import CHECKPOINTS, make


@functools.cache
def recipes() -> list[Recipe]:
    return [each.recipe for each in list_recipes()]


@functools.cache
def proposed(name: str) -> Proposal:
    """Returns the proposal for an architecture that no shipped recipe describes."""
    return propose(*headers(name), recipes())


def asked(proposal: Proposal, path: str) -> str:
    """Returns the questions at the nodes whose path ends with ``path``."""
    return " | ".join(each.text for each in proposal.questions if each.path.endswith(path))


def attention(proposal: Proposal) -> AttentionSpec:
    part = next(iter(proposal.spec.attentions()))
    assert isinstance(part, AttentionSpec)
    return part


# ------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon", "phi", "cohere", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_nothing_of_a_known_recipe_is_taken_without_a_question(name: str, tmp_path: Path) -> None:
    """The recipe of this very architecture is known; without any known recipe only answers to questions differ."""
    make(name, tmp_path)
    opened = Checkpoint.open(tmp_path)
    config, shapes = opened.config, {tensor: header.shape for tensor, header in opened.tensors.items()}
    alone, informed = propose(config, shapes, []), propose(config, shapes, recipes())
    for difference in spec_differences(alone.recipe, informed.recipe, config):
        if difference.path == "branches" or difference.place.startswith("keys of the configuration"):
            continue  # the order of parts is asked at a norm, and keys are listed in a question of their own
        inside = f".{difference.path}.".replace(".rotary.", ".alibi." if "alibi:" in informed.text else ".rotary.")
        assert any(inside in f".{each.path}." for each in informed.questions), (difference, informed.text)


@pytest.mark.parametrize("name", ["cohere2", "gemma3", "starcoder2", "nemotron", "glm4"])
def test_an_unknown_architecture_is_never_proposed_without_a_question(name: str) -> None:
    proposal = proposed(name)
    assert asked(proposal, "rotary.kind") or "interleave" in proposal.text
    assert "no key states a factor on" in asked(proposal, "embedding.tokens")
    assert "or a norm without weights" in asked(proposal, "embedding.tokens")
    assert asked(proposal, "final_norm.weight") or asked(proposal, "final_norm.offset")


def test_a_variant_that_would_compute_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shapes = headers("qwen3", CHECKPOINTS)
    assert propose(config, shapes, recipes()).recipe.extends is not None
    of = Difference.of

    def careless(self: Difference, proposal: Node) -> Node:
        found = of(self, proposal)
        found["model"].setdefault("head", {})["scale"] = leaf(2)
        return found

    monkeypatch.setattr(Difference, "of", careless)
    assert propose(config, shapes, recipes()).recipe.extends is None


# ------------------------------------------------------------------------------------------- layers of several kinds


@pytest.mark.parametrize("name", ["cohere2", "gemma3"])
def test_where_layers_differ_in_kind_the_rotation_is_asked(name: str) -> None:
    question = asked(proposed(name), "rotary.theta")
    assert "do all kinds of layers (sliding_attention, full_attention) rotate, and alike?" in question


def test_two_bases_are_a_question() -> None:
    question = asked(proposed("gemma3"), "rotary.theta")
    assert "full_attention.rope_theta = 1000000.0" in question
    assert "sliding_attention.rope_theta = 10000.0" in question


def test_two_ways_to_stretch_are_a_question() -> None:
    question = asked(proposed("gemma3"), "rotary.scaling")
    assert "rope_parameters.full_attention, rope_parameters.sliding_attention: which holds in which layers?" in question


def test_a_kind_of_layer_that_is_neither_is_asked() -> None:
    config, shapes = headers("cohere2")
    config["layer_types"] = ["chunked_attention", "sliding_attention", "full_attention"]
    question = asked(propose(config, shapes, recipes()), "attention.sliding_window")
    assert "layers of the kind chunked_attention are taken to see all tokens" in question


def test_without_a_list_of_kinds_it_is_asked_which_layers_have_the_window() -> None:
    proposal = propose(CONFIG | {"sliding_window": 16}, heron(ATTENTION | GATED | NORMS), recipes())
    assert "in every layer?" in asked(proposal, "sliding_window")


# ------------------------------------------------------------------------------------------- keys and their names


def test_a_private_key_is_no_window() -> None:
    proposal = proposed("gemma3")
    config, _ = headers("gemma3")
    assert "_sliding_window_pattern" in config
    assert ("_sliding_window_pattern",) not in mentioned_paths(proposal.recipe)
    assert {part.sliding_window for part in proposal.spec.attentions() if isinstance(part, AttentionSpec)} == {32, None}


def test_a_key_that_is_only_named_like_a_number_is_asked() -> None:
    proposal = propose(CONFIG | {"window_stride": 16}, heron(ATTENTION | GATED | NORMS), recipes())
    assert "window_stride = 16 may be the tokens that a token sees; is it?" in asked(proposal, "sliding_window")


def test_a_key_that_only_has_the_value_is_asked() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "d_ff"} | {"widget": 80}
    proposal = propose(config, heron(ATTENTION | GATED | NORMS), recipes())
    assert "widget = 80 may be the features between up and down; is it?" in asked(proposal, "mlp.size")


def test_a_key_of_the_field_is_not_asked() -> None:
    proposal = propose(CONFIG | {"sliding_window": 16}, heron(ATTENTION | GATED | NORMS), recipes())
    assert attention(proposal).sliding_window == 16
    assert "is it?" not in asked(proposal, "sliding_window")
    assert not asked(proposal, "mlp.size")


def test_two_keys_of_one_meaning_that_differ_are_asked() -> None:
    proposal = propose(CONFIG | {"hidden_act": "gelu"}, heron(ATTENTION | GATED | NORMS), recipes())
    assert "hidden_act = gelu, act_fn = silu: which is the activation" in asked(proposal, "mlp.activation")


def test_what_only_the_extended_recipe_accounts_for_is_asked() -> None:
    config, shapes = headers("gemma2", CHECKPOINTS)
    proposal = propose(config | {"cache_implementation": "hybrid"}, shapes, recipes())
    assert proposal.recipe.extends == "gemma2"
    question = asked(proposal, "ignores.config")
    assert "gemma2 accounts for these keys; do they mean the same here, or change nothing?" in question
    assert "cache_implementation = hybrid" in question


# ------------------------------------------------------------------------------------------- order and rotation


def test_names_that_say_so_make_parts_sequential_whatever_is_near() -> None:
    proposal = proposed("starcoder2")
    assert [branch.name for branch in proposal.spec.layers[0].branches] == ["attend", "transform"]
    assert "parallel" not in " ".join(each.text for each in proposal.questions)


def test_the_rotated_part_is_never_that_of_the_nearest_recipe() -> None:
    proposal = proposed("starcoder2")
    rotary = attention(proposal).rotary
    assert rotary is not None
    assert rotary.dim == attention(proposal).head_dim
    assert "no key states it: are all 8 features of a head rotated, or some?" in asked(proposal, "rotary.fraction")


def test_the_order_of_parts_is_asked_at_the_norm_that_it_places() -> None:
    layer = ATTENTION | GATED | {"ln_a.weight": (48,), "ln_b.weight": (48,)}
    proposal = propose(CONFIG, heron(layer), recipes())
    assert "is this norm before its part (norm), after it" in asked(proposal, "attend.norm.weight")
    assert "one after the other (attend, transform), or in parallel" in asked(proposal, "transform.norm.weight")


# ------------------------------------------------------------------------------------------- what cannot be said


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt_oss", "model.layers.{layer}.mlp.experts.gate_up_proj [4, 48, 144]"),
        ("granitemoe", "model.layers.{layer}.block_sparse_moe.experts.gate_up_proj [4, 144, 48]"),
        ("llama4", "model.layers.{layer}.feed_forward.experts.down_proj [4, 72, 48]"),
        ("lfm2", "model.layers.{layer}.conv.conv.weight [48, 1, 3]"),
        ("qwen3_next", "model.layers.{layer}.linear_attn.conv1d.weight [64, 1, 4]"),
        ("mamba2", "backbone.layers.{layer}.mixer.conv1d.weight [128, 1, 4]"),
    ],
)
def test_tensors_that_no_recipe_can_describe_are_refused_by_name(name: str, tensor: str) -> None:
    """In most of these models other modules fit an attention and a feed-forward."""
    with pytest.raises(CheckpointError) as refused:
        propose(*headers(name), recipes())
    assert tensor in str(refused.value)
    assert "a convolution, or all experts in one tensor. The recipe language has neither" in str(refused.value)


def test_a_mask_is_no_convolution() -> None:
    mask = {f"layers.{layer}.attn.causal": (1, 1, 64, 64) for layer in range(2)}
    proposal = propose(CONFIG, heron(ATTENTION | GATED | NORMS) | mask, recipes())
    assert set(proposal.unclaimed) == set(mask)


def test_the_norm_of_each_head_is_no_expert() -> None:
    proposal = proposed("stablelm")
    assert "model.layers.{layer}.self_attn.q_layernorm.norms.{index}.weight" in proposal.text
    assert "{expert}" not in proposal.text


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"add_cross_attention": True}, "an encoder-decoder"),
        ({"architectures": ["HeronForMaskedLM"]}, "an encoder, which sees the tokens on both sides"),
        ({"vision_config": {"hidden_size": 48}}, "a multimodal model"),
    ],
)
def test_what_is_no_decoder_of_text_is_refused_though_its_tensors_fit(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=f"no recipe can be proposed .*: it is {what}.*; take a"):
        propose(CONFIG | keys, heron(ATTENTION | GATED | NORMS), recipes())


def test_an_unread_key_with_a_known_meaning_says_it() -> None:
    config = CONFIG | {"scale_embeddings": True}
    proposal = propose(config, heron(ATTENTION | GATED | NORMS), recipes())
    assert "scale_embeddings = true (token embeddings are scaled)" in asked(proposal, "ignores.config")


def test_an_unread_key_of_what_the_language_lacks_says_so() -> None:
    proposal = propose(CONFIG | {"clip_qkv": 8.0, "use_conv": False}, heron(ATTENTION | GATED | NORMS), recipes())
    question = asked(proposal, "ignores.config")
    assert "clip_qkv = 8.0: the language has no bounds on queries" in question
    assert question.count("the language has no") == 1
