"""A rank reads its own pieces of a checkpoint and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastgen.compile.backends.reference import REFERENCE
from fastgen.models.builder import build
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.pieces import stored_piece
from fastgen.models.checkpoint.tensor_files import read_headers, stream_tensors
from fastgen.models.checkpoint.weights import arrange, load_weights
from fastgen.models.registry.registry import list_recipes
from fastgen.models.shard.shard import shard, shards
from fastgen.models.spec import ModelSpec, Rank
from tests.models.shards import small_spec, write_checkpoint

RECIPES = sorted(listed.recipe.name for listed in list_recipes())


def bytes_read(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    _, slots = build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    reported = []
    load_weights(
        checkpoint, slots, ignored=spec.ignored_tensors, progress=lambda done, total: reported.append((done, total))
    )
    done, total = reported[-1]
    assert done == total
    return total


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_reads_the_bytes_of_its_own_tensors(recipe: str, tmp_path: Path) -> None:
    spec = small_spec(recipe, num_kv_heads=4)
    checkpoint = write_checkpoint(spec, tmp_path)
    for own in shards(spec, 8):
        assert bytes_read(own, checkpoint) == sum(4 * math.prod(tensor.shape) for tensor in own.tensors())


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_streamed_is_the_piece_and_no_more(recipe: str, tmp_path: Path) -> None:
    spec = small_spec(recipe, num_kv_heads=4)
    checkpoint = write_checkpoint(spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for tensor in shard(spec, Rank(1, 8)).tensors():
        piece = stored_piece(tensor)
        if piece is None:
            continue
        read = checkpoint.read(tensor.names[0], piece.ranges)
        ((_, found),) = checkpoint.stream([read])
        assert found.nbytes == read.size_bytes == 4 * math.prod(tensor.shape)
        own = found if piece.layout is None else arrange(piece.layout, found)
        whole = stored[tensor.names[0]]
        if tensor.layout is not None:
            whole = arrange(tensor.layout, whole)
            whole = whole.flatten(0, -2) if len(tensor.shape) == 2 else whole.flatten()
        assert tensor.piece is not None
        assert torch.equal(own.reshape(tensor.shape), whole[tuple(slice(*ends) for ends in tensor.piece)])


def test_a_bin_file_gives_pieces_too(tmp_path: Path) -> None:
    spec = small_spec("gpt2", num_kv_heads=4)
    write_checkpoint(spec, tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(tmp_path / "model.safetensors"), file)
    checkpoint = Checkpoint(tmp_path, {}, read_headers(file))
    (tensor, *_) = (each for each in shard(spec, Rank(1, 2)).tensors() if each.layout and each.layout.part)
    piece = stored_piece(tensor)
    assert piece is not None
    read = checkpoint.read(tensor.names[0], piece.ranges)
    ((_, found),) = stream_tensors(file, [read], window_bytes=1 << 20)
    assert found.untyped_storage().nbytes() == read.size_bytes


def test_the_whole_checkpoint_must_fit_all_ranks(tmp_path: Path) -> None:
    """Tensors of other ranks are known, and an unknown one is refused by every rank."""
    spec = small_spec("opt", num_kv_heads=4)
    checkpoint = write_checkpoint(spec, tmp_path)
    own = shard(spec, Rank(1, 2))
    _, slots = build(own, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8, backend=REFERENCE)
    stranger = {**checkpoint.tensors, "stranger": next(iter(checkpoint.tensors.values()))}
    with pytest.raises(Exception, match="stranger"):
        load_weights(Checkpoint(tmp_path, {}, stranger), slots, ignored=own.ignored_tensors)
