"""Compares the ledger with the memory of processes: each engine in a process of its own, over random models.

    python -m benchmarks.cpu.ledger_processes --output FILE

The KV cache is written from end to end, prompts of the greatest length are read in steps of the whole token budget, and
all sequences are sampled with filters and log-probabilities, those of prompts too. The peak memory, beyond that of a
process that has run another engine before, is compared with the ledger's total, and the bytes of tensors with each of
its rows. The C library retains some of the memory that a process frees.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu.results import about_this_run
from benchmarks.new_file import new_file

SIZES = {"vocab_size": 16_000, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "Llama",
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
        | {"num_key_value_heads": 4},
    ),
    "experts": (
        "Qwen3Moe",
        {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 512},
    ),
    "latent": (
        "DeepseekV3",
        {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8}
        | {"num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64}
        | {"qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 16, "n_shared_experts": 1}
        | {"num_experts_per_tok": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 384},
    ),
}
BUILDS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"target": "cpp", "dtype": "float32"}),
    ("dense", {"target": "cpp", "dtype": "bfloat16"}),
    ("dense", {"target": "cpp", "quantize": "int8"}),
    ("dense", {"target": "cpp", "quantize": "int4"}),
    ("dense", {"target": "torch", "dtype": "float32"}),
    ("dense", {"target": "torch", "dtype": "bfloat16"}),
    ("experts", {"target": "cpp", "dtype": "bfloat16"}),
    ("experts", {"target": "cpp", "quantize": "int4"}),
    ("latent", {"target": "cpp", "dtype": "bfloat16"}),
    ("latent", {"target": "torch", "dtype": "float32"}),
]


def save_model(name: str, directory: Path) -> Path:
    import torch
    import transformers

    prefix, sizes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
    model.save_pretrained(directory)
    return directory


def measure(model: str, build: dict[str, Any]) -> dict[str, Any]:
    """Measures an engine in this process."""
    import fastgen
    from benchmarks.cpu.ledger import held_bytes
    from benchmarks.cpu.memory import MemoryWatch

    target = {"target": build["target"]}
    with fastgen.load("tiny-llama", **target) as other:  # memory that libraries allocate once
        other.generate("Once upon a time", max_new_tokens=3)
    gc.collect()
    with MemoryWatch() as watch:
        llm = fastgen.load(model, kv_cache_memory="64MiB", **build)
        engine = llm._engine
        assert engine is not None
        for tensors in engine.runner.kv_cache.storage:
            for tensor in tensors:
                tensor.fill_(0.01)
        length = llm.config.max_model_len - 1
        llm.generate([[5 + index] * length for index in range(2)], max_new_tokens=1)
        fields: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "logprobs": 3, "prompt_logprobs": 3}
        llm.generate([[5 + index] * 40 for index in range(llm.config.max_num_seqs)], max_new_tokens=3, **fields)
    found = watch.found()
    grown = found["most"] - found["before"]
    return {
        "ledger": llm.ledger.as_json(),
        "held_bytes": held_bytes(engine),
        "grown_bytes": grown,
        "grown_over_ledger": round(grown / llm.ledger.total_bytes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_file)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "BUILD"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(measure(given.measure[0], json.loads(given.measure[1]))))
        return
    about = about_this_run(what="what processes take, beside what the memory ledger says", models=MODELS)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        models = {name: save_model(name, Path(directory) / name) for name in MODELS}
        for name, build in BUILDS:
            command = [sys.executable, "-m", "benchmarks.cpu.ledger_processes", "--measure"]
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [*command, str(models[name]), json.dumps(build)], check=True, capture_output=True, text=True,
                env=environment,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            results.append({"model": name, "build": build, **found})
            print(name, build, found["grown_over_ledger"], flush=True)
    if given.output is not None:
        given.output.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
