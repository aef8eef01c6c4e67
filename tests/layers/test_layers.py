"""The layers: how they put ops together, shown on numbers small enough to follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.modules.composed import ActivatedLinear
from fastgen.compile.backends.modules.reference import Embedding as LookUp
from fastgen.compile.backends.modules.reference import Linear, Positions, Table
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.backends.shapes import ActivationShape, FeatureNorm, HeadShape, LinearShape, ModelShape, TableShape
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.layers.embedding import Embedding
from fastgen.layers.head import Head
from fastgen.layers.mlp import Mlp
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.residual import FlushAndNorm, FlushStream, ReadStream, Stream
from fastgen.layers.rotary import Rotary

CPU = torch.device("cpu")
OPS = REFERENCE.ops(ModelShape(torch.float32, CPU))


def fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def linear(in_features: int, *out_features: int, biased: bool = True, seed: int = 0) -> Linear:
    layer = OPS.linear(LinearShape(in_features, out_features, (biased,) * len(out_features)))
    fill(layer, seed)
    return layer


def table(num_rows: int, size: int, seed: int = 0) -> Table:
    layer = OPS.table(TableShape(num_rows, size))
    fill(layer, seed)
    return layer


def batch_of(
    input_ids: list[int], positions: list[int], token_source: list[int], sampled_ids: list[int]
) -> RaggedBatch:
    ids, where, source, sampled = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in (input_ids, positions, token_source, sampled_ids)
    )
    nothing = torch.empty(0)
    return RaggedBatch(
        input_ids=ids,
        positions=where,
        token_source=source,
        sampled_ids=sampled,
        cu_seqlens_q=nothing,
        seq_lens=nothing,
        block_tables=nothing,
        slot_mapping=nothing,
        logits_indices=nothing,
    )


@pytest.mark.parametrize("biased", [(True, True, True), (True, False, True), (False, False, False)])
def test_the_parts_of_a_fused_linear_answer_as_they_would_alone(biased: tuple[bool, ...]) -> None:
    sizes = (6, 2, 3)
    layer = OPS.linear(LinearShape(5, sizes, biased))
    assert (layer.bias is not None) == any(biased)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    expected = []
    for index, size in enumerate(sizes):
        weight, bias = layer.part(index)
        assert weight.shape == (size, 5)
        weight.copy_(torch.randn(size, 5, generator=torch.Generator().manual_seed(10 + index)))
        answer = x @ weight.T
        if biased[index]:
            assert bias is not None
            assert bias.shape == (size,)
            bias.copy_(torch.arange(size) + 100.0 * index)
            answer = answer + torch.arange(size) + 100.0 * index
        expected.append(answer)
    torch.testing.assert_close(layer(x), torch.cat(expected, dim=-1))


def test_an_embedding_projects_before_it_adds_positions() -> None:
    tokens, positions, project = table(10, 3), table(9, 4, seed=1), linear(3, 4, biased=False, seed=2)
    batch = batch_of([7, 0, 3], [0, 5, 1], [-1, 1, -1], [8, 9])
    layer = Embedding(LookUp(tokens, None, None), project=project, positions=Positions(positions, 2))
    ids, rows = [7, 9, 3], [2, 7, 3]
    torch.testing.assert_close(layer(batch), tokens.weight[ids] @ project.weight.T + positions.weight[rows])
    plain = Embedding(OPS.embedding(tokens))
    assert torch.equal(plain(batch), tokens.weight[ids])
    scaled = Embedding(OPS.embedding(tokens, scale=3.0, positions=table(9, 3, seed=4), offset=2))
    torch.testing.assert_close(scaled(batch), 3 * tokens.weight[ids] + table(9, 3, seed=4).weight[rows])


def test_a_head_projects_and_multiplies_with_its_table() -> None:
    hidden = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    rows, project = table(10, 3), linear(4, 3, seed=5)
    assert project.bias is not None
    expected = (hidden @ project.weight.T + project.bias) @ rows.weight.T
    torch.testing.assert_close(Head(OPS.head(rows, HeadShape()), project=project)(hidden), expected)
    square = table(10, 4)
    torch.testing.assert_close(Head(OPS.head(square, HeadShape()))(hidden), hidden @ square.weight.T)


def test_feed_forward_plain_and_gated() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(6))
    up, gate_up, down = linear(4, 6, seed=7), linear(4, 6, 6, seed=8), linear(6, 4, seed=9)

    def through(layer: Linear, x: Tensor) -> Tensor:
        assert layer.bias is not None
        return x @ layer.weight.T + layer.bias

    torch.testing.assert_close(
        Mlp(ActivatedLinear(up, OPS.activation(ActivationShape("relu", 6, gated=False))), down)(x),
        through(down, through(up, x).clamp(min=0)),
    )
    gate, linear_up = through(gate_up, x)[:, :6], through(gate_up, x)[:, 6:]
    torch.testing.assert_close(
        Mlp(ActivatedLinear(gate_up, OPS.activation(ActivationShape("silu", 6, gated=True))), down)(x),
        through(down, gate * torch.sigmoid(gate) * linear_up),
    )


def test_norms_have_only_the_parameters_they_are_given() -> None:
    x = torch.tensor([[3.0, -1.0, 2.0, 0.0]])
    for weight in (True, False):
        for bias in (True, False):
            norm = OPS.norm(FeatureNorm("layer", (4,), 0.5, weight=weight, bias=bias))
            assert (norm.weight is not None, norm.bias is not None) == (weight, bias)
            fill(norm, 4)
            expected = (x - 1) / (x.var(unbiased=False) + 0.5).sqrt()
            expected = expected * (1 if norm.weight is None else norm.weight) + (0 if norm.bias is None else norm.bias)
            torch.testing.assert_close(norm(x), expected)
    norm = OPS.norm(FeatureNorm("rms", (4,), 0.5))
    fill(norm, 4)
    torch.testing.assert_close(norm(x), x / (x.square().mean() + 0.5).sqrt() * norm.weight)


def test_a_rotary_table_turns_by_position_times_frequency() -> None:
    frequencies = torch.tensor([1.0, 0.25])
    rotary = Rotary(frequencies, attention_factor=1.5, max_positions=7, device=CPU)
    assert rotary.cos_sin.shape == (7, 4)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 9.0]]]).expand(2, 3, 5)
    found = apply_rotary(x, torch.tensor([0, 6], dtype=torch.int32), rotary.cos_sin)
    still = torch.tensor([1.5, 0.0, 0.0, 3.0, 9.0])
    one, two = torch.tensor(6.0), torch.tensor(1.5)
    turned = torch.stack([1.5 * one.cos(), -3.0 * two.sin(), 1.5 * one.sin(), 3.0 * two.cos(), torch.tensor(9.0)])
    torch.testing.assert_close(found, torch.stack([still, turned]).unsqueeze(1).expand(2, 3, 5))
    assert not list(rotary.parameters())
    assert not rotary.state_dict()


def test_what_is_pending_on_the_stream_is_added_by_the_next_reader() -> None:
    x, y = torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 2.0]])
    norm = FeatureNorm("rms", (2,), 0.5, weight=False)
    stream, total = Stream(x, y), x + 0.5 * y
    assert torch.equal(FlushStream(OPS.add(0.5))(stream), total)
    assert stream.pending is None
    assert torch.equal(stream.x, total)
    assert torch.equal(ReadStream()(stream), total)
    assert torch.equal(ReadStream(OPS.norm(norm))(stream), OPS.norm(norm)(total))
    stream = Stream(x, y)
    assert torch.equal(FlushAndNorm(OPS.add_norm(norm, 0.5))(stream), OPS.norm(norm)(total))
    assert stream.pending is None
    assert torch.equal(stream.x, total)
