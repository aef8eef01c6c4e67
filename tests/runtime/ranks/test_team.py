"""Ranks, watched without processes: what is waited for, who is late, and what an error says."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.compile.host.group_ranks import MeetingPoint
from fastgen.compile.host.rank_memory import TIMEOUT_S, RankMemory
from fastgen.errors import RankError
from fastgen.runtime.ranks import follower, part, team
from fastgen.runtime.ranks.leading import LeadingForward
from fastgen.runtime.ranks.part import _sample_together
from fastgen.runtime.ranks.team import FAILED, LOADED, READY, Team, _Members, ending_on_error
from fastgen.runtime.step.plans import MAX_PAIRS, Kind, PlanBoard

NUM_RANKS = 3


class Clock:
    """A clock that the tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(team, "time", clock)
    return clock


@pytest.fixture
def board() -> PlanBoard:
    memory = RankMemory(NUM_RANKS, 4096, PlanBoard.size_bytes(NUM_RANKS, 64))
    return PlanBoard(memory, 64)


def write(board: PlanBoard) -> None:
    board.write(Kind.LOGITS, (1,), [np.zeros(1, np.int64)], lambda rank: None)


def members(board: PlanBoard, meeting: MeetingPoint | None) -> _Members:
    return _Members(board._memory, board, meeting)


def test_the_rank_that_has_taken_fewest_plans_is_the_slowest(board: PlanBoard) -> None:
    assert board.slowest() is None
    write(board)
    board.taken(1)
    assert board.slowest() == (2, 0)
    board.taken(2)
    assert board.slowest() is None
    write(board)
    board.taken(2)
    assert board.slowest() == (1, 1)


def test_a_rank_is_late_when_its_next_plan_has_waited_long(board: PlanBoard, clock: Clock) -> None:
    watch = team._Watch(board)
    clock.now_s += 10 * TIMEOUT_S
    assert watch.late_rank() is None, "nothing waits"
    write(board)
    assert watch.late_rank() is None
    clock.now_s += TIMEOUT_S
    assert watch.late_rank() is None
    board.taken(1)
    clock.now_s += 1.0
    assert watch.late_rank() is None, "the slowest is another one now"
    clock.now_s += TIMEOUT_S
    assert watch.late_rank() is None
    clock.now_s += 1.0
    assert watch.late_rank() == 2
    board.taken(2)
    assert watch.late_rank() is None


def watched(
    of: _Members, monkeypatch: pytest.MonkeyPatch, clock: Clock, *, turns: int = 3
) -> tuple[list[float | None], list[str]]:
    """How long each wait for messages was to be, where none came, and why ranks were found to be lost."""
    waits: list[float | None] = []
    lost: list[str] = []

    def wait(connections: object, timeout_s: float | None = None) -> list[Any]:
        waits.append(timeout_s)
        clock.now_s += 0.6 * TIMEOUT_S
        of.is_closing = len(waits) == turns
        return []

    monkeypatch.setattr(team, "wait", wait)
    monkeypatch.setattr(_Members, "lose", lambda self, why: lost.append(why))
    of._watch()
    return waits, lost


@pytest.mark.parametrize("has_group", [True, False])
def test_ranks_of_a_group_are_looked_at_between_messages(
    has_group: bool, board: PlanBoard, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of = members(board, MeetingPoint("gloo", tmp_path / "meeting") if has_group else None)
    of.group = SimpleNamespace() if has_group else None  # type: ignore[assignment]
    of.num_sent[READY] = NUM_RANKS - 1
    write(board)
    board.taken(2)
    waits, lost = watched(of, monkeypatch, clock)
    assert waits == [team._LOOK_S if has_group else None] * 3
    assert lost == (["rank 1 of 3 takes no plans"] if has_group else [])


def test_ranks_that_load_are_not_late(
    board: PlanBoard, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of = members(board, MeetingPoint("gloo", tmp_path / "meeting"))
    of.group = SimpleNamespace()  # type: ignore[assignment]
    write(board)
    assert watched(of, monkeypatch, clock)[1] == []


def test_a_group_is_left_once(board: PlanBoard, tmp_path: Path) -> None:
    """When a rank is lost its exchanges end, and they end once."""
    num_aborts = 0

    def abort() -> None:
        nonlocal num_aborts
        num_aborts += 1

    of = members(board, MeetingPoint("gloo", tmp_path / "meeting"))
    of.group = SimpleNamespace(abort=abort)  # type: ignore[assignment]
    of.lose("rank 2 of 3 failed")
    of.lose("another reason")
    assert (of.lost, num_aborts) == ("rank 2 of 3 failed", 1)


@pytest.mark.parametrize(
    ("raised", "lost", "message"),
    [
        (RankError("a wait ended"), "rank 1 of 2 was ended", "rank 1 of 2 was ended"),
        (RankError("a wait ended"), None, "a wait ended"),
        (ValueError("of the model"), "rank 1 of 2 was ended", "of the model"),
    ],
)
def test_an_error_says_what_the_team_knows(raised: Exception, lost: str | None, message: str) -> None:
    closed: list[bool] = []
    known: Any = SimpleNamespace(lost=lost, close=lambda: closed.append(True))
    with pytest.raises(type(raised), match=f"^{message}$"), ending_on_error(known):
        raise raised
    assert closed == [True]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores to which a process is kept, of four."""
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7, 9}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, chosen: kept.append(set(chosen)), raising=False)
    return kept


@pytest.mark.parametrize(
    ("platform", "count", "expected"),
    [("linux", 2, [{7, 9}]), ("linux", 4, [{5}]), ("linux", 5, []), ("darwin", 2, [])],
)
def test_a_follower_keeps_to_its_share_of_the_cores(
    platform: str, count: int, expected: list[set[int]], cores: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    follower._bind(1, count)
    assert cores == expected


@pytest.mark.parametrize("leads", [True, False])
def test_the_leader_samples_and_all_get_the_tokens(leads: bool) -> None:
    done: list[str] = []

    class Ranks:
        def broadcast(self, x: Tensor) -> None:
            assert x is ids
            done.append("broadcast")

    ids, logits = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 3)

    def sample(given: Tensor) -> None:
        assert given is logits
        done.append("sample")

    _sample_together(sample if leads else None, Ranks(), ids, logits)  # type: ignore[arg-type]
    assert done == (["sample", "broadcast"] if leads else ["broadcast"])


@pytest.mark.parametrize("lost", [None, "rank 1 of 3 was ended"])
def test_a_team_looks_into_the_memory_until_it_knows_that_a_rank_is_lost(lost: str | None) -> None:
    memory = RankMemory(NUM_RANKS, 4096)
    known: Any = SimpleNamespace(lost=None, memory=memory)
    known.give_up = lambda why: setattr(known, "lost", why)
    Team.check(known)
    memory._state[0] = 1 + 2  # rank 2 did not come to an exchange
    known.lost = lost
    with pytest.raises(RankError, match=f"^{lost or 'rank 2 of 3 did not come to a sum over ranks in time; .*'}$"):
        Team.check(known)


def test_many_entries_of_block_tables_go_into_as_many_plans_as_have_room_for_them() -> None:
    plans: list[tuple[Kind, tuple[np.ndarray, np.ndarray]]] = []
    known: Any = SimpleNamespace(plan=lambda kind, numbers, arrays: plans.append((kind, arrays)))
    places = np.arange(2 * MAX_PAIRS + 1)
    Team.write_tables(known, places, places + 7)
    assert [(kind, len(arrays[0])) for kind, arrays in plans] == [
        (Kind.WRITE_TABLES, MAX_PAIRS),
        (Kind.WRITE_TABLES, MAX_PAIRS),
        (Kind.WRITE_TABLES, 1),
    ]
    for index, expected in enumerate((places, places + 7)):
        assert np.array_equal(np.concatenate([arrays[index] for _, arrays in plans]), expected)


@pytest.mark.parametrize(
    ("status", "said"),
    [(3, "ended with status 3"), (-9, "was ended by signal SIGKILL"), (None, "closed its connection")],
)
def test_how_a_rank_ended_is_said(status: int | None, said: str, board: PlanBoard) -> None:
    def wait(timeout_s: float) -> int:
        if status is None:
            raise subprocess.TimeoutExpired("a rank", timeout_s)
        return status

    of = members(board, None)
    (first, _first), (second, theirs) = Pipe(), Pipe()
    of.connections = [first, second]
    of.processes = [SimpleNamespace(pid=70), SimpleNamespace(pid=77, wait=wait)]  # type: ignore[list-item]
    theirs.send((LOADED,))
    theirs.send((FAILED, "no memory is left"))
    theirs.close()
    assert of._hear(2) is None
    assert of.num_sent == {LOADED: 1}
    assert of._hear(2) == "failed: no memory is left"
    assert of._hear(2) == f"(process 77) {said}"


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (ValueError("of the model"), "rank 0 failed: of the model", "of the model"),
        (RankError("a wait ended"), "a wait ended", "rank 1 of 2 was ended"),
        (None, None, None),
    ],
)
def test_ranks_end_with_a_step_that_fails_at_the_leader(
    error: Exception | None, given: str | None, message: str | None
) -> None:
    done: list[str] = []

    class KnownTeam:
        def plan(self, kind: Kind, numbers: tuple[int, ...], arrays: tuple[object, ...]) -> None:
            done.append(f"plan {kind.name} {numbers}")

        def give_up(self, why: str) -> None:
            done.append(why)

        def check(self) -> None:
            done.append("check")
            if isinstance(error, RankError):
                raise RankError("rank 1 of 2 was ended")

    def some_logits(hidden: Tensor, first: int, end: int) -> Tensor:
        done.append("compute")
        if error is not None:
            raise error
        return hidden

    own: Any = SimpleNamespace(model=None, kv_cache=None, some_logits=some_logits)
    inputs: Any = None
    forward = LeadingForward(own, inputs, KnownTeam())  # type: ignore[arg-type]
    hidden, begun = torch.zeros(1), ["plan SOME_LOGITS (2, 5)", "compute"]
    if error is None:
        assert forward.some_logits(hidden, 2, 5) is hidden
        assert done == [*begun, "check"], "a GPU that waited in vain has gone on"
    else:
        with pytest.raises(type(error), match=f"^{message}$"):
            forward.some_logits(hidden, 2, 5)
        assert done[:3] == [*begun, given]


class _Ending:
    """A process that ends by itself ``takes_s`` after it is waited for, or when it is killed."""

    def __init__(self, clock: Clock, takes_s: float):
        self._clock, self._takes_s, self.done = clock, takes_s, list[Any]()

    def wait(self, timeout_s: float | None = None) -> int:
        self.done.append(timeout_s if timeout_s is None else pytest.approx(timeout_s))
        if timeout_s is not None and self._takes_s > timeout_s:
            self._clock.now_s += timeout_s
            raise subprocess.TimeoutExpired("a rank", timeout_s)
        self._clock.now_s += self._takes_s
        return 0

    def kill(self) -> None:
        self.done.append("kill")
        self._takes_s = 0.0


def test_ranks_have_a_second_together_to_end_before_they_are_killed(
    board: PlanBoard, clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir()
    of = members(board, MeetingPoint("gloo", folder / "place"))
    processes = [_Ending(clock, takes_s) for takes_s in (0.4, 5.0, 0.1)]
    of.processes = processes  # type: ignore[assignment]
    of.have_started.set()
    of.watcher = threading.current_thread()
    of.end()
    assert [each.done for each in processes] == [[1.0], [0.6, "kill", None], [0.0, "kill", None]]
    assert not folder.exists()
    joined: list[bool] = []
    for watcher in (None, SimpleNamespace(join=lambda: joined.append(True))):
        of.watcher = watcher  # type: ignore[assignment]
        of.end()
    assert joined == [True]


@pytest.mark.parametrize(
    ("num_ready", "lost"), [(1, "rank 1 failed"), (2, "rank 1 failed; the model has to be loaded again")]
)
def test_a_rank_that_is_lost_after_all_were_ready_needs_the_model_to_be_loaded_again(
    num_ready: int, lost: str, board: PlanBoard
) -> None:
    of = members(board, None)
    of.num_sent[READY] = num_ready
    of.lose("rank 1 failed")
    assert of.lost == lost


@pytest.mark.parametrize(
    ("num_sent", "lost", "is_over"), [(1, None, False), (2, None, True), (0, "rank 1 failed", True)]
)
def test_a_message_is_waited_for_until_all_ranks_sent_it_or_one_is_lost(
    num_sent: int, lost: str | None, is_over: bool, board: PlanBoard
) -> None:
    found: list[bool] = []

    class Came(contextlib.nullcontext[None]):
        def wait_for(self, is_there: Callable[[], object]) -> None:
            found.append(bool(is_there()))

    of = members(board, None)
    of.came, of.lost = Came(), lost  # type: ignore[assignment]
    of.num_sent[LOADED] = num_sent
    checked: list[bool] = []
    known: Any = SimpleNamespace(_members=of, memory=of.memory, check=lambda: checked.append(True))
    Team._wait_until(known, LOADED)
    assert (found, checked) == ([is_over], [True])


def test_before_a_plan_is_written_a_method_is_called_as_long_as_its_object_is_there() -> None:
    done: list[str] = []

    class Caller:
        def call(self) -> None:
            done.append("called")

    known: Any = SimpleNamespace(_before_plan=None, _wake=None, _giving_up=contextlib.nullcontext)
    known.check = lambda: done.append("checked")
    known.board = SimpleNamespace(write=lambda *given: done.append("written"))
    Team.plan(known, Kind.LOGITS, ())
    assert done == ["checked", "written"]
    caller = Caller()
    Team.before_plans(known, caller.call)
    Team.plan(known, Kind.LOGITS, ())
    assert done[2:] == ["checked", "called", "written"]
    del caller
    gc.collect()
    Team.plan(known, Kind.LOGITS, ())
    assert done[5:] == ["checked", "written"]


@pytest.mark.parametrize(
    ("count", "steps", "keeps"), [(1, "taped", True), (2, "taped", False), (2, "captured", True), (1, "captured", True)]
)
def test_ids_that_were_sampled_are_kept_where_all_ranks_have_them(
    count: int, steps: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "InputBatch", lambda **sizes: sizes)
    config: Any = SimpleNamespace(
        token_budget=7, max_num_seqs=3, max_rows=4, num_kv_groups=2, max_blocks=5, block_size=16
    )
    described: Any = SimpleNamespace(spec=SimpleNamespace(rank=SimpleNamespace(count=count)))
    backend: Any = SimpleNamespace(steps=steps, pads_batches=False)
    made: Any = part.new_inputs(described, config, torch.device("cpu"), backend)
    assert made == {
        "token_budget": 7, "max_num_seqs": 3, "max_rows": 4, "num_groups": 2, "max_blocks": 5, "block_size": 16,
        "device": torch.device("cpu"), "pads": False, "keeps_sampled": keeps,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("closes", "lost"), [(False, "rank 2 of 3 failed: no memory is left"), (True, None)], ids=["works", "closes"]
)
def test_a_rank_that_says_why_it_cannot_continue_is_lost_unless_the_team_is_closed(
    closes: bool, lost: str | None, board: PlanBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = members(board, None)
    of.connections = ["first", "second"]  # type: ignore[list-item]
    heard: list[int] = []

    def hear(of: _Members, index: int) -> str | None:
        heard.append(index)
        of.is_closing = closes and len(heard) == 2
        return None if len(heard) == 1 else "failed: no memory is left"

    monkeypatch.setattr(team, "wait", lambda connections, timeout_s: [connections[1]])
    monkeypatch.setattr(_Members, "_hear", hear)
    of._watch()
    assert (heard, of.lost) == ([2, 2], lost)
