"""Buffers that an engine holds beside its model: input buffers, block tables, results of steps, and the sampler's
buffers.

All are made on the ``meta`` device by what makes them in an engine, and their bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from fastgen.compile.backends.backend import Backend
from fastgen.compile.capture.allocations import META
from fastgen.compile.host.rank_memory import AREA_BYTES, LINE_BYTES
from fastgen.models.measure import ModelBuild
from fastgen.models.spec import ModelSpec
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.step.forward import Results
from fastgen.runtime.step.input_buffers import InputBuffers
from fastgen.runtime.step.mailbox import Mailbox
from fastgen.runtime.step.plans import MAX_PAIRS, PlanBoard


@lru_cache(maxsize=64)
def _buffers(
    token_budget: int, max_num_seqs: int, max_rows: int, num_groups: int, max_blocks: int, block_size: int
) -> InputBuffers:
    return InputBuffers(
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        max_rows=max_rows,
        num_groups=num_groups,
        max_blocks=max_blocks,
        block_size=block_size,
        device=META,
        host=META,
    )


def input_buffers(config: EngineConfig) -> InputBuffers:
    """Returns the buffers of a step's inputs, on ``meta``."""
    return _buffers(
        config.token_budget,
        config.max_num_seqs,
        config.max_rows,
        config.num_kv_groups,
        config.max_blocks,
        config.block_size,
    )


def plan_bytes(config: EngineConfig) -> int:
    """Returns the most bytes of the arrays that ranks of a shared model get with a plan."""
    return max(input_buffers(config).packed.nbytes, 2 * MAX_PAIRS * 8)


def rank_memory_sizes(spec: ModelSpec, config: EngineConfig) -> tuple[int, int, int]:
    """Returns how many ranks share the model of which ``spec`` is a part, and the bytes of an area of their memory and
    of its place for plans and the mailbox. An area holds at least a row of logits."""
    count = spec.rank.count
    row_bytes = 4 * -(-spec.vocab_size // count)
    area_bytes = max(AREA_BYTES, -(-row_bytes // LINE_BYTES) * LINE_BYTES)
    other_bytes = PlanBoard.size_bytes(count, plan_bytes(config)) + Mailbox.size_bytes(config.max_rows)
    return count, area_bytes, other_bytes


def results(build: ModelBuild, config: EngineConfig) -> tuple[Tensor, Tensor]:
    """Returns hidden states and logits of the largest step, on ``meta``."""
    found = Results(build.spec.hidden_size, build.spec.vocab_size, build.activation_dtype, META)
    return found.new_hidden(config.token_budget), found.new_logits(config.max_rows)


def sampling_tensors(backend: Backend, build: ModelBuild, config: EngineConfig) -> list[Tensor]:
    """Returns what kernels that sample hold, on ``meta``; the ids that belong to the inputs aside."""
    vocab_size, rows = build.spec.vocab_size, config.max_rows
    by_row = backend.row_sampling(vocab_size, max_rows=rows, device=META)
    sampled_ids = torch.empty(config.max_num_seqs, dtype=torch.int32, device=META)
    by_slot = backend.slot_sampling(vocab_size, max_rows=rows, sampled_ids=sampled_ids)
    found = [] if by_row is None else by_row.tensors()
    return found if by_slot is None else [each for each in by_slot.tensors() if each is not sampled_ids]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the memory of ``tensors``; memory that they share counts once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
