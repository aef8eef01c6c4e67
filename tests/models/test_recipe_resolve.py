"""Resolving a recipe: the result equals the model of transformers, and every error has a location."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, OPTConfig, OPTForCausalLM

from fastgen.errors import InvalidArgumentError, RecipeError
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.registry.registry import find_recipe, named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, BranchSpec, ModelSpec

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)} | {
    "opt": (OPTConfig, OPTForCausalLM)
}


@st.composite
def reference_configs(draw: st.DrawFn) -> Any:
    """Draws a transformers configuration of one of the families."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 8))
    flag = st.booleans()
    common = {
        "vocab_size": draw(st.integers(3, 300)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "max_position_embeddings": draw(st.integers(2, 3000)),
        "tie_word_embeddings": draw(flag),
    }
    if family == "opt":
        hidden = heads * head_dim
        own: dict[str, Any] = {
            "hidden_size": hidden,
            "ffn_dim": draw(st.integers(1, 50)),
            "word_embed_proj_dim": draw(st.sampled_from([None, hidden, 6])),
            "do_layer_norm_before": draw(flag),
            "_remove_final_layer_norm": draw(flag),
            "enable_bias": draw(flag),
            "layer_norm_elementwise_affine": draw(flag),
            "activation_function": draw(st.sampled_from(["relu", "gelu"])),
            "pad_token_id": 1,
        }
    else:
        explicit = draw(flag)
        own = {
            "hidden_size": heads * draw(st.integers(1, 8)) * 2 if explicit else heads * head_dim,
            "head_dim": head_dim if explicit else None,
            "intermediate_size": draw(st.integers(1, 50)),
            "num_key_value_heads": kv_heads if family == "mistral" else draw(st.sampled_from([kv_heads, None])),
        }
    if family == "llama":
        own |= {"attention_bias": draw(flag), "mlp_bias": draw(flag)}
    if family == "mistral":
        own |= {"sliding_window": draw(st.sampled_from([None, 4, 100]))}
    return FAMILIES[family][0](**common, **own)


@settings(max_examples=60, deadline=None)
@given(reference=reference_configs(), everything=st.booleans())
def test_tensors_and_parameter_count_as_in_transformers(reference: Any, everything: bool) -> None:
    """It holds for ``config.json`` as transformers saves it, and with every default written out."""
    with torch.device("meta"):
        model = FAMILIES[reference.model_type][1](reference)
    text = json.dumps(reference.to_dict(), default=str) if everything else reference.to_json_string()
    config = json.loads(text) | {"architectures": [type(model).__name__]}
    spec = resolve(find_recipe(config), config)

    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if reference.tie_word_embeddings:
        assert "lm_head.weight" in next(spec.tensors()).names
        del expected["lm_head.weight"]
    assert {tensor.names[0]: tensor.shape for tensor in spec.tensors()} == expected
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    windows = {part.sliding_window for part in spec.attentions()}
    assert windows == {getattr(reference, "sliding_window", None)}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "ffn_dim": 96,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def resolved(config: dict[str, Any], **options: Any) -> ModelSpec:
    return resolve(find_recipe(config), config, **options)


def branches(spec: ModelSpec) -> list[BranchSpec]:
    return [branch for layer in spec.layers for branch in layer.branches]


def test_every_number_of_a_model() -> None:
    spec = resolved(LLAMA | {"rope_theta": 7e3})
    assert (spec.recipe, spec.architecture) == ("llama", "LlamaForCausalLM")
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.max_positions) == (64, 2, 100, 128)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    attend, transform = spec.layers[1].branches
    assert (attend.name, transform.name) == ("attend", "transform")
    (alone,) = attend.parts
    part = alone.part
    assert alone.norm is None
    assert isinstance(part, AttentionSpec)
    assert part.scale == 0.25
    assert part.rotary is not None
    assert (part.rotary.theta, part.rotary.dim, part.rotary.scaling) == (7e3, 16, None)
    assert (part.k.in_features, part.k.out_features, part.k.weight.shape) == (64, 32, (32, 64))
    assert part.k.weight.names == ("model.layers.1.self_attn.k_proj.weight",)
    assert attend.norm is not None
    assert (attend.norm.kind, attend.norm.eps, attend.norm.size) == ("rms", 1e-5, 64)
    assert spec.ignored_tensors == ("*.rotary_emb.inv_freq",)
    node = part.q.weight.node
    assert node.path == "model.layers.residual.attend.attention.qkv.q"
    assert "q: self_attn.q_proj" in Path(node.file).read_text().splitlines()[node.line - 1]


def test_defaults_are_those_of_the_family() -> None:
    assert {part.sliding_window for part in resolved(MISTRAL).attentions()} == {4096}
    assert (
        resolved(
            {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"} | {"num_attention_heads": 16}
        ).num_kv_heads
        == 8
    )
    assert resolved(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4
    assert {part.sliding_window for part in resolved(MISTRAL | {"sliding_window": None}).attentions()} == {None}
    rotary = next(resolved(LLAMA).attentions()).rotary
    assert rotary is not None
    assert rotary.theta == 10000.0
    spec = resolved(OPT)
    assert spec.tied
    assert spec.final_norm is not None
    assert spec.embedding.project is None


def test_opt_with_its_norms_after_the_parts() -> None:
    spec = resolved(OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32})
    assert spec.final_norm is None
    assert all(branch.norm is None and branch.sum_norm is not None for branch in branches(spec))
    assert spec.embedding.tokens.shape == (100, 32)
    assert spec.embedding.project is not None
    assert (spec.embedding.project.in_features, spec.embedding.project.out_features) == (32, 64)
    assert spec.head.project is not None
    assert (spec.head.project.in_features, spec.head.project.out_features) == (64, 32)
    assert spec.embedding.tokens.names == (
        "model.decoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    before = resolved(OPT)
    assert all(branch.norm is not None and branch.sum_norm is None for branch in branches(before))


def test_a_dynamic_scaling_limits_the_positions() -> None:
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert resolved(LLAMA | dynamic).max_positions == 128
    assert resolved(LLAMA | dynamic | {"max_sequence_length": 512}).max_positions == 128


@pytest.mark.parametrize(
    ("change", "node", "message"),
    [
        ({"hidden_size": "64"}, "config.hidden_size", "an integer from 1 .* is '64'"),
        ({"hidden_size": 64.0}, "config.hidden_size", "an integer"),
        ({"hidden_size": True}, "config.hidden_size", "an integer"),
        ({"hidden_size": None}, "config.hidden_size", "an integer"),
        ({"hidden_size": [64]}, "config.hidden_size", "an integer"),
        ({"hidden_size": 0}, "config.hidden_size", "an integer"),
        ({"hidden_size": -64}, "config.hidden_size", "an integer"),
        ({"hidden_size": 2**40}, "config.hidden_size", "an integer"),
        ({"hidden_size": 66}, "config.head_dim", "an integer from 1 .*is 16.5"),
        ({"head_dim": -1}, "config.head_dim", "an integer"),
        ({"head_dim": 15}, "model.layers.residual.attend.attention.rotary", "pairs of features"),
        ({"vocab_size": 0}, "config.vocab_size", "an integer"),
        ({"num_hidden_layers": 0}, "config.num_layers", "an integer"),
        ({"num_hidden_layers": 10**9}, "config.num_layers", "an integer"),
        ({"num_attention_heads": 0}, "config.num_heads", "an integer"),
        ({"num_key_value_heads": 3}, "config.num_kv_heads", "4 query heads cannot share 3 KV heads evenly"),
        ({"num_key_value_heads": 8}, "config.num_kv_heads", "cannot share"),
        ({"num_key_value_heads": 0}, "config.num_kv_heads", "an integer"),
        ({"max_position_embeddings": -1}, "config.max_positions", "an integer"),
        ({"max_position_embeddings": 1.5}, "config.max_positions", "an integer"),
        ({"rms_norm_eps": "1e-5"}, "model.layers.residual.attend.norm.eps", "a finite number"),
        ({"rms_norm_eps": float("nan")}, "model.layers.residual.attend.norm.eps", "a finite number"),
        ({"rms_norm_eps": -1e-5}, "model.layers.residual.attend.norm.eps", "must not be negative"),
        ({"rms_norm_eps": None}, "model.layers.residual.attend.norm.eps", "a finite number"),
        ({"intermediate_size": -1}, "model.layers.residual.transform.mlp.size", "an integer"),
        ({"hidden_act": 3}, "model.layers.residual.transform.mlp.activation", "a text"),
        ({"hidden_act": None}, "model.layers.residual.transform.mlp.activation", "a text"),
        ({"attention_bias": 1}, "model.layers.residual.attend.attention.qkv.bias", "true or false"),
        ({"attention_bias": None}, "model.layers.residual.attend.attention.qkv.bias", "true or false"),
        ({"mlp_bias": "true"}, "model.layers.residual.transform.mlp.bias", "true or false"),
        ({"tie_word_embeddings": "no"}, "model.head.tied", "true or false"),
        ({"rope_theta": None}, "model.layers.residual.attend.attention.rotary.theta", "a finite number"),
        ({"rope_theta": 0}, "model.layers.residual.attend.attention.rotary.theta", "above 1"),
        ({"rope_scaling": {"type": "su"}}, "model.layers.residual.attend.attention.rotary.scaling", "'su' is not supp"),
        ({"rope_scaling": "linear"}, "model.layers.residual.attend.attention.rotary.theta", "cannot be indexed"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit(change: dict[str, Any], node: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        resolved(LLAMA | change)
    assert caught.value.node is not None
    assert caught.value.node.startswith(node)
    assert str(caught.value.file).endswith("recipes/llama.yaml")
    assert caught.value.line is not None
    last = node.split(".")[-1]
    assert last in Path(str(caught.value.file)).read_text().splitlines()[caught.value.line - 1]


@pytest.mark.parametrize("value", [0, -5, 1.5, "4", True, [4]])
def test_a_window_that_does_not_fit_points_into_the_variant(value: Any) -> None:
    with pytest.raises(RecipeError, match="an integer") as caught:
        resolved(MISTRAL | {"sliding_window": value})
    assert str(caught.value.file).endswith("recipes/mistral.yaml")
    assert caught.value.node == "model.layers.residual.attend.attention.sliding_window"


_WITH_DEFAULT = {"architectures", "model_type", "max_position_embeddings", "hidden_act", "rms_norm_eps"}


@pytest.mark.parametrize("key", sorted(set(LLAMA) - _WITH_DEFAULT))
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    if key == "num_key_value_heads":
        assert resolved(config).num_kv_heads == 4
        return
    with pytest.raises(RecipeError, match=f"my/config.json has no key '{key}'"):
        resolved(config, config_file="my/config.json")


class TestConfigKeys:
    @pytest.mark.parametrize(
        "key", ["num_experts", "rope_theta_", "max_positions", "num_layers", "layer", "sliding_windo"]
    )
    def test_an_unknown_key_is_named(self, key: str) -> None:
        with pytest.raises(RecipeError, match=rf"- {key} is not known to the recipe") as caught:
            resolved(LLAMA | {key: 1}, config_file="my/config.json")
        assert caught.value.file == "my/config.json"
        assert resolved(LLAMA | {key: 1}, allow_config_keys=[key]) == resolved(LLAMA)

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"clip_qkv": 8.0}, "clip_qkv is not known to the recipe: the language has no bounds on queries, keys"),
            ({"attention_chunk_size": 64}, "attention_chunk_size is .*: the language has no attention in chunks"),
            ({"mamba_chunk_size": 64}, "mamba_chunk_size is .*: the language has no convolution or recurrent state"),
        ],
    )
    def test_a_key_of_what_the_language_lacks_says_so(self, config: dict[str, Any], said: str) -> None:
        """Otherwise a person might allow the key, and get wrong answers."""
        with pytest.raises(RecipeError, match=said):
            resolved(LLAMA | config)

    @pytest.mark.parametrize(
        "config", [{"clip_qkv": None}, {"use_conv": False}, {"kv_lora_rank": 16}, {"mask_token_id": 3}]
    )
    def test_a_key_of_anything_else_is_only_unknown(self, config: dict[str, Any]) -> None:
        with pytest.raises(RecipeError, match="is not known to the recipe") as caught:
            resolved(LLAMA | config)
        assert "the language has no" not in str(caught.value)

    def test_all_are_listed_at_once_with_suggestions(self) -> None:
        with pytest.raises(RecipeError) as caught:
            resolved(LLAMA | {"atention_bias": True, "qk_norm": True, "rope_interleaved": True})
        message = str(caught.value)
        assert "atention_bias is not known to the recipe; did you mean 'attention_bias'?" in message
        assert "qk_norm is not known" in message
        assert "rope_interleaved is True: features are rotated in another order; only false" in message
        assert "allow_config_keys" in message

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("is_encoder_decoder", True),
            ("is_encoder_decoder", 0),
            ("add_cross_attention", True),
            ("cross_attention_hidden_size", 64),
            ("is_causal", False),
            ("is_causal", None),
            ("pruned_heads", {"0": [1]}),
            ("quantization_config", {"quant_method": "gptq"}),
            ("auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
            ("partial_rotary_factor", 0.5),
            ("partial_rotary_factor", True),
            ("sliding_window", 4096),
            ("per_layer_config", {"0": {"num_attention_heads": 2}}),
        ],
    )
    def test_a_key_with_one_harmless_value(self, key: str, value: Any) -> None:
        with pytest.raises(RecipeError, match=f"- {key} is .*only .* is known to change nothing"):
            resolved(LLAMA | {key: value})
        assert resolved(LLAMA | {key: value}, allow_config_keys=(key,)) == resolved(LLAMA)

    def test_harmless_values_pass(self) -> None:
        harmless = {
            "is_encoder_decoder": False,
            "add_cross_attention": False,
            "pruned_heads": {},
            "quantization_config": None,
            "auto_map": None,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
            "use_cache": False,
            "torch_dtype": "float16",
            "attention_dropout": 0.5,
            "temperature": 0.1,
            "id2label": {"0": "LABEL_0"},
        }
        assert resolved(LLAMA | harmless) == resolved(LLAMA)

    def test_a_key_inside_a_mapping(self) -> None:
        config = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "finetuned": True}}
        with pytest.raises(RecipeError, match="no key 'finetuned'"):
            resolved(config)
        scaled = LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
        assert resolved(config, allow_config_keys=["rope_scaling.finetuned"]) == resolved(scaled)

    def test_allowing_a_key_the_recipe_uses_drops_nothing(self) -> None:
        config = LLAMA | {"attention_bias": True, "rope_theta": 77.0}
        assert resolved(config, allow_config_keys=["attention_bias", "rope_theta"]) == resolved(config)
        assert resolved(config, allow_config_keys=[]) == resolved(config)

    @pytest.mark.parametrize("names", ["frobnicate", 5, None, [3], [None], b"ab", ["vocab_size", 1], iter(["x"])])
    def test_what_is_allowed_is_a_list_of_names(self, names: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"^allow_config_keys=.*: expected a list of key names$"):
            resolved(LLAMA | {"frobnicate": 1, "x": 2}, allow_config_keys=names)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("frobnicat", "no key 'frobnicat'; did you mean 'frobnicate'?"),
            ("rope_scaling.finetund", "no key 'rope_scaling.finetund'; did you mean 'rope_scaling.finetuned'"),
            ("rope_scaling.finetuned.x", "no key 'rope_scaling.finetuned.x'"),
            ("vocab_size.x", "no key 'vocab_size.x'"),
            ("", "no key ''"),
            (".", "no key '.'"),
        ],
    )
    def test_an_allowed_key_that_is_not_there_is_an_error(self, name: str, message: str) -> None:
        config = LLAMA | {"frobnicate": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "finetuned": True}}
        allowed = ["frobnicate", "rope_scaling.finetuned"]
        assert resolved(config, allow_config_keys=allowed)
        with pytest.raises(InvalidArgumentError) as caught:
            resolved(config, allow_config_keys=[*allowed, name], config_file="my/config.json")
        assert str(caught.value).startswith(f"allow_config_keys: my/config.json has {message}")

    def test_a_key_whose_name_has_a_dot(self, tmp_path: Path) -> None:
        assert resolved(LLAMA | {"transformers.js_config": {"dtype": "q4"}}) == resolved(LLAMA)
        dotted = LLAMA | {"other.config": {"x": 1}, "other": {"config": 2}}
        for refused, allowed in (("other.config", ["other"]), ("other", ["other.config"])):
            with pytest.raises(RecipeError, match=f"- {refused} is not known"):
                resolved(dotted, allow_config_keys=allowed)
        assert resolved(dotted, allow_config_keys=["other.config", "other"]) == resolved(LLAMA)
        recipe = small(tmp_path, ("model:\n", "ignores: {config: [other.config]}\nmodel:\n"))
        assert resolve(recipe, SMALL | {"other.config": {"x": 1}}) == resolve(recipe, SMALL)
        assert resolve(recipe, SMALL | {"other": {"config": 1}}) == resolve(recipe, SMALL)

    def test_a_mapping_and_a_key_in_it_may_both_be_allowed(self) -> None:
        config = LLAMA | {"extra": {"x": 1, "y": 2}}
        for allowed in (["extra", "extra.x"], ["extra.x", "extra"]):
            assert resolved(config, allow_config_keys=allowed) == resolved(LLAMA)

    def test_the_configuration_is_left_as_it_is(self) -> None:
        config = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}, "y": 2}
        before = json.dumps(config)
        resolved(config, allow_config_keys=["rope_scaling.x", "y"])
        assert json.dumps(config) == before


@pytest.mark.parametrize("config", [None, [], "x", 3])
def test_a_configuration_is_a_mapping(config: Any) -> None:
    with pytest.raises(RecipeError, match="a configuration is a mapping"):
        resolve(named_recipe("llama"), config)


# ------------------------------------------------------------------------------------ recipes that do not fit

RECIPE = """\
name: small
architectures: [SmallForCausalLM]
config:
  vocab_size: vocab
  hidden_size: width
  num_layers: depth
  num_heads: heads
  num_kv_heads: heads
  head_dim: width / heads
  max_positions: none
model:
  embedding:
    tokens: embed
  layers:
    at: block.{layer}
    residual:
      attend:
        attention:
          qkv: {q: q, k: k, v: v, bias: false}
          output: {weight: o, bias: false}
      transform:
        norm: {kind: layer, weight: norm, eps: 0}
        mlp: {kind: plain, size: 4 * hidden_size, activation: "'relu'", up: up, down: down, bias: true}
  head: {weight: head, tied: false}
"""
SMALL = {"architectures": ["SmallForCausalLM"], "vocab": 10, "width": 8, "depth": 3, "heads": 2}


def small(tmp_path: Path, *changes: tuple[str, str]) -> Recipe:
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "small.yaml"
    file.write_text(text)
    return load_recipe(file)


def test_a_small_recipe(tmp_path: Path) -> None:
    spec = resolve(small(tmp_path), SMALL)
    assert spec.max_positions is None
    assert spec.num_parameters == 10 * 8 * 2 + 3 * (4 * 64 + 8 + 8 * 32 * 2 + 32 + 8)
    assert [tensor.names[0] for tensor in spec.tensors()][:6] == [
        *("embed.weight", "block.0.q.weight", "block.0.k.weight", "block.0.v.weight", "block.0.o.weight"),
        "block.0.norm.weight",
    ]


@pytest.mark.parametrize(
    ("changes", "line", "node", "message"),
    [
        ([("q: q", "q: k")], 19, "qkv.k", "'block.0.k.weight' is claimed twice, first by .*qkv.q"),
        ([("down: down", "down: up")], 23, "mlp.down", "'block.0.up.weight' is claimed twice"),
        ([("weight: head", "weight: embed")], 24, "head.weight", "'embed.weight' is claimed twice"),
        ([("model:\n", "aliases: {head: [x, embed]}\nmodel:\n")], 25, "head.weight", "'embed.weight' is claimed twice"),
        ([("tokens: embed", "tokens: embed.{layer}")], 13, "embedding.tokens", "only inside layers"),
        ([("head_dim: width / heads", "head_dim: width / layer")], 9, "config.head_dim", "no key 'layer'"),
        ([("heads\n  head_dim", "heads + 1\n  head_dim")], 8, "config.num_kv_heads", "cannot share 3 KV heads"),
        ([("4 * hidden_size", "4 * hidden_sise")], 23, "mlp.size", "no key 'hidden_sise'; did you mean 'hidden_size'"),
        ([("4 * hidden_size", "hidden_size / 3")], 23, "mlp.size", "must be an integer .* is 2.66"),
        ([("\"'relu'\"", "relu")], 23, "mlp.activation", "no key 'relu'.*quotes"),
        ([("eps: 0", "eps: vocab > 3")], 22, "norm.eps", "a finite number"),
        ([("eps: 0", "eps: 0, when: vocab")], 22, "norm.when", "true or false"),
        ([("tied: false", "tied: vocab")], 24, "head.tied", "true or false"),
        ([("  max_positions: none", "  max_positions: 0")], 10, "config.max_positions", "an integer from 1"),
        ([("          output:", "          scale: flag\n          output:")], 20, "attention.scale", "no key 'flag'"),
        (
            [("tied: false", "tied: true, project: {weight: out, size: 4}")],
            24, "model.head", "tied to an embedding of 8 features, but its `project` has size 4",
        ),
        (
            [("tokens: embed", "tokens: embed\n    project: {weight: into, size: 4}"), ("tied: false", "tied: true")],
            25, "model.head", "tied to an embedding of 4 features, but gets 8 .*lacks a `project` of size 4",
        ),
        (
            [("tokens: embed", "tokens: embed\n    positions: {weight: wpe, offset: 2, rows: 100}")],
            14, "positions.rows", "holds 98 positions .*max_positions is None",
        ),
        (
            [("tokens: embed", "tokens: embed\n    positions: {weight: wpe, offset: 2, rows: 100}"),
             ("max_positions: none", "max_positions: 99")],
            14, "positions.rows", "holds 98 positions .*max_positions is 99",
        ),
        ([("      attend:\n", "      attend:\n        when: false\n")], 14, "model.layers", "no layer has"),
    ],
)  # fmt: skip
def test_a_recipe_that_does_not_fit(
    tmp_path: Path, changes: list[tuple[str, str]], line: int, node: str, message: str
) -> None:
    recipe = small(tmp_path, *changes)
    with pytest.raises(RecipeError, match=message) as caught:
        resolve(recipe, SMALL)
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "small.yaml"), line)
    assert str(caught.value.node).endswith(node)


@pytest.mark.parametrize(
    ("change", "line", "node", "message"),
    [
        (("size: 4 * hidden_size", "size: intermediate_sise"), 23, "mlp.size", "did you mean 'intermediate_size'"),
        (("\"'relu'\"", "silu"), 23, "mlp.activation", "no key 'silu'.*quotes"),
        (("tied: false", 'tied: "yes"'), 24, "head.tied", "no key 'yes'"),
        (("head_dim: width / heads", "head_dim: width / 3"), 9, "config.head_dim", "an integer .* is 2.66"),
    ],
)
def test_a_mistake_in_an_expression_is_reported_before_the_keys_it_leaves_unread(
    tmp_path: Path, change: tuple[str, str], line: int, node: str, message: str
) -> None:
    config = SMALL | {"intermediate_size": 32, "hidden_act": "relu", "tie_word_embeddings": False, "head_width": 4}
    with pytest.raises(RecipeError, match=message) as caught:
        resolve(small(tmp_path, change), config)
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "small.yaml"), line)
    assert str(caught.value.node).endswith(node)
    assert "does not account" not in str(caught.value)
    with pytest.raises(
        RecipeError, match=r"- intermediate_size is not known.*\n- hidden_act .*\n- tie_word_embeddings "
    ):
        resolve(small(tmp_path), config)


@pytest.mark.parametrize(("recipe", "meant"), [("opt", "OPTForCausalLM"), ("mistral", "MistralForCausalLM")])
def test_a_recipe_for_another_architecture_says_so_where_it_fails(recipe: str, meant: str) -> None:
    config = {**LLAMA, "frobnicate": 1}
    with pytest.raises(RecipeError) as caught:
        resolve(named_recipe(recipe), config)
    assert caught.value.message.startswith(f"recipe {recipe!r} is for {meant}; this is LlamaForCausalLM: ")
    assert (caught.value.node is None) == (recipe == "mistral")  # an expression fails, or a key is left over
    with pytest.raises(RecipeError) as caught:
        resolved(config)
    assert "is for" not in str(caught.value)


def test_the_layer_is_known_inside_layers_only(tmp_path: Path) -> None:
    for change in (("head_dim: width", "head_dim: layer"), ("tied: false", "tied: false, scale: layer + 1")):
        with pytest.raises(RecipeError, match=r"no key 'layer'; `layer` exists only inside model\.layers$"):
            resolve(small(tmp_path, change), SMALL)
    recipe = small(tmp_path, ("head_dim: width / heads", "head_dim: layer | default(4)"))
    assert resolve(recipe, SMALL).head_dim == 4
    assert resolve(recipe, SMALL | {"layer": 2}).head_dim == 2


def test_a_node_that_is_absent_is_not_evaluated(tmp_path: Path) -> None:
    norm = ("eps: 0}", "eps: missing, when: false}")
    branch = ("transform:\n", "transform:\n        when: layer != 1\n")
    spec = resolve(small(tmp_path, norm, branch), SMALL)
    assert [len(layer.branches) for layer in spec.layers] == [2, 1, 2]
    assert spec.layers[0].branches[1].norm is None


def test_expressions_see_the_layer(tmp_path: Path) -> None:
    window = ("output:", "sliding_window: none if kinds[layer] == 'full' else 4\n          output:")
    config = SMALL | {"kinds": ["full", "window", "full"]}
    recipe = small(tmp_path, window)
    assert [part.sliding_window for part in resolve(recipe, config).attentions()] == [None, 4, None]
    with pytest.raises(RecipeError, match=r"kinds\[layer\]: index 2 is out of range for a list of 2"):
        resolve(recipe, config | {"kinds": ["full", "full"]})


def test_a_shadowed_key_does_not_count_as_used(tmp_path: Path) -> None:
    """``hidden_size`` in the model tree is the recipe's own, so the key in config.json is not read."""
    with pytest.raises(RecipeError, match="- hidden_size is not known"):
        resolve(small(tmp_path), SMALL | {"hidden_size": 9})


def test_keys_inside_a_mapping_count_one_by_one(tmp_path: Path) -> None:
    recipe = small(tmp_path, ("vocab_size: vocab", "vocab_size: text.vocab"))
    config = {key: value for key, value in SMALL.items() if key != "vocab"}
    assert resolve(recipe, config | {"text": {"vocab": 10}}).vocab_size == 10
    with pytest.raises(RecipeError, match=r"- text\.extra is not known to the recipe"):
        resolve(recipe, config | {"text": {"vocab": 10, "extra": 1}})
    with pytest.raises(
        RecipeError, match=r"- text\.d_conv is not known to the recipe: the language has no convolution"
    ):
        resolve(recipe, config | {"text": {"vocab": 10, "d_conv": 4}})
    ignoring = small(
        tmp_path,
        ("vocab_size: vocab", "vocab_size: text.vocab"),
        ("model:\n", "ignores: {config: [text.extra, z]}\nmodel:\n"),
    )
    assert resolve(ignoring, config | {"text": {"vocab": 10, "extra": 1}, "z": 2}).vocab_size == 10


def test_an_untied_head_may_be_wider_than_the_embedding(tmp_path: Path) -> None:
    narrow = small(tmp_path, ("tokens: embed", "tokens: embed\n    project: {weight: into, size: 4}"))
    spec = resolve(narrow, SMALL)
    assert spec.embedding.tokens.shape == (10, 4)
    assert spec.head.weight is not None
    assert spec.head.weight.shape == (10, 8)
    assert spec.flops_per_token(5) == 2 * (4 * 8 + 3 * (4 * 64 + 2 * 8 * 32) + 10 * 8) + 3 * 4 * 8 * 5


def test_a_selected_recipe_may_be_for_another_architecture(tmp_path: Path) -> None:
    assert resolve(small(tmp_path), SMALL | {"architectures": ["Other"]}).architecture == "Other"
    assert resolve(small(tmp_path), SMALL | {"architectures": None}).architecture == "SmallForCausalLM"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "value",
    [nested(5000), 10**5000, [10**5000], "x" * 10**6, float("inf"), {3: 4}],
    ids=["deep", "huge", "huge in a list", "long", "infinite", "numbered"],
)
@pytest.mark.parametrize(
    "key", ["hidden_size", "rope_scaling", "architectures", "quantization_config", "unknown", "hidden_act"]
)
def test_monstrous_values_are_refused_in_few_words(key: str, value: Any) -> None:
    config = LLAMA | {key: value}
    if key == "hidden_act" and isinstance(value, str):
        assert resolve(named_recipe("llama"), config)  # any text is accepted; the builder checks what it names
        return
    if key == "architectures":
        resolve(named_recipe("llama"), config)
        return
    with pytest.raises(RecipeError) as caught:
        resolve(named_recipe("llama"), config)
    assert len(str(caught.value)) < 700
