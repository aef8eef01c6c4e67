"""The memory that an engine really holds, part by part, beside what its ledger says: exact sizes of its tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.compile.backends.modules import cpp as packed
from fastgen.compile.backends.modules import stored
from fastgen.compile.backends.modules.triton import Experts
from fastgen.compile.backends.triton import TritonOps
from fastgen.compile.ops.linear import cpp, triton
from fastgen.compile.weights.packed import PackedWeight
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.layers.rotary import Rotary
from fastgen.runtime.engine import Engine

# The modules that hold matrices.
MATRICES = (
    stored.StoredLinear,
    stored.StoredGroups,
    stored.StoredHeadMaps,
    packed.Linear,
    packed.Groups,
    packed.HeadMaps,
)


def held_bytes(engine: Engine) -> dict[str, int]:
    """By the names of the ledger's rows."""
    runner = engine.runner
    forward, inputs, sampler = runner.forward, runner.input_batch, runner.sampler
    held = {**_weights(runner.model), "KV cache": runner.kv_cache.size_bytes}
    static = vars(forward)
    if "_pool" in static:
        held["activations"] = static["_pool"].size_bytes
        held["results"] = static["_hidden"].nbytes + static["_logits"].nbytes
    held["block tables"] = inputs._flat_tables.nbytes
    held["inputs"] = _bytes([inputs._packed, *inputs._staging, inputs.sampled_ids])
    held["kernels' workspaces"] = _workspaces(runner.model)
    held["sampling"] = 0
    for kernel in (sampler.kernel, sampler.slots and sampler.slots._kernels):
        if kernel is not None:
            own = vars(kernel).values()
            tensors = [each for value in own for each in (value.values() if isinstance(value, dict) else [value])]
            flat = [each for value in tensors for each in (value if isinstance(value, tuple) else [value])]
            held["sampling"] += _bytes(each for each in flat if isinstance(each, Tensor))
    return held


def _weights(model: nn.Module) -> dict[str, int]:
    held = dict.fromkeys(("embedding and head", "matrices", "norms", "rotary tables"), 0)
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        size = _bytes(each for each in own if each is not None)
        for name in ("packed", "weight"):
            weight = getattr(module, name, None)
            size += weight.size_bytes if isinstance(weight, PackedWeight | QuantizedWeight) else 0
        if isinstance(module, stored.StoredTable | packed.PackedTable):
            held["embedding and head"] += size
        elif isinstance(module, MATRICES):
            held["matrices"] += size
        elif isinstance(module, Rotary):
            held["rotary tables"] += size
        else:
            held["norms"] += size
    return held


def _workspaces(model: Any) -> int:
    """Of tensors; what the C++ kernels hold by themselves nobody sees from here."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        kernel = getattr(module, "kernel", getattr(module, "_kernel", None))
        if isinstance(kernel, cpp.LinearKernel):
            found[id(kernel)] = kernel._workspace
        if isinstance(kernel, triton.LinearKernel):
            rooms = [kernel._whole, *(few._workspace for few in kernel._few.values())]
            found |= {id(room): room for room in rooms if room is not None}
        if isinstance(module, Experts):
            for cut in module._cuts.values():
                found |= {
                    id(each): each for each in (cut.sort.tiles.order, cut.sort.tiles.tiles, cut.sort.tiles.num_tiles)
                }
    ops = model.plan_step.__self__
    step_plans = ops.plans.values() if isinstance(ops, TritonOps) else ()
    plans = [each for plan in step_plans for each in vars(plan).values() if isinstance(each, Tensor)]
    return _bytes(found.values()) + _bytes(plans)


def _bytes(tensors: Any) -> int:
    """Of their memory, what they share once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


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
        before = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket is torch.ops.aten.set_
        ):  # laid over memory that is there; the interpreter of Triton does so
            return result
        for each in _tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
