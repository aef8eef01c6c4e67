"""Tensors that are stored in another layout, or shared, are loaded in as little memory as plain ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import cases
from tests.models.test_load_memory import LARGEST_BYTES, MIB, write_checkpoint

MEASURE = r"""
import json, re, sys
from pathlib import Path
import torch
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.weights import WeightSlot, load_weights
from fastgen.models.spec import Layout, NodeRef, TensorSpec

def high_water_bytes():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def slots_for(name, shape):
    rows, size = shape
    node = NodeRef("model", "memory.yaml", 1)
    if sys.argv[3] == "transposed":
        layout = Layout("in out", (("in", rows), ("out", size)))
        parts = [((size, rows), layout)]
    else:
        sizes = (("groups", rows // 64), ("part", 8), ("dim", 8), ("in", size))
        ends = ((0, 6), (6, 7), (7, 8))
        parts = [((rows // 8 * (b - a), size), Layout("(groups part dim) in", sizes, (a, b))) for a, b in ends]
    dtype = getattr(torch, sys.argv[4])
    return [
        WeightSlot(TensorSpec((name,), shape, node, layout, (rows, size)), torch.full(shape, 7, dtype=dtype))
        for shape, layout in parts
    ]

def load(directory):
    checkpoint = Checkpoint.open(directory)
    slots = [slot for name, header in checkpoint.tensors.items() for slot in slots_for(name, header.shape)]
    before = high_water_bytes()  # every target is resident by now
    load_weights(checkpoint, slots)
    return high_water_bytes() - before, slots

load(sys.argv[1])  # what the libraries need for themselves, once
extra_bytes, slots = load(sys.argv[2])
first = {slot.spec.names[0]: slot.target.flatten()[0].item() for slot in reversed(slots)}
print(json.dumps({"extra_bytes": extra_bytes, "first": first}))
"""


@pytest.mark.parametrize(
    ("layout", "dtype"),
    cases(
        [("fused", "float32"), ("fused", "bfloat16"), ("transposed", "bfloat16")],
        fast=[("transposed", "bfloat16")],
    ),
)
def test_loading_needs_about_the_largest_tensor_beyond_the_weights(tmp_path: Path, layout: str, dtype: str) -> None:
    write_checkpoint(tmp_path / "small", "safetensors", 8, MIB)
    first = write_checkpoint(tmp_path / "large", "safetensors", 12, LARGEST_BYTES)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), layout, dtype]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["first"] == pytest.approx(first, rel=2**-8 if dtype == "bfloat16" else 0)
    print(layout, dtype, f"{result['extra_bytes'] / LARGEST_BYTES:.2f} of the largest tensor")
    assert result["extra_bytes"] < 2 * LARGEST_BYTES
