"""Layers whose every computation is a kernel on the ``cpp`` target: a tape of one does what the layer does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.choose import backend_of
from fastgen.compile.backends.cpp import CppBackend
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.weights.packed import WeightFormat
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.latent_attention import LatentAttention
from fastgen.layers.moe import Moe
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import LeftToReader
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.causal_lm import CausalLM
from fastgen.models.registry.registry import named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, HIDDEN, CACHED = 4, 6, 24, 3
CONFIG: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": 30, "num_hidden_layers": 1, "hidden_act": "silu"},
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
    **{"q_lora_rank": 20, "kv_lora_rank": 21, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7},
    **{"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 0, "moe_intermediate_size": 19},
}


@cache
def loader() -> KernelLoader:
    loader = KernelLoader(CppBuilder(cpp_arch(device.current("cpu"))))
    load_thread_pool(loader)
    return loader


@cache
def model(weight_format: WeightFormat) -> tuple[CausalLM, ModelSpec]:
    """One layer of latent attention and experts, a shared one among them."""
    spec = resolve(named_recipe("deepseek_v3"), CONFIG)
    backend = backend_of(loader(), max_rows=8)
    built, slots = build(
        *(spec,),
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        block_size=BLOCK_SIZE,
        backend=backend,
        weight_format=weight_format,
    )
    generator = torch.Generator().manual_seed(1)
    for slot in slots:
        slot.target.copy_(torch.randn(slot.spec.shape, generator=generator) / 4)
    backend.build()
    return built, spec


def module(model: CausalLM, kind: type[Any]) -> Any:
    (found,) = [each for each in model.modules() if isinstance(each, kind)]
    return found


def assert_replays(layer: Callable[[], Tensor], num_tokens: int, refill: Callable[[int], None]) -> None:
    """That a tape recorded on one input gives the eager bits of others."""
    pool, out = GraphPool(CPU, loader()), torch.empty(num_tokens, HIDDEN)

    def step() -> None:
        library_call(torch.add, layer(), 0, out=out)

    with torch.inference_mode():
        refill(0)
        graph = pool.capture("the layer", step)
        seen = []
        for seed in (1, 2):
            refill(seed)
            expected = layer().clone()
            refill(seed)
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
            seen.append(expected)
        assert not torch.equal(*seen)
        assert graph.difference(pool.record("again", step)) is None  # type: ignore[attr-defined]


by_size = pytest.mark.parametrize("num_tokens", [1, 5])
by_format = pytest.mark.parametrize("weight_format", ["fp32", "int8"])


@by_size
@by_format
def test_experts(weight_format: WeightFormat, num_tokens: int) -> None:
    moe: Moe = module(model(weight_format)[0], Moe)
    x = torch.empty(num_tokens, HIDDEN)

    def refill(seed: int) -> None:
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))

    chosen = []
    for seed in range(3):
        refill(seed)
        chosen.append(moe.router(x)[0])
    assert not torch.equal(chosen[0], chosen[1])  # a replay must follow other choices
    assert_replays(lambda: moe(x), num_tokens, refill)


@by_size
@by_format
def test_latent_attention(weight_format: WeightFormat, num_tokens: int) -> None:
    built, spec = model(weight_format)
    attention: LatentAttention = module(built, LatentAttention)
    output = module(built, LeftToReader).linear
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "dtype": torch.float32, "device": CPU}
    kv_cache = PagedKVCache(kv_groups(spec), kv_shapes(spec), backend=CppBackend(TargetFacts("cpp")), **sizes)
    x, nothing = torch.empty(num_tokens, HIDDEN), torch.empty(0, dtype=torch.int32)
    batch = RaggedBatch(
        **dict.fromkeys(("input_ids", "token_source", "logits_indices", "sampled_ids"), nothing),
        positions=torch.arange(CACHED, CACHED + num_tokens).int(),
        cu_seqlens_q=torch.tensor([0, num_tokens]).int(),
        seq_lens=torch.tensor([CACHED + num_tokens]).int(),
        block_tables=torch.zeros(1, 1, NUM_BLOCKS, dtype=torch.int32),
        slot_mapping=torch.zeros(1, num_tokens, dtype=torch.int64),
    )

    def refill(seed: int) -> None:
        """Other inputs, after other tokens, in other blocks."""
        generator = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator))
        kv_cache.layers[0].k.copy_(torch.randn(kv_cache.layers[0].k.shape, generator=generator))
        table = batch.block_tables[0, 0]
        table.copy_(torch.randperm(NUM_BLOCKS, generator=generator))
        places = batch.positions.long()
        batch.slot_mapping[0] = table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE

    assert_replays(lambda: output(attention(x, batch, kv_cache)), num_tokens, refill)
