"""The memory ledger: what an engine takes of its device's memory, told before any of it is asked for.

Every row is arithmetic over the model's spec and the engine's sizes. Most is held from loading to closing; temporaries
come and go, one phase after the other, so that the largest of them counts. Of a GPU only its own memory is counted, and
nothing that the driver takes for itself; of a CPU nothing that Python and its libraries take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastgen.compile.capture.arena import SLAB
from fastgen.compile.host.device import Device
from fastgen.compile.ops.sampling.cpp import sampling_bytes
from fastgen.compile.ops.sampling.reference import LOGPROBS_BYTES_PER_LOGIT, REFERENCE_BYTES_PER_LOGIT
from fastgen.layers.kv_cache import storage_places
from fastgen.models.activation_sizes import ActivationSizes
from fastgen.models.builder import kv_groups, kv_shapes
from fastgen.models.weight_sizes import ModelBuild, WeightSizes, weight_sizes
from fastgen.models.workspace_sizes import WorkspaceSizes
from fastgen.runtime.sampling.slot_sampler import slot_sampler_bytes
from fastgen.runtime.step.input_batch import input_layout, table_width
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS

if TYPE_CHECKING:
    from fastgen.runtime.config import EngineConfig

_FP32 = 4
_GIB = 2**30


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
    """What an engine takes, row by row; printed, a table. ``device_bytes`` is what its device has."""

    rows: tuple[LedgerRow, ...]
    device_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    def size_bytes(self, name: str) -> int:
        """Of the rows of that ``name``; 0 where there are none."""
        return sum(row.size_bytes for row in self.rows if row.name == name)

    def arithmetic(self) -> str:
        """The sum in one line."""
        terms = " + ".join(f"{row} {in_gib(row.size_bytes)}" for row in self.rows)
        return f"{terms} = {in_gib(self.total_bytes)}"

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "total_bytes": self.total_bytes, "device_bytes": self.device_bytes}

    def __str__(self) -> str:
        lines = [(str(row), row.size_bytes) for row in self.rows]
        lines += [("total", self.total_bytes), ("the device has", self.device_bytes)]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {size / 2**20:10,.2f} MiB" for name, size in lines)


def in_gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:,.2f} GiB"


class MemoryModel:
    """Makes the ledgers of one model, built in one way, for engines of any sizes on ``device``."""

    def __init__(self, build: ModelBuild, device: Device):
        self.build, self.device = build, device
        groups, shapes = kv_groups(build.spec), kv_shapes(build.spec)
        self.num_kv_groups = len(shapes)
        self._kv_features = sum(shape.num_features for shape, _ in set(storage_places(groups, shapes)))
        self._activations = ActivationSizes(build)
        self._workspaces = WorkspaceSizes(build)
        self._by_kernels = build.target.name != "torch"

    def block_bytes(self, block_size: int) -> int:
        """Of a KV block: what its tokens leave in all layers that share it."""
        return block_size * self.build.dtype.itemsize * self._kv_features

    def ledger(self, config: EngineConfig) -> Ledger:
        """Of an engine of these sizes."""
        rows = (*self._weight_rows(config), *self._held_rows(config), self._largest_temporary(config))
        return Ledger(tuple(row for row in rows if row.size_bytes), self.device.memory_bytes)

    @cached_property
    def _weights(self) -> WeightSizes:
        return weight_sizes(self.build)

    def _weight_rows(self, config: EngineConfig) -> Iterator[LedgerRow]:
        sizes = self._weights
        yield LedgerRow("embedding and head", sizes.tables)
        yield LedgerRow("matrices", sizes.matrices, self.build.matrix_format)
        yield LedgerRow("norms", sizes.vectors)
        yield LedgerRow("rotary tables", sizes.rotary * config.max_model_len, f"max_model_len={config.max_model_len}")
        yield LedgerRow("rests of huge pages", sizes.page_rests)

    def _held_rows(self, config: EngineConfig) -> Iterator[LedgerRow]:
        budget, seqs = f"token_budget={config.token_budget}", f"max_num_seqs={config.max_num_seqs}"
        length = f"max_model_len={config.max_model_len}"
        vocab_size, itemsize = self.build.spec.vocab_size, self.build.activation_bytes
        yield LedgerRow("KV cache", config.num_blocks * self.block_bytes(config.block_size))
        if self._by_kernels:
            # What captured steps leave in between lies in one piece of memory, that of the largest step.
            yield LedgerRow("activations", -(-self.step_bytes(config) // SLAB) * SLAB, budget)
            hidden = config.token_budget * self.build.spec.hidden_size * itemsize
            yield LedgerRow("results", hidden + config.max_rows * vocab_size * _FP32, f"{budget}, {seqs}")
        tables = _FP32 * (config.num_kv_groups * config.max_num_seqs * table_width(config.max_blocks) + 1)
        yield LedgerRow("block tables", tables, f"{seqs}, {length}")
        inputs = input_layout(
            config.token_budget, config.max_num_seqs, config.max_rows, config.num_kv_groups, config.block_size
        )
        num_copies = 1 if self.device.kind == "cuda" else 3  # two more on the host
        yield LedgerRow("inputs", num_copies * inputs.size_bytes + _FP32 * config.max_num_seqs, budget)
        yield LedgerRow("sampling", self._sampling_bytes(config), seqs)
        rows, size = self._most_rows(config), config.block_size
        workspaces = self._workspaces.size_bytes(max_rows=rows, max_num_seqs=config.max_num_seqs, block_size=size)
        yield LedgerRow("kernels' workspaces", workspaces, budget)
        scratch = self._workspaces.scratch_bytes(max_rows=rows, length=config.max_model_len, block_size=size)
        yield LedgerRow("attention's parts", scratch, f"{budget}, {length}")

    def _sampling_bytes(self, config: EngineConfig) -> int:
        target, vocab_size = self.build.target, self.build.spec.vocab_size
        if target.name == "cpp":
            return sampling_bytes(vocab_size, max_rows=config.max_rows, max_threads=target.num_threads)
        return slot_sampler_bytes(target, vocab_size, max_rows=config.max_rows, max_num_seqs=config.max_num_seqs)

    def _largest_temporary(self, config: EngineConfig) -> LedgerRow:
        logits = self.build.spec.vocab_size * _FP32
        hidden = self.build.spec.hidden_size * self.build.activation_bytes
        samples_by_torch = {"torch": REFERENCE_BYTES_PER_LOGIT, "triton": LOGPROBS_BYTES_PER_LOGIT}
        sampling = samples_by_torch.get(self.build.target.name, _FP32) * self.build.spec.vocab_size
        prompt_rows = min(PROMPT_LOGITS_ROWS, config.token_budget)
        phases = {
            "loading the largest tensor": self._weights.largest_tensor,
            # Captured or not: a step of a size that was never captured calls the modules, and so does the capture.
            f"a forward pass of token_budget={config.token_budget}": self.step_bytes(config),
            f"sampling max_num_seqs={config.max_num_seqs}": config.max_rows * (hidden + max(logits, sampling)),
            "prompt_logprobs": prompt_rows * self.build.spec.vocab_size * LOGPROBS_BYTES_PER_LOGIT,
        }
        phase = max(phases, key=lambda each: phases[each])
        return LedgerRow("temporaries", phases[phase], phase)

    def step_bytes(self, config: EngineConfig) -> int:
        """Of what the modules leave in between, in a step of the whole token budget."""
        return self._activations.step_bytes(config.token_budget, config.max_model_len, config.block_size)

    def _most_rows(self, config: EngineConfig) -> int:
        """Rows that kernels may be given at once."""
        return max(config.token_budget, PROMPT_LOGITS_ROWS if self.build.target.name == "cpp" else 0)
