"""The memory that ranks of a model share, by the sizes of the model and of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen.compile.host.rank_memory import AREA_BYTES
from fastgen.models.spec import Rank
from fastgen.runtime.memory.held import plan_bytes, rank_memory_sizes
from fastgen.runtime.memory.sizes import EngineConfig
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
