"""Messages of the mailbox, by kernels: tokens, entries of block tables, the end, and an end of all ranks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.rank_memory import RankMemory
from fastgen.compile.ops.ranks.decodes import HearTokensKernel, TellTokensKernel, hear_tokens_spec, tell_tokens_spec
from fastgen.runtime.step.mailbox import Mailbox

MAX_ROWS = 5


class Heard:
    """A rank that hears."""

    def __init__(self, memory: RankMemory, mailbox: Mailbox):
        kernel = HearTokensKernel(KernelLoader(CppBuilder("portable")).load(hear_tokens_spec()))
        self.heard, self.token_ids = torch.zeros(2, dtype=torch.int64), torch.zeros(MAX_ROWS, dtype=torch.int64)
        self.tables = torch.zeros(20, dtype=torch.int32)
        sizes = MAX_ROWS, mailbox.max_updates
        self.hear = kernel.bind(self.heard, self.token_ids, self.tables, mailbox.words, memory.shared, *sizes)


@pytest.fixture
def memory() -> RankMemory:
    return RankMemory(2, 4096, Mailbox.size_bytes(MAX_ROWS))


def tell(mailbox: Mailbox, token_ids: list[int]) -> None:
    kernel = TellTokensKernel(KernelLoader(CppBuilder("portable")).load(tell_tokens_spec()))
    kernel(torch.tensor(token_ids, dtype=torch.int64), mailbox.words, MAX_ROWS, mailbox.max_updates)


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_a_rank_hears_what_is_told(memory: RankMemory, wait_s: float) -> None:
    """At once, and after it fell asleep."""
    mailbox = Mailbox(memory.others, MAX_ROWS)
    rank = Heard(memory, mailbox)
    with ThreadPoolExecutor(1) as pool:
        for number, token_ids in enumerate(([7, 8, 9], [1], []), 1):
            hearing = pool.submit(rank.hear)
            time.sleep(wait_s)
            mailbox.add_updates(np.array([number, number + 10]), np.array([3 * number, 4 * number]))
            tell(mailbox, token_ids)
            hearing.result(timeout=60)
            assert rank.heard.tolist() == [number, len(token_ids)] == [mailbox.number, len(token_ids)]
            assert rank.token_ids[: len(token_ids)].tolist() == token_ids
            assert rank.tables[[number, number + 10]].tolist() == [3 * number, 4 * number]
            mailbox.clear_updates()
    assert rank.tables.count_nonzero() == 6


def test_the_end_of_the_ranks_ends_the_wait(memory: RankMemory) -> None:
    rank = Heard(memory, Mailbox(memory.others, MAX_ROWS))
    rank.heard[1] = 5
    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(rank.hear)
        time.sleep(0.05)
        memory.end()
        hearing.result(timeout=60)
    assert rank.heard.tolist() == [0, 0]


def test_a_mailbox_has_room_for_so_many_entries(memory: RankMemory) -> None:
    mailbox = Mailbox(memory.others, MAX_ROWS)
    some = np.arange(mailbox.max_updates - 1)
    mailbox.add_updates(some, some)
    assert mailbox.has_room_for(1)
    assert not mailbox.has_room_for(2)
    mailbox.clear_updates()
    assert mailbox.has_room_for(mailbox.max_updates)
