"""The subject of a verification: a checkpoint loaded the normal way, traced through the modules of its recipe.

The modules are found by memory, not by name: the address of a slot shows which module, and which of its rows, each
tensor of the checkpoint goes to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules.reference import HeadMaps
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.builder import build
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec, TensorSpec
from fastgen.runtime.llm import LLM
from fastgen.runtime.loading import load
from fastgen.verify.reference import Prompts

MAX_MODEL_LEN = 128


@dataclass(frozen=True)
class Site:
    """A point of comparison: the module that holds ``tensor``, whose output has its rows at ``start .. stop - 1``."""

    tensor: TensorSpec
    module: nn.Module
    start: int
    stop: int | None
    input: Tensor
    output: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The module's name in the checkpoint, and its other spellings."""
        return tuple(name.rpartition(".")[0] for name in self.tensor.names)

    def probe(self, x: Tensor) -> Tensor:
        """Returns this site's output for the input ``x``."""
        out: Tensor = self.module(x)
        return out[..., self.start : self.stop]


@dataclass
class SubjectTrace:
    """The sites in execution order, cached keys and values by attention, ``hidden [T, H]`` and ``logits``."""

    sites: list[Site]
    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    hidden: Tensor
    logits: Tensor


def load_subject(
    directory: Path,
    recipe: Recipe,
    spec: ModelSpec,
    *,
    token_budget: int,
    max_num_seqs: int,
    target: str = "torch",
    device: str = "cpu",
    allow_config_keys: Sequence[str] = (),
) -> LLM:
    """Loads the checkpoint in the normal way, in fp32 with small blocks, by default on the CPU without kernels."""
    return load(
        directory,
        recipe=recipe,
        device=device,
        dtype="float32",
        target=target,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        block_size=4,
        allow_config_keys=allow_config_keys,
        max_model_len=min(MAX_MODEL_LEN, spec.max_positions or MAX_MODEL_LEN),
    )


@torch.inference_mode()
def trace_subject(llm: LLM, prompts: Prompts) -> SubjectTrace:
    """Runs one ragged step over all ``prompts``, which must differ and fit into the token budget of ``llm``."""
    model = llm.model
    recorder = _Recorder(prompts)
    # a map per head has no counterpart: its input is the queries, while references give it the latent
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, HeadMaps)}
    owners = {name: parts for name, parts in _owners(llm.spec).items() if name in modules}
    with recorder.on(model, {name: modules[name] for name in owners}):
        llm.generate([list(prompt) for prompt in prompts], temperature=0, max_new_tokens=1, ignore_eos=True)
    sites = [
        Site(part.tensor, modules[name], part.start, part.stop, given, made[..., part.start : part.stop])
        for name, given, made in recorder.calls
        for part in owners[name]
    ]
    return SubjectTrace(sites, recorder.keys, recorder.values, recorder.hidden, model.logits(recorder.hidden))


@dataclass(frozen=True)
class _Part:
    tensor: TensorSpec
    start: int
    stop: int | None


def _owners(spec: ModelSpec) -> dict[str, list[_Part]]:
    """Returns module name -> the checkpoint's weights that it holds, found on an empty build of the same spec."""
    model, slots = build(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=1)
    by_memory = {
        parameter.untyped_storage().data_ptr(): (name.rpartition(".")[0], name.rpartition(".")[2], parameter)
        for name, parameter in model.named_parameters()
    }
    owners: dict[str, list[_Part]] = {}
    for slot in slots:
        assert isinstance(slot.target, Tensor), "the reference packs nothing"
        name, field, parameter = by_memory[slot.target.untyped_storage().data_ptr()]
        if field != "weight" or slot.target.ndim < parameter.ndim:
            continue  # a bias goes with its weight; a single expert is not a module
        whole = slot.target.shape == parameter.shape
        start = 0 if whole else int(slot.target.storage_offset()) // parameter.stride(0)
        owners.setdefault(name, []).append(_Part(slot.spec, start, None if whole else start + slot.target.shape[0]))
    return {name: sorted(parts, key=lambda part: part.start) for name, parts in owners.items()}


class _Recorder:
    """Records the first step, with all rows in the order of ``prompts``."""

    def __init__(self, prompts: Prompts):
        self.prompts = [list(prompt) for prompt in prompts]
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        self.hidden = torch.empty(0)
        self._rows: Tensor | None = None

    @contextmanager
    def on(self, model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[None]:
        handles = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]
        handles += [module.register_forward_hook(self._called(name)) for name, module in modules.items()]
        self._done = False
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if self._done:
            return
        ends = args[0].cu_seqlens_q.tolist()
        ids = args[0].input_ids.tolist()
        pieces = [list(range(start, end)) for start, end in pairwise(ends) if end > start]
        found = {tuple(ids[row] for row in rows): rows for rows in pieces}
        self._slots = {tuple(ids[start:end]): slot for slot, (start, end) in enumerate(pairwise(ends)) if end > start}
        self._rows = torch.tensor([row for prompt in self.prompts for row in found[tuple(prompt)]])

    def _called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not self._done and self._rows is not None and len(output) >= len(self._rows):
                self.calls.append((name, args[0][self._rows].clone(), output[self._rows].clone()))

        return hook

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._done:
            return
        assert self._rows is not None
        self._done = True
        batch, cache = args
        self.hidden = output[self._rows].clone()
        for layer in cache.layers:
            self.keys.append([self._cached(layer.k, layer.group, batch, prompt) for prompt in self.prompts])
            self.values.append([self._cached(layer.v, layer.group, batch, prompt) for prompt in self.prompts])

    def _cached(self, pages: Tensor, group: int, batch: RaggedBatch, prompt: list[int]) -> Tensor:
        """Returns the entries for ``prompt``, ``[tokens, K, D]``, of the cache ``pages [B, P, K, D]``."""
        num_blocks = -(-len(prompt) // pages.shape[1])
        blocks = batch.block_tables[group, self._slots[tuple(prompt)], :num_blocks].long()
        return pages[blocks].flatten(0, 1)[: len(prompt)].clone()
