"""Models built from specs by hand: what no shipped recipe mixes, and that what a spec does not use is not built."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgen.errors import RecipeError
from fastgen.layers.kv_cache import KVShape, PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.causal_lm import CausalLM
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NodeRef,
    NormSpec,
    PartSpec,
    RotarySpec,
    RouterSpec,
    TensorSpec,
)

NODE = NodeRef("model", "hand.yaml", 1)
HIDDEN, VOCAB, BLOCK = 12, 29, 4


class Hand:
    """Makes specs, every tensor under a name of its own."""

    def __init__(self) -> None:
        self.count = 0

    def tensor(self, *shape: int) -> TensorSpec:
        self.count += 1
        return TensorSpec((f"t{self.count}",), shape, NODE)

    def linear(self, size_in: int, size_out: int, *, bias: bool = False) -> LinearSpec:
        return LinearSpec(
            self.tensor(size_out, size_in), self.tensor(size_out) if bias else None, size_in, size_out, NODE
        )

    def norm(self, size: int = HIDDEN) -> NormSpec:
        return NormSpec("rms", size, 1e-5, self.tensor(size), None, NODE)

    def attention(self, kv_heads: int, dim: int, window: int | None = None, **features: Any) -> AttentionSpec:
        heads = 2 * kv_heads
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        q, k, v = (self.linear(HIDDEN, size) for size in sizes)
        output = self.linear(heads * dim, HIDDEN)
        rotary = RotarySpec(100.0, dim, None, NODE)
        return AttentionSpec(heads, kv_heads, dim, dim**-0.5, q, k, v, output, rotary, window, NODE, **features)

    def latent(self, **changes: Any) -> LatentAttentionSpec:
        fields = {
            "num_heads": 3,
            "nope_dim": 5,
            "rope_dim": 4,
            "v_head_dim": 7,
            "kv_rank": 6,
            "scale": 0.4,
            "q_down": None,
            "q_norm": None,
            "q": self.linear(HIDDEN, 27),
            "kv_down": self.linear(HIDDEN, 10),
            "kv_norm": self.norm(6),
            "k_up": self.linear(6, 15),
            "v_up": self.linear(6, 21),
            "output": self.linear(21, HIDDEN),
            "rotary": RotarySpec(100.0, 4, None, NODE, "interleaved"),
            "node": NODE,
        }
        return LatentAttentionSpec(**(fields | changes))

    def mlp(self, activation: str = "silu") -> MlpSpec:
        sizes = ((HIDDEN, 8), (HIDDEN, 8), (8, HIDDEN))
        return MlpSpec("gated", activation, *(self.linear(*size) for size in sizes), NODE)

    def moe(self) -> MoeSpec:
        router = RouterSpec(self.linear(HIDDEN, 4), 2, "softmax", True, 1.0, None, 1, 1, NODE)
        experts = tuple(self.mlp() for _ in range(4))
        return MoeSpec(router, experts, self.mlp(), self.linear(HIDDEN, 1), NODE)

    def branch(self, *parts: Any, **fields: Any) -> BranchSpec:
        values = {"output_norm": None, "scale": 1.0, "sum_norm": None} | fields
        return BranchSpec("b", self.norm(), tuple(PartSpec(None, part) for part in parts), node=NODE, **values)

    def model(self, *layers: tuple[BranchSpec, ...]) -> ModelSpec:
        return ModelSpec(
            recipe="hand",
            architecture="Hand",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_layers=len(layers),
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            max_positions=64,
            embedding=EmbeddingSpec(self.tensor(VOCAB, HIDDEN), None, None, NODE),
            layers=tuple(LayerSpec(index, branches) for index, branches in enumerate(layers)),
            final_norm=self.norm(),
            head=HeadSpec(self.tensor(VOCAB, HIDDEN), None, NODE),
            ignored_tensors=(),
        )


def mixed() -> ModelSpec:
    """Windows, KV shapes and a latent beside each other, two attentions in one branch, one layer without any."""
    hand = Hand()
    return hand.model(
        (hand.branch(hand.attention(1, 4), hand.attention(2, 4, 3)), hand.branch(hand.moe(), scale=0.5)),
        (hand.branch(hand.mlp()),),
        (hand.branch(hand.latent(), output_norm=hand.norm()),),
        (hand.branch(hand.attention(2, 4, 3)), hand.branch(hand.attention(1, 4, 3), sum_norm=hand.norm())),
    )


def built(spec: ModelSpec) -> CausalLM:
    model, slots = build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    assert sorted(slot.spec.names for slot in slots) == sorted(tensor.names for tensor in spec.tensors())
    generator = torch.Generator().manual_seed(0)
    for slot in slots:
        noise = torch.randn(slot.target.shape, generator=generator)
        slot.target.copy_(noise / slot.target.shape[-1] ** 0.5 if noise.ndim > 1 else noise * 0.3 + 1)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    return model


def run(model: CausalLM, spec: ModelSpec, ids: Tensor, chunks: list[int], padding: int) -> Tensor:
    """Logits of one sequence, chunk by chunk, in the second of three rows, over a cache that starts as NaN."""
    groups = kv_groups(spec)
    num_groups, num_blocks = len(set(groups)), -(-len(ids) // BLOCK)
    total = 1 + num_groups * num_blocks
    cpu = torch.device("cpu")
    cache = PagedKVCache(groups, kv_shapes(spec), num_blocks=total, block_size=BLOCK, dtype=torch.float32, device=cpu)
    for k, v in cache.storage:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    tables = torch.zeros(num_groups, 3, num_blocks, dtype=torch.int32)
    tables[:, 1] = (torch.randperm(total - 1) + 1).view(num_groups, num_blocks)
    out, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + chunk)
        slots = tables[:, 1].long()[:, positions // BLOCK] * BLOCK + positions % BLOCK
        zeros = torch.zeros(padding, dtype=torch.int64)
        batch = RaggedBatch(
            input_ids=torch.cat([ids[positions], zeros]).int(),
            token_source=torch.full((chunk + padding,), -1),
            positions=torch.cat([positions, zeros]).int(),
            cu_seqlens_q=torch.tensor([0, 0, chunk, chunk]),
            seq_lens=torch.tensor([0, start + chunk, 0]),
            block_tables=tables,
            slot_mapping=torch.cat([slots, zeros.expand(num_groups, -1)], dim=1),
            logits_indices=torch.arange(chunk),
            sampled_ids=torch.zeros(3, dtype=torch.int32),
        )
        out.append(model.logits(model(batch, cache)[:chunk]))
        start += chunk
    return torch.cat(out)


def test_groups_are_of_one_window_and_shape() -> None:
    spec = mixed()
    assert kv_groups(spec) == [0, 1, 2, 1, 3]
    assert kv_shapes(spec) == [KVShape(1, 4), KVShape(2, 4), KVShape(1, 10, 6), KVShape(1, 4)]


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_gives_the_same(seed: int) -> None:
    rng, spec = Random(seed), mixed()
    model = built(spec)
    ids = torch.tensor([rng.randrange(VOCAB) for _ in range(23)])
    whole = run(model, spec, ids, [23], 0)
    assert whole.isfinite().all()
    chunks: list[int] = []
    while sum(chunks) < 23:
        chunks.append(min(rng.choice((1, 1, 2, 5, 9)), 23 - sum(chunks)))
    torch.testing.assert_close(run(model, spec, ids, chunks, rng.choice((0, 3))), whole, atol=1e-5, rtol=1e-5)


def test_latent_attention_equals_its_expanded_form() -> None:
    """Keys and values of every token made of its latent, as the paper writes it."""
    hand = Hand()
    part = hand.latent()
    spec = hand.model((hand.branch(part),))
    model = built(spec)
    ids = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    found = run(model, spec, ids, [9], 0)

    branch = model.layers[0].branches[0]
    module = branch.parts[0].module
    stream = model.embedding.tokens.tokens.weight[ids]
    x = branch.read.norm(stream)
    q = (x @ module.q.weight.T).view(9, 3, 9)
    latent, shared = (x @ module.kv_down.weight.T).split([6, 4], dim=1)
    latent = module.attend.kv_norm(latent)

    def turned(heads: Tensor) -> Tensor:
        angles = torch.arange(9)[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4)
        pairs = torch.view_as_complex(heads.reshape(9, -1, 2, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2)

    keys = torch.cat([(latent @ module.attend.k_up.weight.T).view(9, 3, 5), turned(shared).expand(9, 3, 4)], dim=-1)
    values = (latent @ module.attend.v_up.weight.T).view(9, 3, 7)
    queries = torch.cat([q[..., :5], turned(q[..., 5:])], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.4
    probs = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    mixed_values = torch.einsum("hqk,khd->qhd", probs, values).flatten(1)
    stream = stream + mixed_values @ module.output.linear.weight.T
    expected = model.read_last.add_norm.norm(stream) @ model.head.logits.table.weight.T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_keys_and_values_of_a_latent_have_no_bias() -> None:
    hand = Hand()
    spec = hand.model((hand.branch(hand.latent(v_up=hand.linear(6, 21, bias=True))),))
    with pytest.raises(RecipeError, match=r"hand\.yaml:1: model: .*without a bias"):
        build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)


def test_an_unknown_activation_of_experts_is_named() -> None:
    hand = Hand()
    router = RouterSpec(hand.linear(HIDDEN, 1), 1, "softmax", True, 1.0, None, 1, 1, NODE)
    spec = hand.model((hand.branch(MoeSpec(router, (hand.mlp("gleu"),), None, None, NODE)),))
    with pytest.raises(RecipeError, match="activation 'gleu' is not known"):
        build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(**features: Any) -> Counter[str]:
    """Returns the calls of torch with which a model of one attention layer makes logits of five tokens."""
    hand = Hand()
    attention = hand.attention(1, 4, softcap=features.get("score_cap"))
    spec = hand.model((hand.branch(attention, scale=features.get("branch_scale", 1.0)),))
    embedding = replace(spec.embedding, scale=features.get("embedding_scale", 1.0))
    head = replace(spec.head, scale=features.get("head_scale", 1.0), softcap=features.get("head_cap"))
    spec = replace(spec, embedding=embedding, head=head)
    model = built(spec)
    with Calls() as calls:
        run(model, spec, torch.arange(5), [5], 0)
    return calls.names


@pytest.mark.parametrize(
    ("feature", "value", "added"),
    [
        ("branch_scale", 0.5, 1),
        ("embedding_scale", 0.5, 1),
        ("head_scale", 0.5, 1),
        ("score_cap", 2.0, 3),
        ("head_cap", 2.0, 3),
    ],
)
def test_what_is_not_used_costs_nothing(feature: str, value: float, added: int) -> None:
    """A factor is one call more than none, a cap three: neutral values leave no arithmetic behind."""
    assert (calls_of_a_step(**{feature: value}) - calls_of_a_step()).total() == added


def test_the_embedding_scale_is_rounded_to_the_dtype_of_the_model() -> None:
    """As Gemma does it: sqrt(3072) is 55.5 in bf16."""
    hand = Hand()
    spec = hand.model((hand.branch(hand.attention(1, 4)),))
    spec = replace(spec, embedding=replace(spec.embedding, scale=3072**0.5))
    for dtype, scale in ((torch.bfloat16, 55.5), (torch.float32, float(torch.tensor(3072**0.5)))):
        model, _ = build(spec, dtype=dtype, device=torch.device("cpu"), max_model_len=8)
        assert model.embedding.tokens.scale == scale
