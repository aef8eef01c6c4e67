"""A rank that follows: a process that builds its part of a model and carries out the leader's plans.

It is run as ``python -m fastgen.runtime.ranks.follower MEMORY CONNECTION PARENT``: two file descriptors, and the id of
the leader's process. It ends when that process does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fastgen.compile.backends.choose import choose_backend
from fastgen.compile.host.group_ranks import open_group
from fastgen.compile.host.parent import end_with
from fastgen.compile.host.rank_memory import RUNNING, SharedRanks
from fastgen.compile.host.ranks import share
from fastgen.runtime.ranks.decodes import FollowedDecodes
from fastgen.runtime.ranks.part import load_forward, new_inputs, new_model
from fastgen.runtime.ranks.setup import RankSetup, SharedMemory, check_same, memory_for
from fastgen.runtime.ranks.team import FAILED, GO, LOADED, READY
from fastgen.runtime.step.faults import cause_of
from fastgen.runtime.step.forward import Forward, TapedForward
from fastgen.runtime.step.input_batch import InputBatch
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS
from fastgen.runtime.step.plans import Kind, Plan


class Follower:
    """Carries out plans with the ``forward`` pass of one rank."""

    def __init__(self, forward: Forward, inputs: InputBatch, decodes: FollowedDecodes | None):
        self._forward, self._inputs, self._decodes = forward, inputs, decodes
        self._hidden = torch.empty(0)

    def carry_out(self, plan: Plan) -> None:
        """Does this rank's part of ``plan``."""
        match plan.kind:
            case Kind.HIDDEN:
                num_tokens, num_updates = plan.numbers
                batch = self._inputs.take(torch.from_numpy(plan.payload), num_tokens, num_updates)
                self._hidden = self._forward.hidden(batch)
            case Kind.LOGITS:
                (num_rows,) = plan.numbers
                self._forward.logits(self._hidden, self._inputs.views(len(self._hidden), num_rows))
            case Kind.SOME_LOGITS:
                self._forward.some_logits(self._hidden, *plan.numbers)
            case Kind.COPY_BLOCKS:
                sources, destinations = _numbers(plan).view(2, -1).tolist()
                self._forward.copy_blocks(plan.numbers[0], sources, destinations)
            case Kind.WRITE_TABLES:
                self._inputs.write_tables(*_numbers(plan).view(2, -1))
            case Kind.DECODES:
                assert self._decodes is not None, "the leader has tapes of decodes where all ranks have"
                self._decodes.follow(plan.numbers[1], torch.from_numpy(plan.payload).view(torch.int32))


def _numbers(plan: Plan) -> Tensor:
    return torch.from_numpy(plan.payload).view(torch.int64)


def build(setup: RankSetup, shared: SharedMemory, connection: Connection[Any, Any]) -> Follower:
    """Builds the rank's part of the model, loads its weights, and waits for the others before steps are captured."""
    described, config, device = setup.described, setup.config, setup.device
    backend = choose_backend(
        described.target,
        device,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_prompt_rows=PROMPT_LOGITS_ROWS,
        num_threads=setup.num_threads,
    )
    index, count = described.spec.rank.index, described.spec.rank.count
    if setup.meeting is None:
        backend.ranks = SharedRanks(shared.memory, index)
    else:
        backend.ranks = open_group(setup.meeting, index, count, device.torch_device)
    next_decodes, hear = backend.next_decodes(), backend.hear_tokens()
    inputs = new_inputs(described, config, device.torch_device, backend)
    model = new_model(described, config, device.torch_device, backend)

    def meet() -> None:
        connection.send((LOADED,))
        assert connection.recv() == (GO,)

    forward = load_forward(
        model,
        inputs,
        described,
        config,
        setup.checkpoint,
        device.torch_device,
        backend,
        activation_bytes=setup.activation_bytes,
        sample=None,  # the leader samples
        before_steps=meet,
        progress_bar=_no_bar,
        is_timed=setup.is_timed,
    )
    decodes = None
    if next_decodes is not None and hear is not None and isinstance(forward, TapedForward):
        decodes = FollowedDecodes(forward, inputs, next_decodes, hear, shared.mailbox, shared.memory.shared)
    return Follower(forward, inputs, decodes)


@contextmanager
def _no_bar(title: str, *, unit: str = "", enabled: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows nothing: the leader shows its own progress."""
    yield lambda done, total: None


def main() -> None:
    """Builds this rank's part of the model, then carries out plans until the leader ends."""
    memory_fd, connection_fd, parent = map(int, sys.argv[1:])
    end_with(parent)
    connection: Connection[Any, Any] = Connection(connection_fd)
    setup: RankSetup = connection.recv()
    rank = setup.described.spec.rank
    _bind(rank.index, rank.count)
    shared = memory_for(setup, memory_fd)
    memory, board = shared.memory, shared.board
    try:
        check_same(setup)
        if setup.device.kind == "cuda":
            torch.cuda.set_device(setup.device.torch_device)
        follower = build(setup, shared, connection)
        connection.send((READY,))
        while True:
            plan = board.next(rank.index, lambda seconds: _sleep(connection, seconds))
            with torch.inference_mode():
                follower.carry_out(plan)
            board.taken(rank.index)
            memory.check()
    except (EOFError, ConnectionError):  # the leader has closed the connection, or ended
        os._exit(0)  # Python's own end takes torch apart, which takes a second
    except Exception as error:
        if memory.state == RUNNING:  # otherwise the leader knows more
            connection.send((FAILED, cause_of(error)))
        os._exit(1)


def _sleep(connection: Connection[Any, Any], seconds: float) -> None:
    """Sleeps until the leader sends a word, or for so many seconds. Raises ``EOFError`` if it has ended."""
    if connection.poll(seconds):
        connection.recv_bytes()


def _bind(index: int, count: int) -> None:
    """Keeps the process to its share of the cores, where there are enough."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= count:
            os.sched_setaffinity(0, cores[slice(*share(len(cores), index, count))])


if __name__ == "__main__":
    main()
