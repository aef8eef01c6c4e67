"""Every recipe of a family that transformers knows claims the tensors that transformers saves, on drawn
configurations.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]
flag = st.booleans()


def shape(draw: Draw, *, multiple: int = 4) -> dict[str, Any]:
    """Draws numbers that most families have under the same names, with and without shared KV heads."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return {
        "vocab_size": draw(st.integers(3, 60)),
        "hidden_size": heads * multiple * draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.integers(8, 300)),
        "tie_word_embeddings": draw(flag),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def without(numbers: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in numbers.items() if key not in keys}


def falcon(draw: Draw) -> dict[str, Any]:
    numbers, new = shape(draw), draw(flag)
    parallel = True if new else draw(flag)
    return without(numbers, "intermediate_size", "num_key_value_heads") | {
        "num_kv_heads": draw(st.sampled_from([None, numbers["num_key_value_heads"]])),
        "new_decoder_architecture": new,
        "multi_query": draw(flag),
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": draw(st.sampled_from([None, 1, 2])) if new else draw(st.sampled_from([None, 1])),
        "alibi": draw(flag),
        "bias": draw(flag),
        "ffn_hidden_size": draw(st.sampled_from([None, 7])),
    }


def windowed(draw: Draw) -> dict[str, Any]:
    return {
        "use_sliding_window": draw(flag),
        "sliding_window": draw(st.sampled_from([None, 5])),
        "max_window_layers": draw(st.integers(0, 3)),
    }


def qwen3(draw: Draw) -> dict[str, Any]:
    return shape(draw) | windowed(draw) | {"head_dim": draw(st.sampled_from([2, 6])), "attention_bias": draw(flag)}


def experts(draw: Draw) -> dict[str, Any]:
    count = draw(st.integers(1, 5))
    return {"num_experts_per_tok": draw(st.integers(1, count)), "count": count}


def qwen3_moe(draw: Draw) -> dict[str, Any]:
    numbers, mixture = qwen3(draw), experts(draw)
    return without(numbers, "max_window_layers") | {
        "num_experts": mixture["count"],
        "num_experts_per_tok": mixture["num_experts_per_tok"],
        "moe_intermediate_size": draw(st.integers(1, 9)),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.sampled_from([[], [0], [1]])),
        "norm_topk_prob": draw(flag),
    }


def mixtral(draw: Draw) -> dict[str, Any]:
    mixture = experts(draw)
    return shape(draw) | {
        "num_local_experts": mixture["count"],
        "num_experts_per_tok": mixture["num_experts_per_tok"],
        "sliding_window": draw(st.sampled_from([None, 5])),
        "head_dim": draw(st.sampled_from([None, 6])),
    }


def gpt2(draw: Draw) -> dict[str, Any]:
    numbers = shape(draw)
    return {
        "vocab_size": numbers["vocab_size"],
        "n_embd": numbers["hidden_size"],
        "n_layer": numbers["num_hidden_layers"],
        "n_head": numbers["num_attention_heads"],
        "n_positions": numbers["max_position_embeddings"],
        "n_inner": draw(st.sampled_from([None, 7])),
        "scale_attn_weights": draw(flag),
        "scale_attn_by_inverse_layer_idx": draw(flag),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def gptj(draw: Draw) -> dict[str, Any]:
    return without(gpt2(draw), "scale_attn_weights", "scale_attn_by_inverse_layer_idx") | {"rotary_dim": 2}


def bloom(draw: Draw) -> dict[str, Any]:
    numbers = shape(draw)
    sizes = {"n_layer": numbers["num_hidden_layers"], "n_head": numbers["num_attention_heads"]}
    return sizes | {key: numbers[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}


def gpt_neox(draw: Draw) -> dict[str, Any]:
    others = {"use_parallel_residual": draw(flag), "attention_bias": draw(flag), "rotary_pct": 0.5}
    return without(shape(draw), "num_key_value_heads") | others


def deepseek(draw: Draw) -> dict[str, Any]:
    numbers = shape(draw)
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    top_groups = draw(st.integers(1, groups))
    return numbers | {
        "num_key_value_heads": numbers["num_attention_heads"],
        "q_lora_rank": draw(st.sampled_from([None, 5])),
        "kv_lora_rank": draw(st.integers(1, 9)),
        "qk_nope_head_dim": draw(st.integers(1, 5)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 3)),
        "v_head_dim": draw(st.integers(1, 7)),
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": top_groups,
        "num_experts_per_tok": draw(st.integers(1, top_groups * per_group)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.integers(1, 7)),
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "attention_bias": draw(flag),
    }


def plus(**strategies: st.SearchStrategy[Any]) -> Callable[[Draw], dict[str, Any]]:
    """Returns the common numbers and other drawn numbers."""
    return lambda draw: shape(draw) | {key: draw(each) for key, each in strategies.items()}


FAMILIES: dict[str, tuple[str, Callable[[Draw], dict[str, Any]]]] = {
    "falcon": ("Falcon", falcon),
    "qwen2": ("Qwen2", lambda draw: shape(draw) | windowed(draw)),
    "qwen3": ("Qwen3", qwen3),
    "qwen3_moe": ("Qwen3Moe", qwen3_moe),
    "phi": ("Phi", plus(qk_layernorm=flag)),
    "phi3": ("Phi3", plus(sliding_window=st.sampled_from([None, 5]))),
    "gemma": ("Gemma", plus(head_dim=st.sampled_from([2, 6]), attention_bias=flag)),
    "gemma2": ("Gemma2", plus(head_dim=st.sampled_from([2, 6]), attention_bias=flag, sliding_window=st.just(5))),
    "gpt2": ("GPT2", gpt2),
    "gpt_neox": ("GPTNeoX", gpt_neox),
    "gptj": ("GPTJ", gptj),
    "bloom": ("Bloom", bloom),
    "olmo2": ("Olmo2", plus(attention_bias=flag)),
    "cohere": ("Cohere", plus(use_qk_norm=flag, attention_bias=flag)),
    "granite": ("Granite", plus(attention_bias=flag, mlp_bias=flag, residual_multiplier=st.just(0.5))),
    "mixtral": ("Mixtral", mixtral),
    "deepseek_v2": (
        "DeepseekV2",
        lambda draw: deepseek(draw) | {"topk_method": draw(st.sampled_from(["greedy", "group_limited_greedy"]))},
    ),
    "deepseek_v3": ("DeepseekV3", deepseek),
    "smollm3": ("SmolLM3", lambda draw: shape(draw) | without(windowed(draw), "max_window_layers")),
}


def built(name: str, numbers: dict[str, Any]) -> Any:
    prefix = FAMILIES[name][0]
    suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    return getattr(transformers, prefix + suffix)(getattr(transformers, f"{prefix}Config")(**numbers))


def saved(model: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Returns ``config.json`` and the shapes of the tensors as transformers writes them."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        return json.loads((Path(directory) / "config.json").read_text()), shapes


def assert_same_tensors(spec: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> None:
    left = dict(shapes)
    for tensor in spec.tensors():
        present = [name for name in tensor.names if name in shapes]
        assert present, f"{tensor.names} is not saved"
        assert shapes[present[0]] == tensor.stored_shape, tensor.names
        for name in present:
            left.pop(name, None)
    ignored = [name for name in left if any(fnmatchcase(name, pattern) for pattern in spec.ignored_tensors)]
    assert set(left) == set(ignored)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_tensors_as_transformers_saves_them(name: str, data: st.DataObject) -> None:
    model = built(name, FAMILIES[name][1](data.draw))
    config, shapes = saved(model)
    spec = resolve(find_recipe(config), config)
    assert spec.recipe == name
    assert_same_tensors(spec, shapes)
    correction = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("correction_bias"))
    assert spec.num_parameters == model.num_parameters() + correction
    everything = json.loads(json.dumps(model.config.to_dict(), default=str)) | {
        "architectures": config["architectures"]
    }
    assert resolve(find_recipe(everything), everything) == spec
