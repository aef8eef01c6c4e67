"""Writes Llama models with random weights for timing: ``python -m benchmarks.cpu.models DIRECTORY [NAME …]``.

Weights are drawn so that activations keep their size through the layers, attention is far from uniform (a wrong KV
cache shows in the tokens) and logits spread (greedy tokens are rarely won by a hair). The tokenizer is a byte-level BPE
of made-up words, since some engines do not start without one; workloads are token ids.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor

VOCAB_SIZE = 32_000
MAX_POSITIONS = 4096
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a Llama whose head is not its embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    dtype: torch.dtype

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the shapes of a layer's matrices, ``(out, in)``."""
        hidden, kv, ffn = self.hidden, self.kv_heads * self.head_dim, self.ffn
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }

    @property
    def layer_weights(self) -> int:
        """Returns how many numbers the matrices of all layers have."""
        return self.layers * sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def head_weights(self) -> int:
        return VOCAB_SIZE * self.hidden


SHAPES = {
    "llama-110m": Shape(768, 12, 12, 4, 2048, torch.float32),
    "llama-1.1b": Shape(2048, 16, 32, 8, 8192, torch.bfloat16),
    "llama-37m": Shape(384, 8, 6, 2, 1024, torch.float32),
    "llama-64m": Shape(512, 10, 8, 4, 1536, torch.float32),
}


def write_model(name: str, directory: Path) -> Path:
    """Writes ``directory/name`` with config, weights and tokenizer, unless it is complete already."""
    path = directory / name
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    (path / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    write_tokenizer(path)
    unfinished = path / "unfinished"
    save_file(weights(shape, seed=list(SHAPES).index(name)), unfinished, metadata={"format": "pt"})
    unfinished.rename(path / "model.safetensors")
    return path


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": str(shape.dtype).removeprefix("torch."),
    }


def weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Yields every tensor with its name in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    gains = {
        "self_attn.q_proj": 1.5,
        "self_attn.k_proj": 1.5,
        "self_attn.o_proj": 2 * (2 * shape.layers) ** -0.5,
        "mlp.down_proj": 2 * (2 * shape.layers) ** -0.5,
    }

    def matrix(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * deviation).to(shape.dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(shape.hidden, generator=generator)).to(shape.dtype)

    found = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, shape.hidden, 1.0)}
    for layer in range(shape.layers):
        for name, (rows, columns) in shape.matrices.items():
            deviation = gains.get(name, 1.0) * columns**-0.5
            found[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, deviation)
        found[f"model.layers.{layer}.input_layernorm.weight"] = norm()
        found[f"model.layers.{layer}.post_attention_layernorm.weight"] = norm()
    found["model.norm.weight"] = norm()
    found["lm_head.weight"] = matrix(VOCAB_SIZE, shape.hidden, 3 * shape.hidden**-0.5)
    return found


def write_tokenizer(path: Path) -> None:
    """Writes ``VOCAB_SIZE`` tokens; beyond the made-up words they are called ``<extra_…>``."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_made_up_text(), trainer)
    tokenizer.add_tokens([f"<extra_{each}>" for each in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(path / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", **names}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _made_up_text() -> list[str]:
    generator = random.Random(0)
    syllables = [first + rest for first in "bcdfghklmnprstvz" for rest in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(60_000)]
    return [" ".join(generator.choices(words, k=40)) for _ in range(20_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; by default all")
    options = parser.parse_args()
    for name in options.names or SHAPES:
        print(write_model(name, options.directory))


if __name__ == "__main__":
    main()
