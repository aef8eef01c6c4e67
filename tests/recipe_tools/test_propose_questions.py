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
from fastgen.models.spec import AttentionSpec, MoeSpec
from fastgen.recipe_tools.diff.specs import spec_differences
from fastgen.recipe_tools.propose.nodes import Node, leaf
from fastgen.recipe_tools.propose.propose import Proposal, propose
from fastgen.recipe_tools.propose.variant import Difference
from tests.recipe_tools.other_architectures import headers
from tests.recipe_tools.test_propose import ATTENTION, CONFIG, GATED, NORMS, Shapes, heron
from tests.recipe_tools.tiny_checkpoints import CHECKPOINTS, make

EXPERT = {"gate.weight": (80, 48), "up.weight": (80, 48), "down.weight": (48, 80)}


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
    question = asked(proposed(name), "rotary.kind")
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


PARALLEL = "one after the other (attend, transform), or in parallel (one branch, both)?"
LLAMA_NORMS: Shapes = {"input_layernorm.weight": (48,), "post_attention_layernorm.weight": (48,)}


def test_names_make_parts_sequential_whatever_is_near_but_that_is_asked() -> None:
    """GPT-NeoX has the same names, and its parts are parallel."""
    proposal = proposed("starcoder2")
    assert [branch.name for branch in proposal.spec.layers[0].branches] == ["attend", "transform"]
    assert asked(proposal, "transform.norm.weight") == PARALLEL


@pytest.mark.parametrize("parallel", [False, True])
def test_a_key_of_the_order_is_enough(parallel: bool) -> None:
    config, shapes = headers("starcoder2")
    proposal = propose(config | {"use_parallel_residual": parallel}, shapes, recipes())
    assert len(proposal.spec.layers[0].branches) == (1 if parallel else 2)
    assert "in parallel" not in proposal.text


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "phi", "cohere"])
def test_a_number_of_norms_that_allows_one_order_only_is_enough(name: str) -> None:
    """Norms after both parts make them sequential, and one norm for both makes them parallel."""
    proposal = propose(*headers(name, CHECKPOINTS), recipes())
    assert "in parallel" not in proposal.text


def test_without_norms_the_order_is_asked_at_the_layers() -> None:
    assert asked(propose(CONFIG, heron(ATTENTION | GATED), recipes()), "layers.at") == PARALLEL


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (("ln_1", "ln_2", "ln_3"), ("attend.norm", "transform.norm", "attend.output_norm")),
        (("input_norm", "ln_2", "ln_3"), ("transform.norm", "attend.output_norm")),
    ],
)
def test_of_three_norms_the_place_is_asked_of_each_that_does_not_say_it(
    names: tuple[str, ...], places: tuple[str, ...]
) -> None:
    proposal = propose(CONFIG, heron(ATTENTION | GATED | {f"{name}.weight": (48,) for name in names}), recipes())
    place = "is this norm before its part (norm), after it (output_norm), or on the sum (sum_norm)?"
    found = {each.path for each in proposal.questions if place in each.text}
    assert found == {f"model.layers.residual.{each}.weight" for each in places}


@pytest.mark.parametrize("names", [("attn_out_norm", "ff_out_norm"), ("pre_mixer", "post_mixer", "pre_ff", "post_ff")])
def test_a_norm_after_its_part_may_be_one_of_the_sum(names: tuple[str, ...]) -> None:
    proposal = propose(CONFIG, heron(ATTENTION | GATED | {f"{name}.weight": (48,) for name in names}), recipes())
    question = asked(proposal, "attend.output_norm.weight")
    assert question == "are the norms after parts on what a part adds (output_norm), or on the sum (sum_norm)?"


def test_a_norm_between_heads_and_output_is_asked_and_moves_no_other() -> None:
    layer = ATTENTION | GATED | LLAMA_NORMS | {"mixer.sub_norm.weight": (48,)}
    proposal = propose(CONFIG, heron(layer), recipes())
    assert set(proposal.unclaimed) == {f"trunk.blocks.{index}.mixer.sub_norm.weight" for index in range(2)}
    question = asked(proposal, "attention.output.weight")
    assert question == "what does mixer.sub_norm norm? The language has no norm between the heads and the output"
    attend, transform = proposal.spec.layers[0].branches
    assert attend.norm is not None
    assert transform.norm is not None
    assert attend.norm.weight.names == ("trunk.blocks.0.input_layernorm.weight",)
    assert transform.norm.weight.names == ("trunk.blocks.0.post_attention_layernorm.weight",)


def test_a_norm_inside_the_attention_that_may_be_before_it_is_asked() -> None:
    layer = ATTENTION | GATED | {"mixer.norm.weight": (48,), "ff.norm.weight": (48,)}
    proposal = propose(CONFIG, heron(layer), recipes())
    assert not proposal.unclaimed
    assert "is it between the heads and the output?" in asked(proposal, "attend.norm.weight")
    assert "between the heads" not in asked(proposal, "transform.norm.weight")


# ------------------------------------------------------------------------------------------- what no tensor shows


@pytest.mark.parametrize(
    ("stated", "other"),
    [("attn_logit_softcapping", "a soft cap on logits"), ("final_logit_softcapping", "a soft cap on scores")],
)
def test_one_soft_cap_says_nothing_of_the_other(stated: str, other: str) -> None:
    layer = heron(ATTENTION | GATED | NORMS)
    both = asked(propose(CONFIG, layer, recipes()), "embedding.tokens")
    assert "a soft cap on scores, or a soft cap on logits" in both
    one = asked(propose(CONFIG | {stated: 30.0}, layer, recipes()), "embedding.tokens")
    assert other in one
    assert one.count("soft cap") == 1


@pytest.mark.parametrize(
    ("gate", "up", "down", "asks"),
    [
        ("w1", "w2", "c_proj", True),
        ("w1", "w2", "w3", True),
        ("fc2", "fc1", "fc3", True),
        ("linear_1", "linear_2", "linear_3", True),
        ("wi_0", "wi_1", "wo", True),
        ("w1", "w3", "w2", False),
        ("gate_w", "w1", "w2", False),
        ("lin", "up_proj", "out", False),
    ],
)
def test_gate_and_up_are_asked_unless_names_say_which(gate: str, up: str, down: str, asks: bool) -> None:
    sizes = {gate: (80, 48), up: (80, 48), down: (48, 80)}
    layer = ATTENTION | NORMS | {f"ff.{name}.weight": size for name, size in sizes.items()}
    question = asked(propose(CONFIG, heron(layer), recipes()), "mlp.gate")
    assert question == ("which is gate and which up? The shapes are the same" if asks else "")


def test_the_norms_of_queries_and_keys_may_store_weights_minus_one_like_all_others() -> None:
    """Without keys that only some of its layers have, Gemma 3 is like the nearest recipe, Gemma 2."""
    config, shapes = headers("gemma3")
    proposal = propose(config | {"rope_parameters": None, "rope_theta": 10000.0}, shapes, recipes())
    offset = "the nearest recipe stores norm weights minus 1; does this model? Else 0"
    assert [asked(proposal, f"{role}_norm.offset") for role in "qk"] == [offset, offset]


def test_it_is_asked_whether_all_layers_rotate() -> None:
    question = "do all layers rotate, and alike? Else `when`, or `theta` and `scaling` by layer"
    layer = heron(ATTENTION | GATED | NORMS)
    assert question in asked(propose(CONFIG, layer, recipes()), "rotary.kind")
    stated = propose(CONFIG | {"rope_interleaved": False}, layer, recipes())
    assert asked(stated, "rotary.kind") == question
    listed = propose(CONFIG | {"no_rope_layers": [1, 0]}, layer, recipes())
    assert "do all layers" not in asked(listed, "rotary.kind")


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


# ------------------------------------------------------------------------------------------- what shapes leave open


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_the_order_of_fused_queries_keys_and_values_is_asked(num_kv_heads: int) -> None:
    fused = (48 + 2 * 8 * num_kv_heads, 48)
    layer = NORMS | GATED | {"mixer.kvq.weight": fused, "mixer.out.weight": (48, 48)}
    proposal = propose(CONFIG | {"n_kv_heads": num_kv_heads}, heron(layer), recipes())
    assert "another order of q, k and v? Shapes are the same" in asked(proposal, "qkv.layout")
    assert ("(num_kv_heads part head_dim) in" in asked(proposal, "qkv.layout")) is (num_kv_heads == 2)


@pytest.mark.parametrize(("rows", "offset"), [(64, 0), (65, 1), (66, 2)])
def test_it_is_asked_which_row_is_position_0(rows: int, offset: int) -> None:
    table = {"trunk.positions.weight": (rows, 48)}
    proposal = propose(CONFIG | {"max_position_embeddings": 64}, heron(ATTENTION | GATED | NORMS) | table, recipes())
    positions = proposal.spec.embedding.positions
    assert positions is not None
    assert positions.offset == offset
    assert asked(proposal, "positions.offset") == "is this the row of position 0?"


@pytest.mark.parametrize(
    ("name", "asks"), [("norm", False), ("ln_f", False), ("out_norm", False), ("norm_in", True), ("first_norm", True)]
)
def test_the_place_of_the_only_norm_outside_the_layers_is_asked_unless_its_name_says_it(name: str, asks: bool) -> None:
    shapes = heron(ATTENTION | GATED | NORMS)
    shapes[f"trunk.{name}.weight"] = shapes.pop("trunk.out_norm.weight")
    proposal = propose(CONFIG, shapes, recipes())
    assert ("is it after the last layer?" in asked(proposal, "final_norm.weight")) is asks


@pytest.mark.parametrize(
    ("name", "asks"), [("ff.per_expert_scale", True), ("ff.router.score_correction", False), ("ff.expert_bias", False)]
)
def test_a_number_for_each_expert_is_a_correction_only_by_name(name: str, asks: bool) -> None:
    expert = {f"ff.experts.{each}.{key}": shape for each in range(4) for key, shape in EXPERT.items()}
    layer = ATTENTION | NORMS | expert | {"ff.router.weight": (4, 48), name: (4,)}
    proposal = propose(CONFIG | {"num_experts": 4, "num_experts_per_tok": 2}, heron(layer), recipes())
    assert ("is this added to the scores" in asked(proposal, "router.correction")) is asks
    moe = next(part for part in proposal.spec.parts() if isinstance(part, MoeSpec))
    assert (moe.router.scoring == "sigmoid") is not asks


@pytest.mark.parametrize(
    "mapping",
    [
        {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0},
        {"rope_type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ],
)
def test_a_rotary_mapping_that_the_language_does_not_read_is_asked(mapping: dict[str, Any]) -> None:
    config = CONFIG | {"rope_parameters": {"rope_theta": 10000.0, **mapping}, "max_position_embeddings": 64}
    proposal = propose(config, heron(ATTENTION | GATED | NORMS), recipes())
    assert "the language does not read this mapping" in asked(proposal, "rotary.scaling")
    assert "allow" not in asked(proposal, "rotary.scaling")
    assert "rope_parameters" in proposal.unread, "so that the checkpoint cannot be loaded yet"


def test_a_tensor_of_what_the_language_lacks_says_so() -> None:
    layer = ATTENTION | GATED | NORMS | {"mixer.time_decay": (48,), "encoder_attn.k.weight": (48, 47)}
    text = propose(CONFIG, heron(layer), recipes()).text
    assert "mixer.time_decay: the language has no convolution or recurrent state" in text
    assert "encoder_attn.k.weight: the language has no encoder" in text


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
