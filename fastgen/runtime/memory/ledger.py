"""The memory ledger: what an engine takes of its device's memory, known before any of it is taken.

Every row is measured: what an engine makes is made on the ``meta`` device, and its bytes are counted. Most is held from
loading to closing; temporaries come and go, one phase after the other, so that the largest of them counts. Of a GPU
only its own memory is counted, and nothing that the driver takes for itself; of a CPU nothing that Python and its
libraries take. Compiled formats of answers are the exception: they come with requests, so their row is the most that
the engine keeps, and nothing of it is taken before the first request with a format.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from fastgen.arguments import shown_bytes
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.capture.allocations import META
from fastgen.compile.host.device import Device
from fastgen.compile.host.group_ranks import chosen_sums
from fastgen.compile.host.rank_memory import memory_bytes
from fastgen.compile.host.symmetric_memory import buffer_bytes
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.builder import kv_groups, kv_shapes
from fastgen.models.measure import ModelBuild, measured
from fastgen.runtime.memory.held import input_buffers, rank_memory_sizes, results, sampling_tensors, storage_bytes
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.memory.temporaries import Temporaries
from fastgen.runtime.sampling.kept_formats import most_kept_bytes
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS

# What the rows are, for people who have not read this file.
MEANINGS: Final = {
    "embedding and head": "the tables from token ids to features and back",
    "matrices": "the weights of attention and feed-forward layers",
    "norms": "the weights of norms",
    "rotary tables": "cosines and sines of all positions",
    "unused ends of huge pages": "weights begin at pages of 2 MiB, so the last page of each is partly empty",
    "KV cache": "keys and values of the tokens of running and cached requests",
    "activations": "intermediate results of the largest step",
    "results": "what steps leave for the host, and for the next step",
    "block tables": "which block of the KV cache holds which tokens",
    "inputs": "token ids, positions and lengths of a step",
    "sampling": "parameters and state of sampling, for each sequence",
    "kernels' workspaces": "scratch memory of kernels",
    "shared with other ranks": "what ranks of the model exchange; all ranks have it once together",
    "symmetric memory": "a buffer through which all ranks add, each with a GPU of its own",
    "attention's parts": "partial results of attention over long texts",
    "compiled formats": "formats of answers, at most; they come with requests, and beyond this the oldest goes",
    "temporaries": "comes and goes; the phase that takes most",
}
_FORMATS: Final = {"bf16_dot": "bf16, in pairs for dot products"}


@dataclass(frozen=True)
class LedgerRow:
    """``size_bytes`` of memory, and the arguments or the phase that they are ``of``, where they follow from some."""

    name: str
    size_bytes: int
    of: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.of}" if self.of else self.name


@dataclass(frozen=True)
class Ledger:
    """The memory of an engine, row by row; it prints as a table. ``device_bytes`` is the memory of the device."""

    rows: tuple[LedgerRow, ...]
    device_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    def size_bytes(self, name: str) -> int:
        """Returns the bytes of all rows of that ``name``; 0 if there are none."""
        return sum(row.size_bytes for row in self.rows if row.name == name)

    def arithmetic(self) -> str:
        """Returns the sum in one line."""
        terms = " + ".join(f"{row} {shown_bytes(row.size_bytes)}" for row in self.rows)
        return f"{terms} = {shown_bytes(self.total_bytes)}"

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "total_bytes": self.total_bytes, "device_bytes": self.device_bytes}

    def explained(self) -> str:
        """Returns the table with a third column, which says what each row is."""
        meanings = [MEANINGS.get(row.name, "") for row in self.rows] + ["", "all of it, free or not"]
        return "\n".join(
            f"{line}  {meaning}".rstrip() for line, meaning in zip(str(self).splitlines(), meanings, strict=True)
        )

    def __str__(self) -> str:
        lines = [(str(row), row.size_bytes) for row in self.rows]
        lines += [("total", self.total_bytes), ("memory of the device", self.device_bytes)]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {size / 2**20:10,.2f} MiB" for name, size in lines)


class MemoryModel:
    """Makes the ledgers of one model, built in one way, for engines of any sizes on ``device``."""

    def __init__(self, build: ModelBuild, device: Device):
        self.build, self.device = build, device
        self.num_kv_groups = len(kv_shapes(build.spec))
        self.model = measured(build)
        self._backend, self._temporaries = self.model.backend(), Temporaries(self.model)
        self._block_bytes = lru_cache(maxsize=64)(self._measure_block)

    def on(self, device: Device) -> MemoryModel:
        """Returns this model for another device of the same kind, with everything measured so far."""
        other = copy(self)
        other.device = device
        return other

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of a KV block: what its tokens leave in all layers that share it."""
        return self._block_bytes(block_size)

    def _measure_block(self, block_size: int) -> int:
        cache = PagedKVCache(
            kv_groups(self.build.spec),
            kv_shapes(self.build.spec),
            num_blocks=1,
            block_size=block_size,
            dtype=self.build.dtype,
            device=META,
            backend=self._backend,
        )
        return storage_bytes(each for pair in cache.storage for each in pair)

    def ledger(self, config: EngineConfig) -> Ledger:
        """Returns the ledger of an engine of these sizes."""
        rows = (*self._weight_rows(config), *self._held_rows(config), self._largest_temporary(config))
        return Ledger(tuple(row for row in rows if row.size_bytes), self.device.memory_bytes)

    def temporaries(self, config: EngineConfig) -> dict[str, int]:
        """Returns the most bytes that each phase of the engine takes and gives back, by the phase's name."""
        return self._temporaries.phases(config)

    def _weight_rows(self, config: EngineConfig) -> Iterator[LedgerRow]:
        sizes, matrix_format = self.model.weights, self.build.matrix_format
        yield LedgerRow("embedding and head", sizes.tables)
        yield LedgerRow("matrices", sizes.matrices, _FORMATS.get(matrix_format, matrix_format))
        yield LedgerRow("norms", sizes.norms)
        yield LedgerRow("rotary tables", sizes.rotary * config.max_model_len, f"max_model_len={config.max_model_len}")
        yield LedgerRow("unused ends of huge pages", sizes.page_rests)

    def _held_rows(self, config: EngineConfig) -> Iterator[LedgerRow]:
        budget, seqs = f"token_budget={config.token_budget}", f"max_num_seqs={config.max_num_seqs}"
        length, on_host = f"max_model_len={config.max_model_len}", self.device.kind == "cpu"
        yield LedgerRow("KV cache", config.num_blocks * self.block_bytes(config.block_size))
        if self._backend.steps != "called":
            # Temporaries of captured steps lie in one piece of memory, as large as the largest step needs.
            steps = self.model.forward(config.token_budget, config.max_cached_len, config.block_size).arena_bytes
            yield LedgerRow("activations", max(steps, self.model.head(config.max_rows).arena_bytes), budget)
            yield LedgerRow("results", storage_bytes(results(self.build, config)), f"{budget}, {seqs}")
        buffers = input_buffers(config)
        yield LedgerRow("block tables", storage_bytes(buffers.tables(on_host=on_host)), f"{seqs}, {length}")
        yield LedgerRow("inputs", storage_bytes(buffers.inputs(on_host=on_host)), budget)
        yield LedgerRow("sampling", storage_bytes(sampling_tensors(self._backend, self.build, config)), seqs)
        ops = self._ops(config)
        yield LedgerRow("kernels' workspaces", storage_bytes(ops.workspaces()), budget)
        if (count := self.build.spec.rank.count) > 1 and on_host:
            yield LedgerRow("shared with other ranks", memory_bytes(*rank_memory_sizes(self.build.spec, config)))
        elif count > 1 and chosen_sums() != "library":
            yield LedgerRow("symmetric memory", buffer_bytes(count))
        yield LedgerRow("attention's parts", storage_bytes(ops.attention_parts()), f"{budget}, {length}")
        if on_host:
            yield LedgerRow("compiled formats", most_kept_bytes(self.device.memory_bytes))

    def _ops(self, config: EngineConfig) -> Ops:
        """Returns the model's ops, with workspaces for steps of the engine."""
        if self._backend.steps == "called":  # without kernels, which have workspaces
            return self.model.model().ops
        if self._backend.steps == "captured":  # kernels of which no workspace depends on the length
            return self.model.ops(config.token_budget, config.max_num_seqs, config.block_size)
        most_rows = max(config.token_budget, PROMPT_LOGITS_ROWS)
        return self.model.ops(most_rows, config.max_num_seqs, config.block_size, config.max_model_len)

    def _largest_temporary(self, config: EngineConfig) -> LedgerRow:
        phases = self.temporaries(config)
        phase = max(phases, key=lambda each: phases[each])
        return LedgerRow("temporaries", phases[phase], phase)
