"""Steady decodes over ranks: what the leader plans and sends, and what a follower does with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastgen.runtime.ranks.decodes import FollowedDecodes, LedDecodes
from fastgen.runtime.step.plans import Kind


def test_a_leader_plans_a_run_once_and_ends_it_with_a_message_without_tokens() -> None:
    done: list[object] = []
    before: list[Any] = []
    team: Any = SimpleNamespace(
        before_plans=before.append,
        plan=lambda kind, numbers, arrays: done.append((kind, numbers, [each.tolist() for each in arrays])),
        write_tables=lambda places, blocks: done.append(("tables", places.tolist(), blocks.tolist())),
        finish_plans=lambda: done.append("finished"),
        check=lambda: done.append("checked"),
    )
    team.mailbox = SimpleNamespace(
        number=41,
        words="words",
        max_rows=4,
        max_updates=2,
        has_room_for=lambda count: count <= 2,
        add_updates=lambda places, blocks: done.append(("updates", places.tolist(), blocks.tolist())),
        clear_updates=lambda: done.append("cleared"),
    )
    led = LedDecodes(team, lambda ids, *where: done.append(("told", ids.tolist(), where)))  # type: ignore[arg-type]
    (end,) = before
    end()
    assert done == [], "nothing runs"
    led.begin(torch.tensor([3, 0], dtype=torch.int32))
    begun = (Kind.DECODES, (2, 41), [[3, 0]])
    led.tell(torch.tensor([7, 8]))
    led.update(np.array([1, 2]), np.array([5, 6]))
    assert done == [begun, ("told", [7, 8], ("words", 4, 2)), ("updates", [1, 2], [5, 6])]
    led.step_ended()
    assert done[3:] == ["cleared", "checked"]
    led.update(np.array([1, 2, 3]), np.array([5, 6, 7]))
    assert done[5:] == [("tables", [1, 2, 3], [5, 6, 7]), begun], "what has no room is planned; the run begins again"
    end()
    assert done[7:] == [("told", [], ("words", 4, 2)), "finished", "cleared"]
    end()
    assert len(done) == 10, "a run ends once"


def test_a_follower_runs_a_step_for_each_message_until_one_has_no_tokens() -> None:
    done: list[Any] = []
    told = [[5, 6], [7, 8], [], [9], [], [1, 2], []]

    class Hear:
        def bind(self, heard: torch.Tensor, token_ids: torch.Tensor, *given: object) -> Any:
            assert given == ("tables", "words", "shared", 3, 9)

            def hear() -> None:
                tokens = told.pop(0)
                heard[0] += 1
                heard[1] = len(tokens)
                token_ids[: len(tokens)] = torch.tensor(tokens)

            self.heard = heard
            return hear

    def record(num_rows: int, prepare: Any, sample: Any) -> Any:
        done.append(("recorded", num_rows))
        assert sample(torch.zeros(1)) is None
        return SimpleNamespace(replay=prepare)

    forward: Any = SimpleNamespace(record_decodes=record)
    inputs: Any = SimpleNamespace(
        buffers=SimpleNamespace(flat_tables="tables"),
        advance=lambda kernel, slots, ids, positions: done.append(
            (kernel, slots.tolist(), ids.tolist(), len(positions))
        ),
    )
    mailbox: Any = SimpleNamespace(max_rows=3, max_updates=9, words="words")
    hear: Any = Hear()
    followed = FollowedDecodes(forward, inputs, "next", hear, mailbox, "shared")  # type: ignore[arg-type]
    followed.follow(40, torch.tensor([2, 0], dtype=torch.int32))
    assert done == [("recorded", 2), ("next", [2, 0], [5, 6], 2), ("next", [2, 0], [7, 8], 2)]
    assert hear.heard.tolist() == [43, 0]
    followed.follow(50, torch.tensor([1], dtype=torch.int32))
    assert done[3:] == [("recorded", 1), ("next", [1], [9], 1)]
    followed.follow(60, torch.tensor([0, 1], dtype=torch.int32))
    assert done[5:] == [("next", [0, 1], [1, 2], 2)], "a tape is recorded once for each number of sequences"
    assert hear.heard.tolist() == [62, 0]
