"""InternLM2 in plain torch, shaped like a class of transformers, which has none: an independent reference.

After the InternLM2 report (Cai et al., 2024, arXiv:2403.17297): a Llama whose queries, keys and values are one matrix,
in which each group stores its queries, then its key, then its value.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_DEFAULTS: dict[str, Any] = {
    "model_type": "internlm2",
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "bias": True,
    "rope_theta": 10000,
    "rope_scaling": None,
}
_ACTIVATIONS = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": nn.functional.relu}


class InternLM2Config:
    """The content of ``config.json`` as attributes; ``rope_parameters`` is read as in transformers 5."""

    def __init__(self, **content: Any):
        self.content = {**copy.deepcopy(_DEFAULTS), **content}
        self.rope_parameters = dict(self.content.get("rope_parameters") or self.content["rope_scaling"] or {})
        kind = self.rope_parameters.setdefault("rope_type", self.rope_parameters.get("type") or "default")
        self.rope_parameters.setdefault("rope_theta", self.content["rope_theta"])
        if kind not in ("default", "linear", "dynamic"):
            raise ValueError(f"rotary scaling of kind {kind}")
        heads = self.content["num_attention_heads"]
        self.content["num_key_value_heads"] = self.content["num_key_value_heads"] or heads
        self.content["head_dim"] = self.content["head_dim"] or self.content["hidden_size"] // heads

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["content"][name]
        except KeyError:
            raise AttributeError(name) from None

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(**{key: value for key, value in content.items() if key in {*_DEFAULTS, "rope_parameters"}})

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.content)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Rotary(nn.Module):
    def __init__(self, dim: int, parameters: dict[str, Any]):
        super().__init__()
        stretch = parameters["factor"] if parameters["rope_type"] == "linear" else 1.0
        frequencies = parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim) / stretch
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates the features of ``x [1, T, heads, D]``, i against i + D/2."""
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: InternLM2Config):
        super().__init__()
        self.num_kv_heads, hidden = config.num_key_value_heads, config.hidden_size
        self.group = config.num_attention_heads // self.num_kv_heads
        self.head_dim = config.head_dim
        rows = (self.group + 2) * self.num_kv_heads * self.head_dim
        self.wqkv = nn.Linear(hidden, rows, bias=config.bias)
        self.wo = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=config.bias)

    def forward(self, x: Tensor, rotary: Rotary, cache: list[SimpleNamespace]) -> Tensor:
        beside = self.wqkv(x).unflatten(-1, (self.num_kv_heads, self.group + 2, self.head_dim))
        q, k, v = rotary(beside[..., :-2, :].flatten(-3, -2)), rotary(beside[..., -2, :]), beside[..., -1, :]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        cache.append(SimpleNamespace(keys=k, values=v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(seen.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: InternLM2Config):
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.w1, self.w3 = nn.Linear(hidden, size, bias=False), nn.Linear(hidden, size, bias=False)
        self.w2, self.act = nn.Linear(size, hidden, bias=False), _ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: InternLM2Config):
        super().__init__()
        self.attention_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Rotary, cache: list[SimpleNamespace]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Base(nn.Module):
    def __init__(self, config: InternLM2Config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.head_dim, config.rope_parameters)

    def forward(self, ids: Tensor, cache: list[SimpleNamespace]) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.rotary_emb, cache)
        return self.norm(x)


class InternLM2ForCausalLM(nn.Module):
    config_class = InternLM2Config
    base_model_prefix = "model"

    def __init__(self, config: InternLM2Config):
        super().__init__()
        self.config, self.model = config, Base(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.output.weight = self.model.tok_embeddings.weight

    @classmethod
    def _from_config(cls, config: InternLM2Config, attn_implementation: str = "") -> Self:
        return cls(config)

    def get_output_embeddings(self) -> nn.Linear:
        return self.output

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        content = {"architectures": [type(self).__name__], **self.config.content}
        (directory / "config.json").write_text(json.dumps(content))
        tied = {"output.weight"} if self.config.tie_word_embeddings else set()
        tensors = {name: x for name, x in self.state_dict().items() if name not in tied}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def forward(self, ids: Tensor) -> dict[str, Any]:
        cache: list[SimpleNamespace] = []
        logits = self.output(self.model(ids, cache))
        return {"logits": logits, "past_key_values": SimpleNamespace(layers=cache)}
