"""Converts the random models for other engines: ``python -m benchmarks.cpu.convert gguf DIRECTORY llama-110m``.

    gguf      for llama.cpp; needs the package ``gguf``, and ``--quantize`` llama.cpp's program of that name
    openvino  for OpenVINO; needs ``--optimum-cli``, the program of the package ``optimum-intel``

Files are put beside the model, under the names that the adapters look for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.cpu.engines.protocol import ADAPTERS

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INT4 = ("--group-size", "64", "--ratio", "1.0", "--sym")


def write_gguf(model: Path, path: Path, float_type: str) -> None:
    """Writes a GGUF file. ``float_type`` is ``f32``, ``f16`` or ``bf16``; vectors stay fp32."""
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    _write_sizes(writer, config)
    _write_tokens(writer, json.loads((model / "tokenizer.json").read_text()), config["vocab_size"])
    types = {"f32": None, "f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}
    kept_as = types[float_type]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(model / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no dict)
            tensor = tensors.get_tensor(name).to(torch.float32)
            part = name.removesuffix(".weight").rsplit(".", 1)[-1]
            if part in heads:  # llama.cpp rotates neighbours, checkpoints halves
                rows = tensor.view(heads[part], 2, -1, tensor.shape[1])
                tensor = rows.transpose(1, 2).reshape(tensor.shape).contiguous()
            values = tensor.numpy()
            if kept_as is None or values.ndim == 1:
                writer.add_tensor(_gguf_name(name), values)
            else:
                writer.add_tensor(_gguf_name(name), gguf.quantize(values, kept_as), raw_dtype=kept_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokens(writer: Any, tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Writes the vocabulary. Tokens that are partial characters get made-up names, or the server would delay them."""
    import gguf

    names = {place: name for name, place in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        names[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    for place, name in names.items():
        if kinds[place] == gguf.TokenType.NORMAL and not name.replace("Ġ", "").isascii():
            names[place], kinds[place] = f"<byte_{place}>", gguf.TokenType.USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[place] for place in range(vocab_size)])
    writer.add_token_types([kinds[place] for place in range(vocab_size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def convert_gguf(model: Path, quantize: str | None) -> list[Path]:
    """Writes the files that the adapter looks for; without ``quantize`` only the float types."""
    written = []
    base = model.with_name(f"{model.name}.f32.gguf")
    for suffix in ADAPTERS["llama.cpp"].formats.values():
        path, kind = model.with_name(model.name + suffix), suffix.split(".")[1]
        if path.exists() or (kind.startswith("q") and quantize is None):
            continue
        if kind.startswith("q"):
            subprocess.run([str(quantize), str(base), str(path), kind.upper()], check=True)
        else:
            write_gguf(model, path, kind)
        written.append(path)
    return written


def convert_openvino(model: Path, optimum_cli: str) -> list[Path]:
    written = []
    for weight_format, suffix in ADAPTERS["openvino-genai"].formats.items():
        path = model.with_name(model.name + suffix)
        if path.exists():
            continue
        command = [optimum_cli, "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        command += ["--weight-format", weight_format, *(_INT4 if weight_format == "int4" else ()), str(path)]
        subprocess.run(command, check=True)
        written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gguf", "openvino"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("name")
    parser.add_argument("--quantize", help="llama.cpp's llama-quantize")
    parser.add_argument("--optimum-cli", default="optimum-cli")
    options = parser.parse_args()
    model = options.directory / options.name
    if options.kind == "gguf":
        written = convert_gguf(model, options.quantize)
    else:
        written = convert_openvino(model, options.optimum_cli)
    print(*written, sep="\n")


if __name__ == "__main__":
    main()
