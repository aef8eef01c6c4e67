"""A checkpoint under other names: its architecture, its modules and many keys of its configuration are renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

_MODULES: Final = (  # whole parts of names, in this order
    *(("model", "body"), ("transformer", "body"), ("gpt_neox", "body"), ("decoder", "stack"), ("layers", "blocks")),
    *(("h", "blocks"), ("self_attn", "attend"), ("self_attention", "attend"), ("attn", "attend")),
    *(("attention", "attend"), ("mlp", "ffn"), ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")),
    *(("o_proj", "wo"), ("out_proj", "wo"), ("dense", "wo"), ("query_key_value", "qkv"), ("qkv_proj", "wqkv")),
    *(("gate_proj", "w_gate"), ("up_proj", "w_up"), ("down_proj", "w_down"), ("gate_up_proj", "gate_and_up")),
    *(("embed_tokens", "tok_embeddings"), ("wte", "tok_embeddings"), ("word_embeddings", "tok_embeddings")),
    *(("embed_in", "tok_embeddings"), ("embed_out", "output"), ("lm_head", "output"), ("ln_1", "norm_1")),
    *(("input_layernorm", "norm_1"), ("post_attention_layernorm", "norm_2"), ("ln_2", "norm_2")),
    *(("block_sparse_moe", "ffn"), ("fc1", "widen"), ("fc2", "narrow"), ("wpe", "pos_emb")),
    *(("dense_h_to_4h", "widen"), ("dense_4h_to_h", "narrow"), ("fc_in", "widen"), ("fc_out", "narrow")),
    *(("q_norm", "query_norm"), ("k_norm", "key_norm"), ("ln_f", "norm_out")),
)
_KEYS: Final = {
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "num_hidden_layers": "depth",
    "n_layer": "depth",
    "num_attention_heads": "n_heads",
    "n_head": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "hidden_act": "act_fn",
    "hidden_activation": "act_fn",
    "activation_function": "act_fn",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "tie_word_embeddings": "weight_tying",
}


def rename(directory: Path, to: Path) -> Path:
    """Writes a renamed copy of the checkpoint to ``directory``."""
    to.mkdir(parents=True, exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    post_norms = any("post_feedforward" in name for name in tensors)  # these names give the position of norms
    names = {old: new for old, new in _MODULES if not (post_norms and "norm" in new)}
    renamed = {".".join(names.get(part, part) for part in name.split(".")): value for name, value in tensors.items()}
    assert len(renamed) == len(tensors)
    save_file(renamed, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    if config.get("hidden_activation") is not None:
        config.pop("hidden_act", None)
    config = {_KEYS.get(key, key): value for key, value in config.items()}
    config |= {"architectures": ["HerringForCausalLM"], "model_type": "herring"}
    (to / "config.json").write_text(json.dumps(config, indent=2))
    assert not {"self_attn", "q_proj", "mlp"} & {part for name in renamed for part in name.split(".")}
    return to
