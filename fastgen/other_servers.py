"""Hints for flags of vLLM, TGI and llama.cpp's server, and for arguments in Python called like them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

_ONE_DEVICE: Final = (
    "A model runs whole on the device that --device chooses, or --tensor-parallel shares each layer over several."
)
_NO_ADAPTERS: Final = "fastgen runs no adapters: merge them into the model's weights, and serve those."

_FLAGS: Final[Mapping[tuple[str, ...], str]] = {
    (
        "--gpu-memory-utilization",
        "--cuda-memory-fraction",
    ): "--kv-cache-memory sets the memory of the KV cache, such as 4GiB; by default the engine takes nine tenths of a "
    "GPU.",
    ("--tensor-parallel-size", "-tp", "--num-shard"): "Use --tensor-parallel.",
    ("--data-parallel-size", "-dp"): "Use --replicas.",
    ("--pipeline-parallel-size", "-pp", "--sharded", "--tensor-split", "--split-mode"): _ONE_DEVICE,
    ("--gpu-layers", "--n-gpu-layers", "-ngl", "--main-gpu"): _ONE_DEVICE,
    (
        "--api-key",
        "--api-keys",
    ): "--api-key-file FILE has the keys, or the environment variable FASTGEN_API_KEY has "
    "one: other users of the machine can read a command line.",
    ("--model", "--model-id", "-m", "--hf-repo"): "The model is the first argument, such as `fastgen serve MODEL`.",
    ("--served-model-name", "--alias"): "Use --name.",
    ("--max-num-batched-tokens", "--max-batch-prefill-tokens", "--batch-size"): "Use --token-budget.",
    ("--max-batch-size", "--parallel", "-np"): "Use --max-num-seqs.",
    ("--max-batch-total-tokens", "--num-gpu-blocks-override"): "--kv-cache-memory says how many tokens are held.",
    ("--max-total-tokens", "--ctx-size", "-c"): "Use --max-model-len.",
    ("--max-input-tokens", "--max-input-length"): "Use --max-prompt-tokens.",
    ("--max-concurrent-requests",): "--max-queued-requests limits what waits, --max-num-seqs what runs.",
    ("--quantization", "-q"): "--quantize quantizes plain weights while they are loaded; quantized checkpoints are not "
    "read.",
    ("--kv-cache-dtype", "--cache-type-k", "--cache-type-v"): "The KV cache has the dtype of --dtype.",
    ("--tokenizer", "--tokenizer-mode"): "The tokenizer is the checkpoint's own.",
    ("--chat-template",): "The template is the checkpoint's own: chat_template.jinja, or in tokenizer_config.json.",
    ("--chat-template-content-format",): "The texts of a message's parts are joined before the template reads them.",
    ("--jinja",): "Chats always go through the checkpoint's template; no flag is needed.",
    ("--reasoning-parser", "--reasoning-format"): "Reasoning stays in the text of an answer; nothing takes it out.",
    ("--load-format",): "The weights' files show their format: safetensors or .bin.",
    ("--hf-overrides", "--rope-scaling", "--rope-theta"): "config.json is taken as it is; change a copy of the model's "
    "directory.",
    ("--trust-remote-code",): "fastgen runs no code of a checkpoint; --recipe names a description of the model.",
    ("--enable-prefix-caching",): "Prefixes are cached unless --no-prefix-caching is given.",
    ("--enable-chunked-prefill",): "Prompts are computed in chunks unless --policy says otherwise.",
    ("--max-waiting-tokens",): "--policy says how prompts and answers share the steps.",
    ("--cuda-graphs",): "On a GPU steps are replayed as CUDA graphs; no flag is needed.",
    ("--flash-attn", "-fa"): "The kernels that --target chooses compute attention; no other flag is needed.",
    ("--validation-workers",): "The server itself decides where requests are checked and encoded.",
    ("--seed",): "Each request may have a `seed`; without one it draws its own.",
    ("--n-predict", "--max-tokens", "--max-new-tokens"): "Each request says how long its answer may be: `max_tokens` "
    "of OpenAI's endpoints, `max_new_tokens` in Python.",
    ("--generation-config", "--override-generation-config"): "The checkpoint's own generation_config.json gives the "
    "defaults of sampling; each request may state other values.",
    ("--task", "--runner", "--convert"): "Every model here generates text; no flag is needed.",
    ("--max-best-of",): "Each request gives its own `n`.",
    ("--max-logprobs", "--max-top-n-tokens"): "Each request asks for its own `logprobs`; the server's limit is fixed.",
    ("--root-path",): "Paths begin at /; let the proxy in front take its prefix away.",
    ("--uvicorn-log-level",): "--log-requests logs a line for each request, and --log-format says in which form.",
    ("--enforce-eager",): "--target torch computes without generated kernels.",
    ("--speculative-config", "--speculative-model", "--speculate"): "Use --speculative ngram, and --num-draft-tokens.",
    ("--num-speculative-tokens",): "Use --num-draft-tokens, with --speculative ngram.",
    ("--enable-auto-tool-choice",): "Tools need no flag, if the model's chat template has them.",
    ("--tool-call-parser",): "Use --tool-format.",
    ("--guided-decoding-backend", "--structured-outputs-config"): "Formats of answers need no flag.",
    ("--enable-lora", "--lora-modules", "--lora-adapters", "--lora"): _NO_ADAPTERS,
    ("--ssl-keyfile",): "Use --tls-key.",
    ("--ssl-certfile",): "Use --tls-cert.",
    ("--allowed-origins", "--cors-allow-origin"): "Use --allow-origin.",
    ("--hostname",): "Use --host.",
    ("--download-dir", "--huggingface-hub-cache"): "The environment variable HF_HOME names the hub's cache.",
    ("--disable-log-requests", "--disable-log-stats", "--enable-log-requests"): "Requests are logged only with "
    "--log-requests.",
    ("--threads", "-t"): "Use --num-threads.",
    # Flags of `vllm bench`.
    ("--dataset-name", "--dataset-path"): "Use --workload, such as trace:FILE or random:prompt=512,answer=128.",
    ("--random-input-len", "--random-output-len", "--random-range-ratio"): "Use --workload, such as "
    "random:prompt=512,answer=128,range_ratio=0.5.",
    ("--sharegpt-output-len", "--disable-shuffle"): "Use --workload trace:FILE, which keeps order and lengths.",
    ("--backend", "--endpoint-type"): "--base-url names a server, and --endpoint its path.",
    ("--result-dir", "--result-filename"): "Use --output.",
    ("--ignore-eos",): "With --workload, every answer has exactly the length that the workload asks for.",
    ("--percentile-metrics", "--metric-percentiles"): "--json has every latency with P50, P90, P95 and P99.",
    ("--swap-space", "--cpu-offload-gb"): "Nothing is swapped or offloaded: preempted requests are computed again.",
}
_NAMED: Final = r"(?<!\S)--[a-z-]+"
HINTS: Final = MappingProxyType({flag: advice for flags, advice in _FLAGS.items() for flag in flags})


def hint(flag: str, own: Collection[str]) -> str | None:
    """Returns what to use in place of another server's ``flag``, by a command that has the flags ``own``.

    ``None`` for any other flag, and where the command lacks a flag that would be named.
    """
    advice = HINTS.get(flag)
    return advice if advice is not None and all(named in own for named in named_flags(advice)) else None


def argument_hint(name: str, own: Collection[str]) -> str | None:
    """Returns the :func:`hint` for the argument ``name`` of a function in Python whose own arguments are ``own``."""
    advice = hint(_flag(name), {_flag(each) for each in own})
    return advice and re.sub(_NAMED, lambda flag: f"`{flag[0].removeprefix('--').replace('-', '_')}`", advice)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def named_flags(advice: str) -> list[str]:
    """Returns the flags of this program that a hint names."""
    return re.findall(_NAMED, advice)
