"""The memory that loading takes beyond the weights themselves, measured in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fast import cases

MIB = 1 << 20
LARGEST_BYTES = 24 * MIB

MEASURE = r"""
import json, re, sys
from pathlib import Path
import torch
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.weights import WeightSlot, load_weights
from fastgen.models.spec import NodeRef, TensorSpec

def high_water_bytes():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(directory):
    checkpoint = Checkpoint.open(directory)
    node = NodeRef("model", "memory.yaml", 1)
    targets = {n: torch.full(h.shape, 7, dtype=getattr(torch, sys.argv[3])) for n, h in checkpoint.tensors.items()}
    slots = [WeightSlot(TensorSpec((name,), tuple(t.shape), node), t) for name, t in targets.items()]
    before = high_water_bytes()  # every target is resident by now
    load_weights(checkpoint, slots)
    return high_water_bytes() - before, targets

load(sys.argv[1])  # what the libraries need for themselves, once
extra_bytes, targets = load(sys.argv[2])
print(json.dumps({"extra_bytes": extra_bytes, "first": {n: t.flatten()[0].item() for n, t in targets.items()}}))
"""


def write_checkpoint(directory: Path, kind: str, num_tensors: int, largest_bytes: int) -> dict[str, float]:
    """float32 tensors in four shards, every third of the largest size, the others a quarter; returns first elements."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    weight_map, first = {}, {}
    generator = torch.Generator().manual_seed(1)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    for shard in range(4):
        name_of_file = f"{stem}-{shard + 1:05}-of-00004.{suffix}"
        tensors = {}
        for i in range(shard, num_tensors, 4):
            rows = largest_bytes // 4096 if i % 3 == 0 else largest_bytes // 16384
            tensors[f"t{i:03}"] = torch.randn(rows, 1024, generator=generator)
        if kind == "safetensors":
            save_file(tensors, directory / name_of_file)
        else:
            torch.save(tensors, directory / name_of_file)
        weight_map |= dict.fromkeys(tensors, name_of_file)
        first |= {name: tensor[0, 0].item() for name, tensor in tensors.items()}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return first


@pytest.mark.parametrize(
    ("kind", "dtype"),
    cases(
        [("safetensors", "float32"), ("safetensors", "bfloat16"), ("bin", "float32")],
        fast=[("safetensors", "bfloat16")],
    ),
)
def test_loading_needs_about_the_largest_tensor_beyond_the_weights(tmp_path: Path, kind: str, dtype: str) -> None:
    write_checkpoint(tmp_path / "small", kind, 8, MIB)
    first = write_checkpoint(tmp_path / "large", kind, 24, LARGEST_BYTES)
    size_bytes = sum(file.stat().st_size for file in (tmp_path / "large").iterdir())
    assert size_bytes > 250 * MIB

    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), dtype]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert result["first"] == pytest.approx(first, rel=2**-8 if dtype == "bfloat16" else 0)
    print(kind, dtype, f"{result['extra_bytes'] / LARGEST_BYTES:.2f} of the largest tensor")
    assert result["extra_bytes"] < 2 * LARGEST_BYTES
