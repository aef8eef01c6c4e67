"""Which products the library computes beside a start: those that the steps to be captured then need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends import library_start
from fastgen.compile.backends.choose import backend_for
from fastgen.compile.capture.recording import recording
from fastgen.compile.ops.linear import triton
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.builder import build, kv_groups, kv_shapes
from tests.models.test_launches import HOPPER, META, batch, published

SIZES, ROW_SIZES = (1, 16, 32, 64, 128, 192, 256), (1, 64, 96)


@dataclass
class Products:
    """Notes the library's products by their operands' sizes and dtypes."""

    found: list[tuple[Any, ...]] = field(default_factory=list)

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        pass

    def library_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if function in (torch.mm, torch.addmm):
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            self.found.append((function.__name__, *((*each.shape, each.dtype) for each in tensors)))


@pytest.mark.parametrize("widens", [True, False])
@pytest.mark.parametrize(
    ("name", "weight_format", "count"),
    [
        ("Llama-2-7b", None, 4),
        ("Qwen2-7B", None, 4),  # with biases
        ("gpt-j-6b", None, 4),  # a bias of the head
        ("Llama-2-7b", "int8_weight_only", 4),  # rows up to 192 by kernels
    ],
)
def test_what_steps_need_is_started_once(
    name: str, weight_format: WeightOnlyFormat | None, count: int, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "has_wide_products", lambda x: widens)
    spec, sizes = published(name), {"block_size": 64}
    backend = backend_for(HOPPER, max_rows=SIZES[-1], max_num_seqs=SIZES[-1])
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": META, "backend": backend, **sizes}
    model, _ = build(spec, max_model_len=64, weight_format=weight_format, **options)
    kv_cache = PagedKVCache(kv_groups(spec), kv_shapes(spec), num_blocks=1, **options)
    needed, started = Products(), Products()
    with torch.inference_mode():
        with recording(needed):
            for size in SIZES:
                model(batch(size, len(kv_shapes(spec))), kv_cache)
            for num_rows in ROW_SIZES:
                model.logits(torch.empty(num_rows, spec.hidden_size, dtype=torch.bfloat16, device=META))
        with recording(started):
            for product in library_start.library_products(model, SIZES, ROW_SIZES):
                product()
    assert set(started.found) == set(needed.found)
    assert len(started.found) == len(set(started.found)) >= count


class Beside:
    """Stands in for a GPU's calls, and notes what is done in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.done: list[str] = []
        self.device: Any = torch.device("cuda", 3)
        monkeypatch.setattr(torch.cuda, "device", self.current)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.done.append(f"waited for {device}"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.done.append("gave memory back"))
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", lambda: self.done.append("gave workspaces back"), raising=False
        )

    def current(self, device: torch.device) -> torch.inference_mode:
        self.done.append(f"on {device}")
        return torch.inference_mode()


def test_products_run_in_another_thread_while_the_block_does(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, is_in_block, has_begun = Beside(monkeypatch), threading.Event(), threading.Event()

    def product() -> None:
        has_begun.set()
        assert is_in_block.wait(10)
        beside.done.append(f"product, inference {torch.is_inference_mode_enabled()}")

    with library_start.started_beside([product], beside.device):
        assert has_begun.wait(10), "the product begins while the block runs"
        beside.done.append("block")
        is_in_block.set()
    last = ["gave workspaces back", "gave memory back"]
    assert beside.done == ["on cuda:3", "block", "product, inference True", "waited for cuda:3", *last]


def test_what_a_product_raises_ends_the_start_unless_the_block_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch)

    def fail() -> None:
        raise RuntimeError("the library says no")

    with pytest.raises(RuntimeError, match="the library says no"), library_start.started_beside([fail], beside.device):
        pass
    with pytest.raises(ValueError, match="a weight is missing"), library_start.started_beside([fail], beside.device):
        raise ValueError("a weight is missing")
