"""Chats with Mistral-7B on 24 GB, as in "Throughput is all you need": blocks, and who waits when they run out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, rounded
from fastgen.lab.paper.servers import Server, recorded
from fastgen.lab.paper.tables import table
from fastgen.lab.plan.sheet import BlockSheet, preset
from fastgen.lab.report.step_plots import cache_plot
from fastgen.lab.report.timelines import Timeline
from fastgen.lab.workloads.request import PlannedRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHATS: Final = (10, 12, 14)
# Steps of a timeline that a file keeps.
_NUM_KEPT: Final = 150
_SAYS: Final = {10: "none", 12: "one", 14: "about two"}


def sheet() -> BlockSheet:
    """Returns the post's spreadsheet."""
    found = preset("mistral-7b-24gb").sheet
    assert isinstance(found, BlockSheet)
    return found


def server(*, reserves_context: bool) -> Server:
    """Returns Mistral-7B on an RTX 4090 with the blocks of the spreadsheet."""
    blocks = sheet()
    return Server(
        model="mistral-7b-v0.2",
        device="RTX-4090",
        max_model_len=blocks.context,
        token_budget=512,
        reserves_context=reserves_context,
        options={"num_blocks": blocks.blocks + 1, "block_size": blocks.block_size},  # and the padding block
    )


def chats(count: int, *, turns: int) -> list[PlannedRequest]:
    """Returns one long request for each chat, as the post counts them: it holds its blocks from the first turn to the
    last.
    """
    blocks = sheet()
    total = turns * (blocks.prompt + blocks.answer)
    return [
        PlannedRequest(prompt_ids=[number + 1] * blocks.prompt, num_new_tokens=total - blocks.prompt)
        for number in range(count)
    ]


def run(setting: Setting) -> dict[str, Any]:
    """Returns the arithmetic, and a timeline for each number of chats, with blocks on demand and with reservation."""
    counts, turns = ((12,), 1) if setting.small else (_CHATS, sheet().turns)
    found = []
    for count in counts:
        for reserves_context in (False, True):
            run, recording = recorded(server(reserves_context=reserves_context), chats(count, turns=turns), count)
            steps = Timeline.of(recording)
            found.append(
                {
                    "chats": count,
                    "reserves_context": reserves_context,
                    "duration_s": rounded(run.header.duration_s),
                    "most_running": int(steps.running.max()),
                    "most_waiting": int(steps.waiting[_began(steps) :].max()),
                    "mean_waiting_when_full": _mean_waiting(steps),
                    "preemptions": int(steps.preemptions.sum()),
                    "most_used": rounded(float(steps.used.max())),
                    "timeline": steps.thinned(_NUM_KEPT).as_json(),
                }
            )
    return {"sheet": sheet().lines(), "runs": found}


def _began(steps: Timeline) -> int:
    """Returns the first step in which as many chats run as ever do. Before it chats wait only for their first step."""
    return int(np.argmax(steps.running))


def _mean_waiting(steps: Timeline) -> float:
    """Returns how many chats wait on average while at least one waits, weighted by time."""
    waits = steps.waiting > 0
    waits[: _began(steps)] = False
    times_s = (steps.end_s - steps.start_s)[waits]
    return rounded(float(np.average(steps.waiting[waits], weights=times_s))) if waits.any() else 0.0


def section(result: Result) -> str:
    """Returns the arithmetic, and what happened to 10, 12 and 14 chats."""
    rows = [
        (
            f"{run['chats']}",
            "whole context" if run["reserves_context"] else "blocks on demand",
            "–" if run["reserves_context"] else _SAYS.get(run["chats"], "–"),
            f"{run['most_running']}",
            f"{run['most_waiting']}",
            f"{run['mean_waiting_when_full']:.1f}",
            f"{run['preemptions']}",
            f"{run['most_used']:.0%}",
            f"{run['duration_s']:.0f}",
        )
        for run in result["runs"]
    ]
    headings = (
        "chats",
        "memory",
        "post: waiting",
        "most running",
        "most waiting",
        "waiting on average, while any waits",
        "preemptions",
        "most blocks in use",
        "all answered after (s)",
    )
    lines = "\n".join(result["sheet"])
    account = (
        "Chats are counted as in the post: one request that grows to 5,000 tokens. All are sent at once to a simulated "
        "RTX 4090. With 10 chats the cache never fills. With 12 it fills near the end and one chat is preempted; it "
        "waits until another is done. With 14 the chats fill the cache earlier, and are preempted one after another "
        "until as many run as the arithmetic says. With blocks on demand more than 11 chats run at first, because they "
        "are short then. With reservation 7 run from the first step to the last, whatever they use, and the others "
        "wait.\n\n"
        "The post's turns took 10 s each, with a client between them. Here a chat has no pauses. What is preempted is "
        "computed again when it continues, as in the vLLM of the post."
    )
    return f"```\n{lines}\n```\n\n{table(headings, rows)}\n\n{account}"


def pictures(result: Result) -> dict[str, Figure]:
    """Returns running and waiting chats and the use of the cache over time, for both kinds of memory."""

    def timelines(*, reserves_context: bool) -> dict[str, Timeline]:
        return {
            f"N = {run['chats']}": Timeline.from_json(run["timeline"])
            for run in result["runs"]
            if run["reserves_context"] == reserves_context
        }

    return {
        "chats": cache_plot(timelines(reserves_context=False)),
        "chats_reserved": cache_plot(timelines(reserves_context=True)),
    }


CHATS: Final = Reproduction("chats", "Chats with Mistral-7B on 24 GB, simulated", run, section, pictures)
