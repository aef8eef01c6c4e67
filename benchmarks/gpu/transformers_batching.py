"""Measures transformers' continuous batching on fastgen's work: a Llama-2-7B shape, prompts of 2600, answers of 60.

All requests are submitted at once, and the clock runs from there to the last token. Each engine first answers a few
requests that are not timed. Weights are random on both sides, ends of text are ignored, and block sharing between
prompts is off; otherwise transformers chooses its own settings.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
from inspect import signature
from typing import Any

import torch

from benchmarks.gpu.llama import LLAMA_2_7B, TOY, LlamaShape, kv_tokens_that_fit, llama_engine, submit
from benchmarks.gpu.measuring import Bench, Row, Rows, once
from benchmarks.gpu.workload import lengths

NUM_REQUESTS, MAX_NUM_SEQS, TOKEN_BUDGET = 24, 64, 2048
_NUM_UNTIMED = 4

Sizes = list[tuple[int, int]]


def measure(bench: Bench) -> Rows:
    shape = TOY if bench.toy else LLAMA_2_7B
    sizes = list(itertools.islice(lengths(shape, toy=bench.toy), 3 if bench.toy else NUM_REQUESTS))
    ours = bench.attempt("fastgen", lambda: run_fastgen(shape, sizes, bench))
    yield ours
    gc.collect()
    if not bench.toy:
        torch.cuda.empty_cache()
    theirs = bench.attempt("transformers", lambda: run_transformers(shape, sizes, bench))
    yield theirs
    if "error" not in ours and "error" not in theirs:
        yield {"case": "transformers over fastgen", "ratio": theirs["seconds"] / ours["seconds"]}


def run_fastgen(shape: LlamaShape, sizes: Sizes, bench: Bench) -> Row:
    kv_tokens = 300 if bench.toy else min(kv_tokens_that_fit(shape, bench.device), MAX_NUM_SEQS * shape.max_positions)
    slots, budget = (2, 4) if bench.toy else (MAX_NUM_SEQS, TOKEN_BUDGET)
    engine = llama_engine(shape, bench.device, kv_tokens=kv_tokens, max_num_seqs=slots, token_budget=budget)

    def run(some: Sizes) -> None:
        submit(engine, some, seed=1)
        while engine.has_work:
            engine.step()

    run(sizes[:_NUM_UNTIMED])
    return _row(once(lambda: run(sizes)), sizes)


def run_transformers(shape: LlamaShape, sizes: Sizes, bench: Bench) -> Row:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=False,
        dtype=shape.dtype,
        attn_implementation="sdpa",
    )
    with torch.device(bench.where):
        model = LlamaForCausalLM(config).to(shape.dtype).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2), **_settings(bench)
    )
    manager.start()
    try:
        _answer(manager, sizes[:_NUM_UNTIMED], shape.vocab, 0)
        return _row(once(lambda: _answer(manager, sizes, shape.vocab, 1)), sizes)
    finally:
        manager.stop(block=True, timeout=20)


def _settings(bench: Bench) -> dict[str, Any]:
    """Returns transformers' own settings, as far as this version has any, and small ones for a toy."""
    try:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
    except ImportError:
        return {}
    known = signature(ContinuousBatchingConfig).parameters
    block = "page_size" if "page_size" in known else "block_size"  # 5.17 calls it that
    small = {block: 16, "num_blocks": 64, "max_batch_tokens": 32, "use_async_batching": False}
    given = {"allow_block_sharing": False, **(small if bench.toy else {})}
    return {"continuous_batching_config": ContinuousBatchingConfig(**given)}


def _answer(manager: Any, sizes: Sizes, vocab_size: int, turn: int) -> None:
    """Submits the requests and waits for all of them."""
    draw, wanted = random.Random(1), {}
    for index, (length, num_new) in enumerate(sizes):
        prompt = [draw.randrange(vocab_size) for _ in range(length)]
        name = manager.add_request(prompt, request_id=f"{turn}-{index}", max_new_tokens=num_new, eos_token_id=-1)
        wanted[name] = num_new
    while wanted:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread of continuous batching died")
        elif result.error:
            raise RuntimeError(result.error)
        elif result.is_finished():
            num_new = wanted.pop(result.request_id)
            if len(result.generated_tokens) != num_new:
                raise RuntimeError(f"{len(result.generated_tokens)} tokens were generated, and {num_new} asked for")


def _row(seconds: float, sizes: Sizes) -> Row:
    return {
        "seconds": seconds,
        "requests_per_s": len(sizes) / seconds,
        "tokens_per_s": sum(map(sum, sizes)) / seconds,
        "requests": len(sizes),
    }
