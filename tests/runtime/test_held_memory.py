"""The memory that ranks of a model share, by the sizes of the model and of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastgen.compile.host.rank_memory import AREA_BYTES
from fastgen.models.spec import Rank
from fastgen.runtime.memory.held import input_buffers, plan_bytes, rank_memory_sizes, storage_bytes
from fastgen.runtime.memory.sizes import EngineConfig
from fastgen.runtime.step.input_buffers import InputBuffers
from fastgen.runtime.step.mailbox import Mailbox
from fastgen.runtime.step.plans import MAX_PAIRS, PlanBoard
from tests.runtime.test_engine_config import make_spec


def config(token_budget: int) -> EngineConfig:
    return EngineConfig(
        token_budget=token_budget, max_num_seqs=5, block_size=16, num_blocks=9, max_model_len=64, num_kv_groups=1
    )


@pytest.mark.parametrize(
    ("vocab_size", "area_bytes"),
    [
        (2000, AREA_BYTES),
        (2 * AREA_BYTES // 4, AREA_BYTES),
        (2 * AREA_BYTES // 4 + 1, AREA_BYTES + 64),
        (1_000_001, 2_000_064),  # 500,001 numbers of four bytes, in lines of 64
    ],
)
def test_an_area_holds_a_rank_s_part_of_a_row_of_logits(vocab_size: int, area_bytes: int) -> None:
    spec = replace(make_spec(), vocab_size=vocab_size, rank=Rank(0, 2))
    count, found, others = rank_memory_sizes(spec, config(8))
    assert (count, found) == (2, area_bytes)
    assert others == PlanBoard.size_bytes(2, plan_bytes(config(8))) + Mailbox.size_bytes(5)


def test_a_plan_has_room_for_all_inputs_of_a_step_and_for_many_entries_of_tables() -> None:
    assert plan_bytes(config(8)) == 2 * 8 * MAX_PAIRS
    assert plan_bytes(config(1 << 15)) > 4 * (1 << 15) > 2 * 8 * MAX_PAIRS


def test_inputs_lie_behind_one_another_at_addresses_that_kernels_take() -> None:
    """Each begins at a multiple of 16 bytes. A step updates up to twice as many entries of block tables as it may begin
    blocks: 2 groups * (21 // 4 tokens + 3 sequences)."""
    sizes = {"token_budget": 21, "max_num_seqs": 3, "max_rows": 6, "num_groups": 2, "max_blocks": 5, "block_size": 4}
    buffers = InputBuffers(**sizes, device=torch.device("meta"), host=torch.device("meta"))
    assert buffers.max_updates == 32
    found = {name: (field.offset, field.count) for name, field in buffers.layout.fields.items()}
    assert found == {
        "slot_mapping": (0, 44),  # 22 of each group
        "update_index": (352, 32),
        "update_block": (608, 32),
        "input_ids": (736, 21),
        "token_source": (832, 21),
        "positions": (928, 21),
        "cu_seqlens_q": (1024, 4),
        "seq_lens": (1040, 3),
        "logits_indices": (1056, 6),
        "logits_slots": (1088, 6),
        "sampled_positions": (1120, 6),
    }
    assert buffers.packed.nbytes == 1152
    assert buffers.block_tables.shape == buffers.host_tables.shape == (2, 3, 8)
    assert storage_bytes(buffers.inputs(on_host=True)) == 3 * 1152 + 3 * 4
    assert storage_bytes(buffers.inputs(on_host=False)) == 1152 + 3 * 4
    assert storage_bytes(buffers.tables(on_host=True)) == 49 * 4 + 48 * 8
    assert storage_bytes(buffers.tables(on_host=False)) == 49 * 4
    assert storage_bytes([buffers.flat_tables, buffers.block_tables]) == 49 * 4, "shared memory counts once"


def test_the_buffers_of_an_engine_have_its_sizes() -> None:
    described = replace(config(21), max_num_seqs=3, num_kv_groups=2, max_model_len=65, num_draft_tokens=1)
    buffers = input_buffers(described)
    assert buffers.layout.fields["input_ids"].count == 21
    assert buffers.layout.fields["logits_slots"].count == 6
    assert buffers.block_tables.shape == (2, 3, 8)  # 5 blocks of 16 tokens
    assert buffers.max_updates == 16
