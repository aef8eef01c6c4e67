"""The memory that an engine really holds, part by part, beside what its ledger says: exact sizes of its tensors."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.compile.capture.allocations import tensors_in
from fastgen.models.measure import weight_bytes
from fastgen.runtime.engine import Engine
from fastgen.runtime.memory.held import storage_bytes


def held_bytes(engine: Engine) -> dict[str, int]:
    """Returns the bytes of the engine's tensors by the names of the ledger's rows."""
    runner = engine.runner
    inputs, sampler, ops = runner.input_batch, runner.sampler, runner.model.ops
    weights = weight_bytes([runner.model])
    held = {
        "embedding and head": weights.tables,
        "matrices": weights.matrices,
        "norms": weights.norms,
        "rotary tables": weights.rotary,
        "unused ends of huge pages": weights.page_rests,
        "KV cache": storage_bytes(each for pair in runner.kv_cache.storage for each in pair),
        "block tables": storage_bytes(inputs.buffers.tables()),
        "inputs": storage_bytes(inputs.buffers.inputs()),
        "kernels' workspaces": storage_bytes(ops.workspaces()),
        "attention's parts": storage_bytes(ops.attention_parts()),
    }
    static = vars(runner.forward)
    if "_pool" in static:
        held["activations"] = static["_pool"].size_bytes
        held["results"] = storage_bytes([static["_hidden"], static["_logits"]])
    if sampler.kernel is not None:
        held["sampling"] = storage_bytes(sampler.kernel.tensors())
    if sampler.slots is not None:
        held["sampling"] = storage_bytes(sampler.slots._kernels.tensors()) - inputs.sampled_ids.nbytes
    return held


class AllocationPeak(TorchDispatchMode):
    """The most bytes that tensors made within took at once.

    With ``collects`` those are not counted that only wait for Python's garbage collector, as what Triton's interpreter
    has used does. That is slow unless :func:`gc.freeze` was called before.
    """

    def __init__(self, *, collects: bool = False) -> None:
        super().__init__()
        self.most = 0
        self._collects = collects
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._collects:
            gc.collect()
        if torch.is_inference_mode_enabled():  # where operations arrive that consist of others
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        before = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket is torch.ops.aten.set_
        ):  # laid over memory that is there; the interpreter of Triton does so
            return result
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result
