"""Computes what fits on a device: its memory ledger, blocks of the KV cache, and requests of one shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastgen.arguments import shown_bytes
from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.lab.devices.datasheets import Datasheet
from fastgen.lab.devices.roofline import KV_BYTES, model_build
from fastgen.lab.devices.shards import shard
from fastgen.lab.models import DescribedModel
from fastgen.options import LoadOptions
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.memory.fit import blocks_of_sequence
from fastgen.runtime.memory.ledger import Ledger, LedgerRow, MemoryModel
from fastgen.runtime.memory.sizes import EngineConfig


@dataclass(frozen=True)
class Shape:
    """The tokens of one request: its prompt and its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer

    @property
    def mean_context(self) -> float:
        """Returns how many tokens a decode reads on average."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True)
class Sizes:
    """Arguments of an engine that a plan leaves as they are; ``None`` is the engine's default."""

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_memory: int | str | None = None


class ShardMemory(MemoryModel):
    """Makes the ledger of one of several devices that share a model."""

    def __init__(
        self, model: DescribedModel, device: Datasheet, *, size: int, weight_format: str | None, kv_dtype: str | None
    ):
        whole = model_build(model.spec, device, model.dtype, weight_format)
        super().__init__(replace(whole, spec=shard(model.spec, size)), device.device)
        self.size = size
        self._kv_share = KV_BYTES[kv_dtype] / model.dtype.itemsize if kv_dtype else 1.0

    def block_bytes(self, block_size: int) -> int:
        return int(super().block_bytes(block_size) * self._kv_share)

    def ledger(self, config: EngineConfig) -> Ledger:
        """Returns the ledger of one device. The vocabulary is split too; its tables are whole in the shard."""
        rows = (self._split(row) for row in super().ledger(config).rows)
        return Ledger(tuple(rows), self.device.memory_bytes)

    def _split(self, row: LedgerRow) -> LedgerRow:
        return replace(row, size_bytes=-(-row.size_bytes // self.size)) if row.name == "embedding and head" else row


@dataclass(frozen=True)
class Capacity:
    """Holds how much fits on one of the devices that share a model. Blocks are those of one device; every device has as
    many.
    """

    config: EngineConfig
    ledger: Ledger
    block_bytes: int
    # Blocks that one request of the shape holds at its end, and one of ``max_model_len``.
    blocks_of_request: int
    blocks_of_longest: int

    @property
    def num_blocks(self) -> int:
        """Returns the blocks for requests: all but the padding block."""
        return self.config.num_blocks - 1

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens of one KV group that the cache holds."""
        return self.num_blocks // self.config.num_kv_groups * self.config.block_size

    @property
    def concurrent(self) -> int:
        """Returns how many requests of the shape run at once until their ends."""
        return min(self.config.max_num_seqs, self.num_blocks // self.blocks_of_request)

    @property
    def concurrent_reserved(self) -> int:
        """Returns how many run at once if each reserves the blocks of ``max_model_len`` when it begins."""
        return min(self.config.max_num_seqs, self.num_blocks // self.blocks_of_longest)

    @property
    def idle_bytes(self) -> int:
        """Returns the bytes that a device holds before a request."""
        return self.ledger.total_bytes - self.ledger.size_bytes("KV cache")

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the weights among them."""
        return sum(self.ledger.size_bytes(name) for name in ("embedding and head", "matrices", "norms"))

    @property
    def bytes_per_token(self) -> float:
        """Returns the bytes of one token's keys and values on one device."""
        return self.block_bytes / self.config.block_size * self.config.num_kv_groups


def capacity(memory: ShardMemory, shape: Shape, sizes: Sizes, token_budget: int) -> Capacity:
    """Returns what fits with a token budget.

    :raises InvalidArgumentError: if a request is longer than ``max_model_len``.
    :raises OutOfMemoryError: if the model does not fit with one request, with the arithmetic and what would.
    """
    most = sizes.max_num_seqs
    options = LoadOptions(
        "plan",
        token_budget=token_budget,
        max_num_seqs=most if most is None else min(most, token_budget),
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        kv_cache_memory=sizes.kv_cache_memory,
    )
    config = resolve_engine_config(memory, options)
    longest = config.max_model_len
    if shape.total > longest:
        raise InvalidArgumentError(
            f"a request of {shape.prompt} + {shape.answer} = {shape.total} tokens is longer than "
            f"max_model_len={longest}; choose a shorter prompt or answer (--prompt, --answer)"
        )
    found = Capacity(
        config,
        memory.ledger(config),
        memory.block_bytes(config.block_size),
        blocks_of_sequence(memory, shape.total, token_budget, config.block_size),
        blocks_of_sequence(memory, longest, token_budget, config.block_size),
    )
    if not found.concurrent:
        raise OutOfMemoryError(
            f"the KV cache has {found.num_blocks} blocks, and a request of {shape.total} tokens takes "
            f"{found.blocks_of_request}: all else takes {shown_bytes(found.idle_bytes)} of "
            f"{shown_bytes(found.ledger.device_bytes)}, of which an engine leaves a tenth to the driver unless "
            "kv_cache_memory= says how much the cache gets"
        )
    return found
