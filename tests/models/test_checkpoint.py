"""Checkpoints: the same weights from every kind of file, and a clear error for each way a checkpoint can be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.checkpoint.checkpoint import Checkpoint, checkpoint_dtype, read_json_object
from fastgen.models.checkpoint.tensor_files import Read, read_headers, stream_tensors
from fastgen.models.checkpoint.weights import WeightSlot, load_weights
from fastgen.models.spec import NodeRef, TensorSpec

NODE = NodeRef("model.layers.attend.attention.qkv", "llama.yaml", 17)


def spec(*names: str, shape: Iterable[int]) -> TensorSpec:
    return TensorSpec(names, tuple(shape), NODE)


def slots_for(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, WeightSlot]:
    """Returns a slot for each tensor, filled with NaN so that an unfilled one shows."""
    return {
        name: WeightSlot(spec(name, shape=t.shape), torch.full(t.shape, float("nan"), dtype=dtype or t.dtype))
        for name, t in state.items()
    }


def load(directory: Path, slots: Mapping[str, WeightSlot], **options: object) -> None:
    load_weights(Checkpoint.open(directory), list(slots.values()), **options)  # type: ignore[arg-type]


def assert_filled(slots: Mapping[str, WeightSlot], state: Mapping[str, Tensor]) -> None:
    for name, slot in slots.items():
        assert torch.equal(slot.target, state[name].to(slot.target.dtype)), name


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def write(
    directory: Path, tensors: Mapping[str, Tensor], config: object = None, file: str = "model.safetensors"
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config if config is not None else {"architectures": ["X"]}))
    if file.endswith(".safetensors"):
        save_file(dict(tensors), directory / file)
    else:
        torch.save(dict(tensors), directory / file)
    return directory


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def state(llama: LlamaForCausalLM) -> dict[str, Tensor]:
    return dict(llama.state_dict())


@pytest.fixture(scope="module")
def sharded(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    llama.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture
def damaged(sharded: Path, tmp_path: Path) -> Path:
    """Returns a copy of the sharded checkpoint that a test may damage."""
    return Path(shutil.copytree(sharded, tmp_path / "damaged"))


def write_bin_shards(directory: Path, state: dict[str, Tensor], **how: bool) -> Path:
    directory.mkdir()
    names = list(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({name: state[name] for name in held}, directory / file, **how)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    return directory


# The same weights from every kind of file


def test_sharded_safetensors(sharded: Path, state: dict[str, Tensor]) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert {n: h.shape for n, h in checkpoint.tensors.items()} == {n: tuple(t.shape) for n, t in state.items()}
    slots, reports = slots_for(state), []
    load_weights(checkpoint, list(slots.values()), progress=lambda done, total: reports.append((done, total)))
    assert_filled(slots, state)
    total = sum(t.nbytes for t in state.values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) == len(state)


def test_single_safetensors(llama: LlamaForCausalLM, state: dict[str, Tensor], tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    slots = slots_for(state)
    load(tmp_path, slots)
    assert_filled(slots, state)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_bin_single_and_sharded(state: dict[str, Tensor], tmp_path: Path, zipped: bool) -> None:
    single = tmp_path / "single"
    single.mkdir()
    (single / "config.json").write_text("{}")
    torch.save(state, single / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    shards = write_bin_shards(tmp_path / "shards", state, _use_new_zipfile_serialization=zipped)
    for directory in (single, shards):
        slots = slots_for(state)
        load(directory, slots)
        assert_filled(slots, state)


def test_bin_of_parameters_shared_and_transposed(tmp_path: Path) -> None:
    shared = torch.randn(6, 4)
    table = {"a": torch.nn.Parameter(shared), "b": shared, "c": torch.randn(5, 3).t(), "d": torch.randn(7, 2)[::2]}
    directory = write(tmp_path / "x", table, file="pytorch_model.bin")
    slots = slots_for({name: tensor.detach() for name, tensor in table.items()})
    load(directory, slots)
    assert_filled(slots, {name: tensor.detach() for name, tensor in table.items()})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_conversion_is_that_of_torch(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    tensors = {
        "w": torch.randn(33, 7).to(stored),
        "empty": torch.empty(0, 4, dtype=stored),
        "scalar": torch.tensor(2.5),
    }
    slots = slots_for(tensors, dtype)
    load(write(tmp_path / "x", tensors), slots)
    assert_filled(slots, tensors)


def test_slots_may_be_rows_and_columns_of_one_tensor(tmp_path: Path) -> None:
    parts = {"q": torch.randn(6, 4), "k": torch.randn(2, 4), "v": torch.randn(2, 4), "transposed": torch.randn(3, 5)}
    fused, columns = torch.zeros(10, 4), torch.zeros(5, 3)
    targets = [*fused.split([6, 2, 2]), columns.t()]
    slots = {name: WeightSlot(spec(name, shape=parts[name].shape), t) for name, t in zip(parts, targets, strict=True)}
    load(write(tmp_path / "x", parts), slots)
    assert torch.equal(fused, torch.cat([parts["q"], parts["k"], parts["v"]]))
    assert torch.equal(columns, parts["transposed"].t())


def test_a_target_of_another_shape_than_its_spec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        WeightSlot(spec("w", shape=(4, 4)), torch.zeros(4, 1))


# The files that are read


def test_the_index_decides_and_consolidated_stays_unread(damaged: Path, state: dict[str, Tensor]) -> None:
    other = {name: tensor + 1 for name, tensor in state.items()}
    save_file(other, damaged / "model.safetensors")
    (damaged / "consolidated.safetensors").write_bytes(b"never opened")
    (damaged / "pytorch_model.bin").write_bytes(b"never opened")
    slots = slots_for(state)
    load(damaged, slots)
    assert_filled(slots, state)


def test_only_files_of_other_names(tmp_path: Path) -> None:
    directory = write(tmp_path / "x", {"w": torch.zeros(1)}, file="consolidated.safetensors")
    message = error_of(lambda: Checkpoint.open(directory))
    assert "consolidated.safetensors" in message
    assert "model.safetensors.index.json" in message
    (directory / "consolidated.safetensors").unlink()
    assert "contains none of the weight files" in error_of(lambda: Checkpoint.open(directory))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n "hidden_size": 3,\n "x": }', r"config\.json:3:7: is not valid JSON"),
        ('{"hidden_size": 3, "hidden_size": 4}', "'hidden_size' occurs more than once"),
        ('{"eps": NaN}', "NaN is not a JSON value"),
        ("[1, 2]", "contains a JSON list"),
        ("", r"config\.json:1:1"),
        ("[" * 100_000, "not valid JSON"),
        ('{"n": ' + "9" * 5000 + "}", "not valid JSON"),
        (b'{"x": "\xff"}', "not valid JSON"),
    ],
)
def test_config_is_strict_json(tmp_path: Path, text: str | bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert re.search(expected, error_of(lambda: Checkpoint.open(tmp_path)))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_link_to_weights_that_are_gone(tmp_path: Path, name: str) -> None:
    """It is reported even if other weight files of lower priority exist."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).symlink_to("../blobs/gone")
    if name != "pytorch_model.bin":
        torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    message = error_of(lambda: Checkpoint.open(tmp_path))
    assert message == f"{tmp_path / name}: is a link to ../blobs/gone, which does not exist; download it again"


def test_config_missing(tmp_path: Path) -> None:
    assert "config.json: cannot be read (No such file" in error_of(lambda: Checkpoint.open(tmp_path))
    assert read_json_object(write(tmp_path, {"w": torch.ones(1)}, {"a": 1}) / "config.json") == {"a": 1}


def spoil_index(directory: Path, spoil: Callable[[dict[str, object]], object]) -> None:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    spoil(content)
    index.write_text(json.dumps(content))


def test_missing_shard_is_named(damaged: Path) -> None:
    shard = sorted(damaged.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = error_of(lambda: Checkpoint.open(damaged))
    assert shard.name in message
    assert "1 of the" in message


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"])
def test_an_index_cannot_lead_elsewhere(damaged: Path, shard: str) -> None:
    spoil_index(damaged, lambda index: index["weight_map"].update({"lm_head.weight": shard}))  # type: ignore[attr-defined]
    message = error_of(lambda: Checkpoint.open(damaged))
    assert repr(shard) in message
    assert "lm_head.weight" in message


@pytest.mark.parametrize("weight_map", [None, {}, [], {"w": 3}, {"w": "model.bin"}, {"w": ""}])
def test_an_index_without_a_sound_weight_map(damaged: Path, weight_map: object) -> None:
    spoil_index(damaged, lambda index: index.update(weight_map=weight_map))
    assert "model.safetensors.index.json" in error_of(lambda: Checkpoint.open(damaged))


def test_an_index_that_names_a_tensor_twice(damaged: Path) -> None:
    index = damaged / "model.safetensors.index.json"
    shard = min(damaged.glob("model-*.safetensors")).name
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{shard}",'))
    assert "'lm_head.weight' occurs more than once" in error_of(lambda: Checkpoint.open(damaged))


def test_an_index_that_names_an_absent_tensor(damaged: Path) -> None:
    shard = min(damaged.glob("model-*.safetensors")).name
    spoil_index(damaged, lambda index: index["weight_map"].update({"ghost": shard}))  # type: ignore[attr-defined]
    assert f"ghost (in {shard})" in error_of(lambda: Checkpoint.open(damaged))


def test_a_shard_with_more_than_the_index_says(damaged: Path, state: dict[str, Tensor]) -> None:
    shard = min(damaged.glob("model-*.safetensors"))
    save_file(load_file(shard) | {"extra.inv_freq": torch.ones(3)}, shard)
    message = error_of(lambda: load(damaged, slots_for(state)))
    assert f"extra.inv_freq (in {shard.name})" in message
    slots = slots_for(state)
    load(damaged, slots, ignored=["*.inv_freq"])
    assert_filled(slots, state)


def test_a_tensor_that_is_in_two_shards(damaged: Path, state: dict[str, Tensor]) -> None:
    shard = min(damaged.glob("model-*.safetensors"))
    tensors = load_file(shard)
    name = next(n for n in state if n not in tensors)
    save_file(tensors | {name: torch.zeros_like(state[name])}, shard)
    assert f"{name} (in {shard.name})" in error_of(lambda: load(damaged, slots_for(state)))


# Strict in both directions


def test_one_error_lists_everything_that_does_not_fit(sharded: Path, state: dict[str, Tensor]) -> None:
    slots = slots_for(state)
    del slots["model.norm.weight"]
    slots["absent.bias"] = WeightSlot(TensorSpec(("absent.bias", "old.absent.bias"), (5,), NODE), torch.full((5,), 7.0))
    wrong = "model.layers.1.self_attn.k_proj.weight"
    slots[wrong] = WeightSlot(spec(wrong, shape=(8, 32)), torch.full((8, 32), 7.0))
    message = error_of(lambda: load(sharded, slots))
    assert "absent.bias or old.absent.bias [5], needed by llama.yaml:17: model.layers.attend.attention.qkv" in message
    assert "model.norm.weight" in message
    assert f"{wrong}: found [16, 32], expected [8, 32], by llama.yaml:17: model.layers" in message
    assert all(slot.target.isnan().all() or (slot.target == 7).all() for slot in slots.values()), "a weight was read"
    load(sharded, {n: s for n, s in slots_for(state).items() if n != "model.norm.weight"}, ignored=["model.norm.*"])


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    tensors = {f"extra.{i:03}": torch.ones(1) for i in range(57)} | {"w": torch.ones(1)}
    message = error_of(lambda: load(write(tmp_path / "x", tensors), slots_for({"w": torch.ones(1)})))
    assert "57 tensors are neither claimed nor ignored by the recipe" in message
    assert "extra.019" in message
    assert "extra.020" not in message
    assert "... and 37 more" in message


def test_a_checkpoint_of_another_architecture(tmp_path: Path, state: dict[str, Tensor]) -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    message = error_of(lambda: load(tmp_path, slots_for(state)))
    assert "does not look like ['OPTForCausalLM']" in message
    assert "model.decoder." in message
    assert "model.embed_tokens.weight" in message


def test_a_tensor_claimed_by_two_nodes(tmp_path: Path) -> None:
    directory = write(tmp_path / "x", {"w": torch.ones(2)})
    slots = {str(i): WeightSlot(spec("w", shape=(2,)), torch.zeros(2)) for i in range(2)}
    with pytest.raises(RecipeError, match=r"llama.yaml:17: model\.layers.*'w' is claimed twice"):
        load(directory, slots)


def test_alternative_spellings(tmp_path: Path) -> None:
    a, b = torch.randn(3, 2), torch.randn(3, 2)
    directory = write(tmp_path / "x", {"model.a": a, "transformer.b": b})
    slots = {
        n: WeightSlot(spec(f"model.{n}", f"transformer.{n}", shape=(3, 2)), torch.zeros(3, 2, dtype=torch.bfloat16))
        for n in "ab"
    }
    load(directory, slots)
    assert_filled(slots, {"a": a, "b": b})


@pytest.mark.parametrize("shape", [(1500, 1024), (7,), ()])
def test_a_tied_head_may_be_there_twice_when_equal(tmp_path: Path, shape: tuple[int, ...]) -> None:
    embedding = torch.randn(shape)

    def slots() -> dict[str, WeightSlot]:
        return {"e": WeightSlot(spec("embed", "lm_head", shape=shape), torch.zeros(shape))}

    both = {"embed": embedding, "lm_head": embedding.clone()}
    done: list[int] = []
    filled = slots()
    load(write(tmp_path / "equal", both), filled, progress=lambda bytes_done, total: done.append(total - bytes_done))
    assert_filled(filled, {"e": embedding})
    assert done[-1] == 0
    load(write(tmp_path / "head", {"lm_head": embedding}), filled := slots())
    assert_filled(filled, {"e": embedding})

    both["lm_head"].view(-1)[-1] += 1
    message = error_of(lambda: load(write(tmp_path / "differs", both), slots()))
    assert "'lm_head' differs from 'embed'" in message


# Damaged and hostile files


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        (b"<html>not found</html>" * 40, "download it again"),
        (bytes(4000), "download it again"),
        (b"PK\x03\x04" + bytes(range(256)) * 9, "download it again"),
    ],
    ids=["empty", "git-lfs", "html", "zeros", "zip-magic"],
)
def test_files_that_are_no_weights(tmp_path: Path, suffix: str, content: bytes, expected: str) -> None:
    file = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    directory = write(tmp_path / "x", {"w": torch.ones(2)}, file=file)
    (directory / file).write_bytes(content)
    message = error_of(lambda: Checkpoint.open(directory))
    assert message.startswith(str(directory / file))
    assert expected in message


@pytest.mark.parametrize("how", ["safetensors", "zip", "before-1.6"])
def test_truncated_anywhere(tmp_path: Path, how: str) -> None:
    file = "model.safetensors" if how == "safetensors" else "pytorch_model.bin"
    tensors = {f"layer.{i}.weight": torch.randn(20, 30) for i in range(5)}
    directory = write(tmp_path / "x", tensors, file=file)
    if how == "before-1.6":
        torch.save(tensors, directory / file, _use_new_zipfile_serialization=False)
    whole = (directory / file).read_bytes()
    lengths = [1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1, *random.Random(3).sample(range(len(whole)), 30)]
    for length in lengths:
        (directory / file).write_bytes(whole[:length])
        message = error_of(lambda: load(directory, slots_for(tensors)))
        assert message.startswith(str(directory / file)), length
    (directory / file).write_bytes(whole + b"x" * 11)
    if how == "safetensors":
        assert "longer than its header says" in error_of(lambda: Checkpoint.open(directory))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["safetensors", "zip", "before-1.6"])
def test_flipped_bytes_load_or_are_refused_by_name(tmp_path: Path, how: str) -> None:
    """Only a :class:`CheckpointError` is raised, wherever the damage is; most of it is in the headers."""
    file = "model.safetensors" if how == "safetensors" else "pytorch_model.bin"
    tensors = {f"layer.{i}.weight": torch.randn(4, 6) for i in range(4)}
    directory = write(tmp_path / "x", tensors, file=file)
    if how == "before-1.6":
        torch.save(tensors, directory / file, _use_new_zipfile_serialization=False)
    whole = (directory / file).read_bytes()
    refused = 0
    for seed in range(150):
        rng = random.Random(seed)
        spoilt = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            spoilt[rng.randrange(len(spoilt) if rng.random() < 0.3 else min(700, len(spoilt)))] = rng.randrange(256)
        (directory / file).write_bytes(spoilt)
        message = None
        try:
            load(directory, slots_for(tensors))
        except CheckpointError as error:
            message = str(error)
        except BaseException as error:
            pytest.fail(f"seed {seed}: {error!r}")
        assert message is None or str(directory) in message, f"seed {seed}"
        refused += message is not None
    assert refused > 30


class Hostile:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("how", ["zip", "before-1.6", "bare pickle"])
def test_a_pickle_that_would_run_code(tmp_path: Path, how: str) -> None:
    mark = tmp_path / "ran"
    table = {"w": torch.ones(2), "x": Hostile(mark)}
    directory = write(tmp_path / "x", {}, file="pytorch_model.bin")
    if how == "bare pickle":
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps(table, protocol=2))
    else:
        torch.save(table, directory / "pytorch_model.bin", _use_new_zipfile_serialization=how == "zip")
    message = error_of(lambda: load(directory, slots_for({"w": torch.ones(2)})))
    assert not mark.exists()
    assert "pytorch_model.bin: refused" in message
    assert "posix.system" in message or how == "bare pickle"


def test_a_bin_whose_tensors_have_no_numbers(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2, 3, device="meta")}, tmp_path / "pytorch_model.bin")
    header = read_headers(tmp_path / "pytorch_model.bin")["b"]
    for ranges in (None, (((0, 1),), ((0, 3),))):
        reads = [Read("b", header, ranges)]
        with pytest.raises(
            CheckpointError, match=r"model.bin: tensor 'b' has a shape and no numbers: it was saved from"
        ):
            list(stream_tensors(header.file, reads, window_bytes=100))


def test_a_pickle_that_is_exchanged_after_its_headers_were_read(tmp_path: Path) -> None:
    """Weights are read by a second load of the file, which runs no code either."""
    mark, good = tmp_path / "ran", {"w": torch.ones(2)}
    checkpoint = Checkpoint.open(write(tmp_path / "x", good, file="pytorch_model.bin"))
    torch.save({"w": torch.ones(2), "x": Hostile(mark)}, tmp_path / "x" / "pytorch_model.bin")
    message = error_of(lambda: load_weights(checkpoint, list(slots_for(good).values())))
    assert not mark.exists()
    assert "pytorch_model.bin: refused" in message


@pytest.mark.parametrize("table", [[torch.ones(1)], {"state_dict": {"w": torch.ones(1)}}, {"w": 3}, {1: torch.ones(1)}])
def test_a_bin_that_is_no_table_of_tensors(tmp_path: Path, table: object) -> None:
    directory = write(tmp_path / "x", {}, file="pytorch_model.bin")
    torch.save(table, directory / "pytorch_model.bin")
    assert "pytorch_model.bin" in error_of(lambda: Checkpoint.open(directory))


# Weights that cannot be valid


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "inf"), (float("-inf"), "inf")])
def test_weights_that_are_not_finite(tmp_path: Path, file: str, stored: torch.dtype, value: float, word: str) -> None:
    for place in (0, 131, 4999):
        tensors = {"good": torch.ones(3), "bad": torch.randn(50, 100).to(stored)}
        tensors["bad"].view(-1)[place] = value
        message = error_of(lambda t=tensors: load(write(tmp_path / "x", t, file=file), slots_for(t, torch.float32)))
        assert f"{file}: tensor 'bad' contains {word}" in message
        assert str(stored) in message


def test_weights_that_float16_cannot_hold(tmp_path: Path) -> None:
    largest = 65504.0
    for value, fits in ((largest, True), (-largest, True), (65519.0, True), (65520.0, False), (-1e5, False)):
        tensors = {"w": torch.tensor([1.0, value, 2.0])}
        slots = slots_for(tensors, torch.float16)
        directory = write(tmp_path / "x", tensors)
        if fits:
            load(directory, slots)
            assert_filled(slots, tensors)
        else:
            message = error_of(lambda d=directory, s=slots: load(d, s))
            assert "'w' reaches" in message
            assert "torch.float16 cannot hold" in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_dtypes_that_hold_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"good": torch.ones(3), "bad": torch.ones(4).to(dtype)}
    slots = slots_for(tensors, torch.float32)
    directory = write(tmp_path / "x", tensors)
    assert f"bad: {dtype} (in model.safetensors)" in error_of(lambda: load(directory, slots))
    load(directory, {"good": slots["good"]}, ignored=["bad"])


@pytest.mark.parametrize(
    ("config", "names", "word"),
    [
        ({}, ["w.qweight", "w.qzeros", "w.scales"], "qweight"),
        ({}, ["w.weight", "w.weight.absmax", "w.weight.quant_state.bitsandbytes__nf4"], "absmax"),
        ({"quantization_config": {"quant_method": "awq"}}, ["w.qweight"], "awq"),
        ({}, ["w.weight", "w.weight_scale_inv"], "weight_scale_inv"),
    ],
)
def test_quantized_checkpoints_are_recognized(tmp_path: Path, config: object, names: list[str], word: str) -> None:
    directory = write(tmp_path / "x", {name: torch.ones(2, dtype=torch.uint8) for name in names}, config)
    message = error_of(lambda: load(directory, slots_for({"w.weight": torch.ones(4)})))
    assert "quantized" in message
    assert word in message


def open_files_under(directory: Path) -> list[str]:
    handles = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by now, as the descriptor that listed them is
            handles.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [line for line in (*handles, *Path("/proc/self/maps").read_text().splitlines()) if str(directory) in line]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("fault", ["none", "nan", "misfit", "damaged", "interrupted"])
def test_no_file_stays_open(tmp_path: Path, file: str, fault: str) -> None:
    tensors = {name: torch.randn(1000) for name in "abc"}
    if fault == "nan":
        tensors["b"][5] = float("nan")
    directory = write(tmp_path / "x", tensors, file=file)
    if fault == "damaged":
        (directory / file).write_bytes((directory / file).read_bytes()[:-600])
    slots = slots_for(tensors if fault != "misfit" else {"a": torch.ones(2)})

    def interrupt(done: int, total: int) -> None:
        if fault == "interrupted":
            raise KeyboardInterrupt

    caught = None
    try:
        load(directory, slots, progress=interrupt)
    except (CheckpointError, KeyboardInterrupt) as error:
        caught = error  # keeps the traceback and all its frames
    assert (caught is None) == (fault == "none")
    assert open_files_under(directory) == []


# The dtype to run in


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({}, torch.float16),
        ({"torch_dtype": None}, torch.float16),
    ],
)
def test_checkpoint_dtype(tmp_path: Path, config: dict[str, object], expected: torch.dtype) -> None:
    tensors = {"many": torch.ones(100).half(), "few": torch.ones(10), "ids": torch.ones(999, dtype=torch.int64)}
    checkpoint = Checkpoint.open(write(tmp_path / "x", tensors, config))
    assert checkpoint_dtype(checkpoint.config, checkpoint) == expected


@pytest.mark.parametrize("config", [{"dtype": "float8_e4m3fn"}, {"dtype": 7}, {"dtype": ["float32"]}, {}])
def test_checkpoint_dtype_that_cannot_be_run(tmp_path: Path, config: dict[str, object]) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "x", {"w": torch.ones(2, dtype=torch.float64)}, config))
    assert "dtype" in error_of(lambda: checkpoint_dtype(checkpoint.config, checkpoint))
