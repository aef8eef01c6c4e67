"""Weights stored in another layout, or several in one tensor, and each way that can go wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.tensor_files import Read
from fastgen.models.checkpoint.weights import WeightSlot, load_weights
from fastgen.models.spec import Layout, NodeRef, TensorSpec

NODE = NodeRef("model.layers.attend.attention.qkv", "falcon.yaml", 21)
FUSED = "h.0.query_key_value.weight"


def write(directory: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    return Checkpoint.open(directory)


def slot(shape: Sequence[int], layout: Layout | None, stored: Sequence[int], *names: str) -> WeightSlot:
    spec = TensorSpec(names or (FUSED,), tuple(shape), NODE, layout, tuple(stored))
    return WeightSlot(spec, torch.full(tuple(shape), float("nan")))


def grouped_qkv(groups: int, queries: int, dim: int, size_in: int, *, bias: bool = False) -> list[WeightSlot]:
    """Falcon 40B: for each KV head its queries, then its key, then its value."""
    sizes = (("num_kv_heads", groups), ("part", queries + 2), ("head_dim", dim), ("in", size_in))
    pattern, stored = "(num_kv_heads part head_dim) in", (groups * (queries + 2) * dim, size_in)
    if bias:
        pattern, stored, sizes = "(num_kv_heads part head_dim)", stored[:1], sizes[:3]
    slots = []
    for part in ((0, queries), (queries, queries + 1), (queries + 1, queries + 2)):
        rows = groups * (part[1] - part[0]) * dim
        shape = (rows,) if bias else (rows, size_in)
        slots.append(slot(shape, Layout(pattern, sizes, part), stored))
    return slots


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_grouped_queries_keys_and_values(tmp_path: Path, seed: int, bias: bool) -> None:
    rng = Random(seed)
    groups, queries, dim, size_in = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6), rng.randint(1, 7)
    slots = grouped_qkv(groups, queries, dim, size_in, bias=bias)
    stored = torch.randn(slots[0].spec.stored_shape)
    load_weights(write(tmp_path, {FUSED: stored}), slots)

    rows = stored.numpy()
    stride = (queries + 2) * dim
    for each, first, count in zip(slots, (0, queries, queries + 1), (queries, 1, 1), strict=True):
        expected = [
            rows[g * stride + (first + h) * dim + i] for g in range(groups) for h in range(count) for i in range(dim)
        ]
        np.testing.assert_array_equal(each.target, np.array(expected))


def test_inputs_first_and_parts_within(tmp_path: Path) -> None:
    """GPT-2: ``in (part num_heads head_dim)``, three parts of one matrix that is stored transposed."""
    sizes = (("in", 5), ("part", 3), ("num_heads", 2), ("head_dim", 4))
    slots = [slot((8, 5), Layout("in (part num_heads head_dim)", sizes, (p, p + 1)), (5, 24)) for p in range(3)]
    plain = slot((7, 5), Layout("in out", (("in", 5), ("out", 7))), (5, 7), "fc")
    stored, other = torch.randn(5, 24), torch.randn(5, 7)
    load_weights(write(tmp_path, {FUSED: stored, "fc": other}), [*slots, plain])
    for part, each in enumerate(slots):
        assert torch.equal(each.target, stored[:, part * 8 : part * 8 + 8].T)
    assert torch.equal(plain.target, other.T)


def test_unequal_parts_of_an_axis_within_a_head(tmp_path: Path) -> None:
    """DeepSeek: each head's rows are some for the key, then some for the value."""
    sizes = (("num_heads", 3), ("part", 7), ("in", 2))
    slots = [
        slot((12, 2), Layout("(num_heads part) in", sizes, (0, 4)), (21, 2)),
        slot((9, 2), Layout("(num_heads part) in", sizes, (4, 7)), (21, 2)),
    ]
    stored = torch.randn(21, 2)
    load_weights(write(tmp_path, {FUSED: stored}), slots)
    by_head = stored.numpy().reshape(3, 7, 2)
    np.testing.assert_array_equal(slots[0].target, np.concatenate([head[:4] for head in by_head]))
    np.testing.assert_array_equal(slots[1].target, np.concatenate([head[4:] for head in by_head]))


def test_targets_may_be_rows_of_a_larger_matrix_in_16_bits(tmp_path: Path) -> None:
    specs = [each.spec for each in grouped_qkv(2, 3, 4, 5)]
    whole = torch.full((40, 5), float("nan"), dtype=torch.bfloat16)
    views = whole.split([24, 8, 8])
    stored = torch.randn(40, 5)
    load_weights(write(tmp_path, {FUSED: stored}), [WeightSlot(s, v) for s, v in zip(specs, views, strict=True)])
    by_group = stored.bfloat16().view(2, 5, 4, 5)
    assert torch.equal(
        whole, torch.cat([by_group[:, :3].reshape(24, 5), by_group[:, 3].reshape(8, 5), by_group[:, 4].reshape(8, 5)])
    )


def test_a_shared_tensor_is_read_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path, {FUSED: torch.randn(40, 5)})
    asked: list[str] = []
    stream = Checkpoint.stream

    def counted(self: Checkpoint, reads: Sequence[Read]) -> object:
        asked.extend(read.name for read in reads)
        return stream(self, reads)

    monkeypatch.setattr(Checkpoint, "stream", counted)
    reports: list[tuple[int, int]] = []
    load_weights(checkpoint, grouped_qkv(2, 3, 4, 5), progress=lambda done, total: reports.append((done, total)))
    assert asked == [FUSED]
    assert reports == [(800, 800)]


def test_a_second_spelling_must_hold_the_same(tmp_path: Path) -> None:
    names = ("transformer.wqkv", "wqkv")
    slots = [replace(each, spec=replace(each.spec, names=names)) for each in grouped_qkv(2, 3, 4, 5)]
    stored = torch.randn(40, 5)
    load_weights(write(tmp_path, {names[0]: stored, names[1]: stored.clone()}), slots)
    assert not torch.cat([each.target for each in slots]).isnan().any()
    other = stored.clone()
    other[-1, -1] += 1  # in the last part only
    with pytest.raises(CheckpointError, match=r"'wqkv' differs from 'transformer\.wqkv'"):
        load_weights(write(tmp_path, {names[0]: stored, names[1]: other}), slots)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    stored = torch.randn(40, 5)
    stored[39, 4] = value
    with pytest.raises(CheckpointError, match=FUSED):
        load_weights(write(tmp_path, {FUSED: stored}), grouped_qkv(2, 3, 4, 5))


def test_another_shape_is_told_as_it_is_stored(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {FUSED: torch.randn(36, 5), "fc": torch.randn(7, 5)})
    plain = slot((7, 5), Layout("in out", (("in", 5), ("out", 7))), (5, 7), "fc")
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, [*grouped_qkv(2, 3, 4, 5), plain])
    assert f"{FUSED}: found [36, 5], expected [40, 5], by {NODE}" in str(caught.value)
    assert "fc: found [7, 5], expected [5, 7]" in str(caught.value)
    assert str(caught.value).count(FUSED) == 1


def test_a_missing_tensor_is_listed_once(tmp_path: Path) -> None:
    slots = [*grouped_qkv(2, 3, 4, 5), *(slot((1,), None, (1,), f"b{i}") for i in range(3))]
    checkpoint = write(tmp_path, {f"b{i}": torch.ones(1) for i in range(3)})
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, slots)
    assert str(caught.value).count(FUSED) == 1
    assert f"{FUSED} [40, 5], needed by" in str(caught.value)


def wrong_parts() -> dict[str, list[WeightSlot]]:
    q, k, v = grouped_qkv(2, 3, 4, 5)

    def relaid(each: WeightSlot, **changes: object) -> WeightSlot:
        assert each.spec.layout is not None
        return replace(each, spec=replace(each.spec, layout=replace(each.spec.layout, **changes)))

    return {
        "overlap": [q, k, relaid(v, part=(3, 4))],
        "twice": [q, k, v, v],
        "another layout": [q, k, relaid(v, pattern="(part num_kv_heads head_dim) in")],
        "whole and part": [slot((40, 5), None, (40, 5)), q],
        "part and whole": [q, k, v, slot((40, 5), None, (40, 5))],
    }


@pytest.mark.parametrize("case", wrong_parts())
def test_what_is_claimed_twice(tmp_path: Path, case: str) -> None:
    with pytest.raises(RecipeError, match="claimed twice") as caught:
        load_weights(write(tmp_path, {FUSED: torch.randn(40, 5)}), wrong_parts()[case])
    assert (caught.value.file, caught.value.line) == (NODE.file, NODE.line)


@pytest.mark.parametrize(("left_out", "entry"), [(0, 0), (1, 3), (2, 4)])
def test_what_nobody_takes(tmp_path: Path, left_out: int, entry: int) -> None:
    slots = grouped_qkv(2, 3, 4, 5)
    del slots[left_out]
    with pytest.raises(RecipeError, match=f"nothing takes entry {entry} of the axis `part`"):
        load_weights(write(tmp_path, {FUSED: torch.randn(40, 5)}), slots)
    assert all(each.target.isnan().all() for each in slots)  # nothing half done
