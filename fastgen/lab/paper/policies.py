"""Three policies on one real engine on this machine: the same weights, the same requests, in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, kept, measured, value
from fastgen.lab.paper.servers import STAGGER_S
from fastgen.lab.paper.tables import share, table, three
from fastgen.lab.report.plots import bar_plot
from fastgen.lab.report.points import Bars
from fastgen.lab.report.step_plots import policy_timeline, same_interval
from fastgen.lab.report.timelines import Timeline
from fastgen.lab.workloads.paper import Paper

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES: Final = ("splitfuse", "prefill_first", "orca")
# The paper's shapes are for GPUs. These are a tenth of them, with room for whole prompts in a step.
_PROMPT, _ANSWER, _CLIENTS, _NUM_REQUESTS, _ROUNDS = 260, 32, 8, 40, 3
_TOKEN_BUDGET: Final = 512
_PERCENTS: Final = (50, 90, 95)
# Steps of a timeline that a file keeps.
_NUM_STEPS: Final = 40


def run(setting: Setting) -> dict[str, Any]:
    """Returns the figures of each policy over all rounds, and some of its steps.

    :raises InvalidArgumentError: without a model to measure.
    """
    import fastgen
    from fastgen.lab.experiments.policies import policies
    from fastgen.lab.load.closed_loop import ClosedLoop
    from fastgen.lab.load.engine_target import EngineTarget
    from fastgen.lab.load.generator import LoadGenerator

    model = setting.measured_model()
    requests, clients, rounds, tenth = (6, 2, 1, 10) if setting.small else (_NUM_REQUESTS, _CLIENTS, _ROUNDS, 1)
    workload = Paper(
        mean_prompt_tokens=_PROMPT // tenth,
        mean_new_tokens=_ANSWER // tenth + 2,
        num_requests=requests,
        lengths="clamped",
    )
    llm = fastgen.load(model, token_budget=_TOKEN_BUDGET, max_num_seqs=32, prefix_caching=False)
    timelines: dict[str, Any] = {}
    with EngineTarget(llm.release_engine(), {"model": str(model).rstrip("/").rpartition("/")[2]}) as target:
        vocab_size = target.engine.vocab_size

        def measure(number: int) -> Any:
            found = LoadGenerator(target)(
                workload.requests(vocab_size=vocab_size, seed=number),
                ClosedLoop(clients, stagger_s=STAGGER_S, seed=number),
                workload.facts(),
            )
            recording = target.engine.recorder.recording("model")
            timelines[recording.header.engine.policy] = Timeline.of(recording)
            return found

        found = policies(target, _NAMES, measure, num_rounds=rounds)
        about = target.facts()
    shown = same_interval(timelines, num_steps=_NUM_STEPS)
    return {
        "model": about["model"],
        "workload": workload.facts(),
        "clients": clients,
        "rounds": rounds,
        "token_budget": _TOKEN_BUDGET,
        "invalid": {turn.policy: turn.run.header.invalid for turn in found.turns if turn.run.header.invalid},
        "policies": {name: kept(found.run(name)) for name in _NAMES},
        "timelines": {name: timeline.as_json() for name, timeline in shown.items()},
    }


def section(result: Result) -> str:
    """Returns the table of policies, and what it says."""
    rows = [
        (
            f"`{name}`",
            _interval(figures, "request_throughput"),
            _interval(figures, "median_ttft_ms"),
            " / ".join(three(value(figures, f"p{percent}_itl_ms")) for percent in _PERCENTS),
            share(value(figures, "effective_share_4")),
        )
        for name, figures in result["policies"].items()
    ]
    workload = result["workload"]
    intro = (
        f"`{result['model']}` with random weights on this machine's CPU: {workload['n']} requests of about "
        f"{workload['prompt']} and {workload['answer']} tokens a turn, {result['clients']} clients, "
        f"{result['rounds']} rounds in which every policy has a turn, token budget {result['token_budget']}. The "
        "engine, its weights and the requests of a round are the same for all policies."
    )
    headings = (
        "policy",
        "requests/s",
        "TTFT P50 (ms)",
        "gaps " + " / ".join(f"P{percent}" for percent in _PERCENTS) + " (ms)",
        "good at 4 tokens/s",
    )
    warning = "".join(f"\n\n`{name}` has an invalid turn: {why}." for name, why in result["invalid"].items())
    gaps = {name: value(figures, "p95_itl_ms") for name, figures in result["policies"].items()}
    account = (
        f"The P95 gap of `prefill_first` is {gaps['prefill_first'] / gaps['splitfuse']:.1f} times that of `splitfuse`, "
        f"and that of `orca` {gaps['orca'] / gaps['splitfuse']:.1f} times. In the paper it is 3.7 times, with prompts "
        "of 2,600 tokens on four A100s, where a whole prompt takes as long as twenty decodes. A CPU computes a token "
        "of a prompt at nearly the cost of a decode, so a pass of the budget takes long under every policy, and what "
        "splitting can save is smaller. Brackets are 95 % intervals; the machine has two shared cores."
    )
    return f"{intro}{warning}\n\n{table(headings, rows)}\n\n{account}"


def _interval(figures: Result, name: str) -> str:
    found = measured(figures, name)
    if found is None or found.low is None or found.high is None:
        return three(None if found is None else found.value)
    return f"{three(found.value)} [{three(found.low)}, {three(found.high)}]"


def pictures(result: Result) -> dict[str, Figure]:
    """Returns percentiles of gaps, and steps over time under each policy."""
    bars = [
        Bars(name, tuple(measured(figures, f"p{percent}_itl_ms") for percent in _PERCENTS))
        for name, figures in result["policies"].items()
    ]
    groups = [f"P{percent}" for percent in _PERCENTS]
    steps = {name: Timeline.from_json(found) for name, found in result["timelines"].items()}
    return {
        "policies_token_gaps": bar_plot(groups, bars, x="percentile", y="gap between tokens (ms)"),
        "policies_steps": policy_timeline(steps),
    }


POLICIES: Final = Reproduction("policies", "Three policies on this machine's CPU, measured", run, section, pictures)
