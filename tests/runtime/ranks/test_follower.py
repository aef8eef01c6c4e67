"""A rank that follows, without its process and its model: what each plan has it do, and how it ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastgen.compile.host.rank_memory import RUNNING
from fastgen.runtime.ranks import follower
from fastgen.runtime.ranks.follower import Follower
from fastgen.runtime.ranks.team import FAILED, GO, LOADED, READY
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step.plans import Kind, Plan


def plan(kind: Kind, numbers: tuple[int, ...], payload: list[int], dtype: Any = np.int64) -> Plan:
    return Plan(kind, numbers, np.array(payload, dtype).view(np.uint8))


def test_each_plan_is_carried_out_with_its_numbers() -> None:
    done: list[object] = []
    hidden = torch.zeros(3, 2)

    def compute(batch: object) -> torch.Tensor:
        done.append(("hidden", batch))
        return hidden

    forward: Any = SimpleNamespace(
        hidden=compute,
        logits=lambda given, batch: done.append(("logits", given is hidden, batch)),
        some_logits=lambda given, *rows: done.append(("some logits", given is hidden, rows)),
        copy_blocks=lambda *given: done.append(("copies", given)),
    )
    inputs: Any = SimpleNamespace(
        take=lambda payload, num_tokens, num_updates: (payload.tolist(), num_tokens, num_updates),
        views=lambda num_tokens, num_rows: (num_tokens, num_rows),
        write_tables=lambda places, blocks: done.append(("tables", places.tolist(), blocks.tolist())),
    )
    decodes: Any = SimpleNamespace(follow=lambda number, slots: done.append(("decodes", number, slots.tolist())))
    following = Follower(forward, inputs, decodes)
    for each in (
        plan(Kind.HIDDEN, (3, 1), [5, 6], np.uint8),
        plan(Kind.LOGITS, (2,), []),
        plan(Kind.SOME_LOGITS, (4, 7), []),
        plan(Kind.COPY_BLOCKS, (1,), [2, 3, 8, 9]),
        plan(Kind.WRITE_TABLES, (), [10, 11, 20, 21]),
        plan(Kind.DECODES, (2, 40), [0, 3], np.int32),
    ):
        following.carry_out(each)
    assert done == [
        ("hidden", ([5, 6], 3, 1)),
        ("logits", True, (3, 2)),
        ("some logits", True, (4, 7)),
        ("copies", (1, [2, 3], [8, 9])),
        ("tables", [10, 11], [20, 21]),
        ("decodes", 40, [0, 3]),
    ]


@pytest.mark.parametrize("in_a_group", [False, True])
@pytest.mark.parametrize(
    ("advances", "hears", "is_taped", "has_decodes"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
        (False, False, True, False),
    ],
)
def test_a_rank_follows_tapes_of_decodes_where_it_has_all_that_they_need(
    advances: bool, hears: bool, is_taped: bool, has_decodes: bool, in_a_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    kernels: Any = SimpleNamespace(next_decodes="next" if advances else None, hear="hear" if hears else None)
    backend: Any = SimpleNamespace(next_decodes=lambda: kernels.next_decodes, hear_tokens=lambda: kernels.hear)
    forward = object.__new__(TapedForward) if is_taped else SimpleNamespace()
    given: dict[str, Any] = {}

    def load(*arguments: Any, before_steps: Any, **options: Any) -> Any:
        before_steps()
        given.update(options)
        return forward

    monkeypatch.setattr(follower, "choose_backend", lambda *given, **options: backend)
    monkeypatch.setattr(follower, "SharedRanks", lambda memory, index: ("shared", memory, index))
    monkeypatch.setattr(follower, "open_group", lambda *given: ("group", *given))
    monkeypatch.setattr(follower, "new_inputs", lambda *given: "inputs")
    monkeypatch.setattr(follower, "new_model", lambda *given: "model")
    monkeypatch.setattr(follower, "load_forward", load)
    monkeypatch.setattr(follower, "FollowedDecodes", lambda *given: given)
    rank = SimpleNamespace(index=1, count=2)
    setup: Any = SimpleNamespace(
        described=SimpleNamespace(spec=SimpleNamespace(rank=rank), target="cpp"),
        config=SimpleNamespace(token_budget=8, max_num_seqs=2),
        device=SimpleNamespace(torch_device="cpu"),
        num_threads=1,
        meeting="place" if in_a_group else None,
        checkpoint="weights",
        activation_bytes=77,
        is_timed=is_taped,
    )
    memory: Any = SimpleNamespace(shared="words")
    connection: Any = SimpleNamespace(send=done.append, recv=lambda: (GO,))
    found = follower.build(setup, SimpleNamespace(memory=memory, mailbox="mailbox"), connection)  # type: ignore[arg-type]
    assert found._decodes == ((forward, "inputs", "next", "hear", "mailbox", "words") if has_decodes else None)
    assert backend.ranks == (("group", "place", 1, 2, "cpu") if in_a_group else ("shared", memory, 1))
    assert done == [(LOADED,)]
    assert (given["activation_bytes"], given["sample"], given["is_timed"]) == (77, None, is_taped)
    with given["progress_bar"]("kernels") as progress:
        progress(1, 2)


class Ended(BaseException):
    """The process has ended with a status."""


def lived(monkeypatch: pytest.MonkeyPatch, *, fails: Exception | None, state: int = RUNNING) -> list[object]:
    """Returns what a process did that got two plans and then ``fails``, or that fails before; last its status."""
    done: list[object] = []
    plans = ["first", "second"]

    def next_plan(index: int, sleep: Any) -> str:
        if not plans:
            assert fails is not None
            raise fails
        return plans.pop(0)

    def carry_out(each: str) -> None:
        assert torch.is_inference_mode_enabled()
        done.append(each)

    def end(status: int) -> None:
        done.append(status)
        raise Ended

    rank = SimpleNamespace(index=1, count=3)
    setup = SimpleNamespace(
        described=SimpleNamespace(spec=SimpleNamespace(rank=rank)), device=SimpleNamespace(kind="cpu")
    )
    connection = SimpleNamespace(recv=lambda: setup, send=done.append)
    board = SimpleNamespace(next=next_plan, taken=lambda index: done.append(("taken", index)))
    memory = SimpleNamespace(check=lambda: done.append("check"), state=state)
    monkeypatch.setattr("sys.argv", ["follower", "7", "8", "9"])
    monkeypatch.setattr(follower, "end_with", lambda parent: done.append(("ends with", parent)))
    monkeypatch.setattr(follower, "Connection", lambda descriptor: done.append(descriptor) or connection)
    monkeypatch.setattr(follower, "_bind", lambda *given: done.append(("bind", given)))
    monkeypatch.setattr(
        follower, "memory_for", lambda setup, fd: done.append(fd) or SimpleNamespace(memory=memory, board=board)
    )
    monkeypatch.setattr(follower, "check_same", lambda setup: done.append("same"))
    monkeypatch.setattr(follower, "build", lambda *given: SimpleNamespace(carry_out=carry_out))
    monkeypatch.setattr("os._exit", end)
    with contextlib.suppress(Ended):
        follower.main()
    return done


BEGUN = [("ends with", 9), 8, ("bind", (1, 3)), 7, "same", (READY,)]
CARRIED_OUT = ["first", ("taken", 1), "check", "second", ("taken", 1), "check"]


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError()])
def test_a_follower_carries_out_plans_until_the_leader_ends(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lived(monkeypatch, fails=error) == [*BEGUN, *CARRIED_OUT, 0]


@pytest.mark.parametrize(("state", "said"), [(RUNNING, [(FAILED, "ValueError: broken")]), (RUNNING + 1, [])])
def test_a_follower_that_fails_says_so_unless_the_leader_knows_more(
    state: int, said: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lived(monkeypatch, fails=ValueError("broken"), state=state) == [*BEGUN, *CARRIED_OUT, *said, 1]


@pytest.mark.parametrize(("has_come", "num_received"), [(True, 1), (False, 0)])
def test_a_follower_sleeps_until_it_gets_a_word(has_come: bool, num_received: int) -> None:
    polled: list[float] = []
    received: list[bytes] = []

    def poll(seconds: float) -> bool:
        polled.append(seconds)
        return has_come

    connection: Any = SimpleNamespace(poll=poll, recv_bytes=lambda: received.append(b"plan"))
    follower._sleep(connection, 0.25)
    assert (polled, len(received)) == ([0.25], num_received)
