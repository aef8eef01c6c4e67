"""Data goes to a GPU from pinned memory: a copy from other memory waits for all that was launched before,
and nothing says so. Here tensors of a GPU that is not there have a shape and no contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.layers.kv_cache import KVShape, PagedKVCache
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler, _take, launch_prompt_logprobs

GPU = torch.device("cuda:0")


class Uploads(TorchDispatchMode):
    """Counts copies from the host to a GPU, and lets none wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and found.device.type == "cuda":
            assert given.get("non_blocking"), "the host waits for this copy"
            assert getattr(args[0], "was_pinned", False), "this copy is not from pinned memory"
            self.count += 1
        return found


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    def pin_memory(tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        pinned.was_pinned = True  # type: ignore[attr-defined]
        return pinned

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), Uploads() as seen:
        yield seen


def test_copies_of_other_memory_are_noticed(uploads: Uploads) -> None:
    with pytest.raises(AssertionError, match="the host waits"):
        torch.tensor([1], device=GPU)
    with pytest.raises(AssertionError, match="not from pinned memory"):
        torch.tensor([1]).to(GPU, non_blocking=True)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_blocks_are_copied_without_waiting(uploads: Uploads) -> None:
    sizes = {"num_blocks": 9, "block_size": 4}
    cache = PagedKVCache([0, 0], [KVShape(1, 8)], **sizes, dtype=torch.bfloat16, device=GPU)
    cache.copy_blocks(0, [1, 2, 3], [4, 5, 6])
    assert uploads.count == 2


def test_rows_are_taken_and_adjusted_without_waiting(uploads: Uploads) -> None:
    logits = torch.zeros(3, 20, device=GPU)
    assert _take(logits, [0, 2]).shape == (2, 20)
    assert uploads.count == 1
    sequences = [
        Request(0, [1, 2], SamplingParams(**asked), arrival_s=0.0).sequences[0]
        for asked in ({}, {"repetition_penalty": 1.5}, {"min_new_tokens": 3, "logit_bias": {4: 1.0}})
    ]
    assert Sampler([7])._adjusted(logits, sequences).device == GPU
    assert uploads.count > 5


def test_prompts_are_scored_without_waiting(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a GPU that is not there has nothing to be read: reading it is an error."""
    recorded = Mock()
    monkeypatch.setattr(torch.cuda, "Event", recorded)
    launch_prompt_logprobs(torch.zeros(3, 20, device=GPU), [1, 2, 3], 2)
    assert uploads.count == 1
    assert recorded.return_value.record.call_count == 2
    assert not recorded.return_value.synchronize.called
