"""Measures what weight formats cost in quality: ``python -m benchmarks.quality.quantization --json FILE``.

It measures the perplexity of the built-in models on held-out text of the grammar that they were trained on, drawn with
another seed. For larger models, given by their directories, it measures how far the distribution moves at every
position of random prompts. It prints a page, ``docs/quantization.md``; ``--render FILE`` prints that of an earlier
file. Results in the file are not measured again, so that only new formats are.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.cpu.results import about_this_run
from benchmarks.new_file import new_file
from training.data import IGNORED, training_row

# ``dtype``, ``quantize`` and ``target`` of each; the others are compared with the first.
FORMATS = {
    "fp32": ("float32", None, "auto"),
    "bf16": ("bfloat16", None, "auto"),
    "int8_weight_only": ("float32", "int8_weight_only", "auto"),
    "int8": ("float32", "int8", "auto"),
    "int4": ("float32", "int4", "auto"),
    "fp8_weight_only": ("float32", "fp8_weight_only", "torch"),
    "int4_weight_only": ("float32", "int4_weight_only", "torch"),
}
BUILT_IN = ("tiny-llama", "tiny-mistral", "tiny-opt")
_ROW_TOKENS = 512
_RANDOM_PROMPTS, _RANDOM_TOKENS = 4, 32


def load(model: str | Path, weight_format: str) -> fastgen.LLM:
    dtype, quantize, target = FORMATS[weight_format]
    return fastgen.load(model, kv_cache_memory="256MiB", device="cpu", dtype=dtype, quantize=quantize, target=target)


def perplexity(llm: fastgen.LLM, num_rows: int) -> dict[str, float]:
    """Returns the perplexity over the tokens that the model was trained on; rows begin anywhere in a document."""
    total, count = 0.0, 0
    for row in range(num_rows):
        ids, targets = training_row(f"held-out/{row}", _ROW_TOKENS, llm.tokenizer)
        output = llm.generate(ids, max_new_tokens=1, temperature=0, prompt_logprobs=0)
        assert output.prompt_logprobs is not None
        for target, entry in zip(targets, output.prompt_logprobs[1:], strict=False):
            if target != IGNORED and entry is not None:
                total, count = total + entry[target], count + 1
    return {"perplexity": math.exp(-total / count), "tokens": count}


def distributions(llm: fastgen.LLM) -> Tensor:
    """Returns log-probabilities ``[positions, vocabulary]`` of the token after each position of random prompts."""
    generator = random.Random(0)
    vocab = llm.spec.vocab_size
    rows = []
    for _ in range(_RANDOM_PROMPTS):
        prompt = [generator.randrange(vocab) for _ in range(_RANDOM_TOKENS)]
        output = llm.generate(prompt, max_new_tokens=1, temperature=0, prompt_logprobs=vocab - 1)
        for entry in (output.prompt_logprobs or [])[1:]:
            assert entry is not None
            row = torch.empty(vocab)
            row[torch.tensor(list(entry))] = torch.tensor(list(entry.values()))
            rows.append(row)
    return torch.stack(rows)


def moved(reference: Tensor, found: Tensor) -> dict[str, float]:
    """``kl``: mean Kullback-Leibler divergence in nats. ``logit_error``: root of the mean squared difference of logits,
    over their standard deviation. ``same_first``: positions whose likeliest token is the same.
    """
    centred = [each - each.mean(-1, keepdim=True) for each in (reference, found)]
    return {
        "kl": float((reference.exp() * (reference - found)).sum(-1).mean()),
        "logit_error": float((centred[1] - centred[0]).square().mean().sqrt() / centred[0].std()),
        "same_first": float((reference.argmax(-1) == found.argmax(-1)).float().mean()),
        "positions": len(reference),
    }


def measure(random_models: Sequence[Path], num_rows: int, found: dict[str, Any]) -> dict[str, Any]:
    """Adds to ``found`` what it does not have yet."""
    found = {
        "about": about_this_run(torch=torch.__version__, fastgen=fastgen.__version__),
        "perplexity": {},
        "moved": {},
        **found,
    }
    for name in BUILT_IN:
        known = found["perplexity"].setdefault(name, {})
        for weight_format in [each for each in FORMATS if each not in known]:
            with load(name, weight_format) as llm:
                known[weight_format] = perplexity(llm, num_rows)
    for model in random_models:
        known = found["moved"].setdefault(model.name, {})
        with load(model, next(iter(FORMATS))) as llm:
            reference = distributions(llm)
        for weight_format in [each for each in FORMATS if each not in known]:
            with load(model, weight_format) as llm:
                known[weight_format] = moved(reference, distributions(llm))
    return found


def render(found: dict[str, Any], name: str) -> str:
    """Returns the page of a file that this command wrote; ``name`` is the file's."""
    about = found["about"]
    lines = [
        "# What weight formats cost in quality",
        "",
        f"Measured {about['date'][:10]} on {about['machine']} with fastgen {about['fastgen']}; written by"
        f" `python -m benchmarks.quality.quantization --render {name}`.",
        "",
        '`bf16` is `dtype="bfloat16"`. The other formats are `quantize=` over fp32. On `cpp` activations between'
        " matrices are fp32, whatever the dtype. If weights are in bf16 and kernels are built for `amx` or"
        " `avx512bf16`, inputs of matrices and attention are rounded to bf16, except for routers and latent"
        " attention. Kernels for other instruction sets widen the weights and round nothing. A CPU with bf16 dots"
        " and without a matrix unit takes `avx512bf16` or `avx512vnni`, whichever it [measures as the"
        " faster](kernels.md#products-of-bf16); `fastgen info` says which, and `FASTGEN_CPP_ARCH` in the environment"
        " pins it. The matrix unit of `amx` takes denormal numbers for zero and adds the products of bf16 in another"
        " order than `avx512bf16`: errors are of the same size, and bits differ."
        " Layers in `int8` and `int4` have the same bits on both.",
        "",
        "| `quantize=` | weights | activations | `target=` |",
        "|---|---|---|---|",
        "| `int8_weight_only` | 8 bits, a scale for each output | not quantized | `cpp`, `triton`, `torch` |",
        "| `fp8_weight_only` | 8-bit floats (e4m3), a scale for each output | not quantized | `triton`, `torch` |",
        "| `int4_weight_only` | 4 bits, a scale in fp16 for each 32 | not quantized | `triton`, `torch` |",
        "| `int8` | 8 bits, a scale for each output | 8 bits, a scale for each token | `cpp` |",
        "| `int4` | 4 bits, a scale in fp16 for each 32 | 8 bits, a scale for each 32 | `cpp` |",
        "",
        "Matrices are quantized, also the head, and the embedding if it is the head too. Norms, routers, positions, an"
        " embedding by itself and latent attention's maps of heads stay in the model's dtype. On `triton` and `torch`"
        " the weights of experts stay so too. Each tensor is quantized in pieces as it is read, so the unquantized and"
        " the quantized model are never held at once.",
        "",
        "On `triton`, kernels that read quantized weights multiply up to 64 rows of a step, if that was the fastest for"
        " the layer at the start ([tuning](kernels.md#tuning)), and up to 192 rows in pieces of 64. For more rows a"
        " layer's weights are dequantized into a buffer that all layers share, and the library multiplies. The ledger"
        " counts the buffer among the kernels' workspaces. `torch` computes the same in fp32 and is the reference. All"
        " of `triton` is proven interpreted and built ahead of time. Tests of these kernels passed on an H200; how fast"
        " they are was not measured.",
        "",
        "## Perplexity of the built-in models",
        "",
        f"The text is of the grammar that the models were trained on, drawn with another seed, in rows of {_ROW_TOKENS}"
        " tokens. The checkpoints are bf16 themselves. So `bf16` differs by the KV cache and by the rounding of"
        " activations, and not by its weights.",
        "",
        f"| model | tokens | {' | '.join(FORMATS)} |",
        "|---" * (len(FORMATS) + 2) + "|",
    ]
    for model, values in found["perplexity"].items():
        reference = values["fp32"]["perplexity"]
        cells = [f"{reference:.4f}"]
        for weight_format in list(FORMATS)[1:]:
            if weight_format not in values:
                cells.append("not measured")
                continue
            value = values[weight_format]["perplexity"]
            cells.append(f"{value:.4f} ({100 * (value / reference - 1):+.2f} %)")
        lines.append(f"| {model} | {values['fp32']['tokens']} | {' | '.join(cells)} |")
    if found["moved"]:
        lines += [
            "",
            "## Logits of a larger model",
            "",
            "Weights are random. Nothing was trained to bear rounding, and there are no outliers, so this is a rough"
            " guide, of one model and few positions. Each format is compared with fp32 at every position of random"
            " prompts: the mean Kullback-Leibler divergence, the root mean square error of the logits over their"
            " standard deviation, and the positions whose likeliest token stays the same.",
            "",
            "| model | format | divergence, nats | logit error | same first token |",
            "|---|---|---|---|---|",
        ]
    for model, values in found["moved"].items():
        for weight_format in list(FORMATS)[1:]:
            if (each := values.get(weight_format)) is None:
                continue
            lines.append(
                f"| {model} | {weight_format} | {each['kl']:.2g} | {each['logit_error']:.2%} |"
                f" {each['same_first']:.1%} of {each['positions']} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("random_models", nargs="*", type=Path, help="directories that benchmarks.cpu.models wrote")
    parser.add_argument("--rows", type=int, default=24, help=f"of {_ROW_TOKENS} tokens, for each built-in model")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--json", type=new_file, help="write what is measured to this file")
    which.add_argument("--render", type=Path, help="print the page of this file")
    options = parser.parse_args()
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        found = measure(options.random_models, options.rows, known)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        found = json.loads(options.render.read_text())
    print(render(found, str(options.json or options.render)), end="")


if __name__ == "__main__":
    main()
