"""Measures one server by fastgen bench, vllm bench serve and guidellm in turns, and compares what they say.

``python -m benchmarks.lab.tools_in_turns [--vllm PYTHON] [--guidellm PROGRAM] [--output FILE] [--raw FILE]`` starts
``fastgen serve`` once. In each turn every tool sends the same load, in an order that moves on by one from turn to turn:
Poisson arrivals, texts of 64 tokens, answers of 32, no prefix cache. Each tool draws its own arrivals, so the loads
differ by chance. With ``--even`` the requests of every tool come at the same equal intervals. At a rate so low that
each is answered before the next one comes, only the tools differ. ``PYTHON`` is the interpreter of an environment with
vLLM, ``PROGRAM`` is guidellm's; a tool that is not named takes no part. Each tool runs in a process of its own.

A figure is the mean over the turns, with a t interval of 95 %: all requests of a run meet the machine in one state, so
how many there are says little about the next run. Two tools agree where the intervals overlap. Beside it stands the
mean difference of a turn, as a share of fastgen's value, with its own t interval. ``docs/lab-metrics.md`` says where
definitions differ. vLLM's ITL is the gap between chunks, so it is compared with fastgen's gap between chunks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.results import now
from benchmarks.new_file import new_file
from benchmarks.serving import served
from fastgen.lab.imports.results import read_results
from fastgen.lab.machine import machine_facts
from fastgen.lab.metrics.figures import Figure
from fastgen.lab.metrics.means import MAX_VALUES, mean_interval
from fastgen.lab.metrics.samples import samples
from fastgen.lab.metrics.statistics import described
from fastgen.lab.metrics.summary import Summary, summarize
from fastgen.lab.records import read_run
from fastgen.models.checkpoint.builtins import BUILTINS

NUM_PROMPT, NUM_ANSWER = 64, 32
FLAGS = "--num-threads 1 --no-prefix-caching"
# Figures beside the latencies.
OTHERS = ("request_throughput", "output_throughput", "total_input_tokens", "total_output_tokens", "completed")
# vLLM's intervals have a gamma distribution of this shape: they deviate from their mean by a thousandth.
_EVEN = "1e6"
# The values of each answered request, in milliseconds, by the latency's name.
Latencies = dict[str, list[list[float]]]
# vLLM's own program wants to know the version of a package that some builds have under another name.
_VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# Returns the command that measures, given the port, a directory for its files, and the number of the turn.
Command = Callable[[int, Path, int], Sequence[str]]


def commands(options: argparse.Namespace) -> dict[str, Command]:
    """Returns the command of each tool that takes part."""
    model, tokenizer = options.model, BUILTINS.get(options.model) or Path(options.model)
    arrivals = "constant" if options.even else "poisson"

    def ours(port: int, directory: Path, turn: int) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "fastgen", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"),
            *("--tokenizer", str(model), "--workload", f"fixed:prompt={NUM_PROMPT},answer={NUM_ANSWER}"),
            *("--num-prompts", str(options.requests), "--arrivals", f"{arrivals}:rate={options.rate}"),
            *("--prompts", "text", "--seed", str(turn), "--output", str(directory), "--json"),
        ]

    def vllm(port: int, directory: Path, turn: int) -> Sequence[str]:
        return [
            *(str(options.vllm), "-c", _VLLM_BENCH, "--backend", "openai", "--port", str(port), "--model", model),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--ignore-eos", "--seed", str(turn)),
            *("--random-input-len", str(NUM_PROMPT), "--random-output-len", str(NUM_ANSWER)),
            *("--num-prompts", str(options.requests), "--request-rate", str(options.rate), "--num-warmups", "1"),
            *("--burstiness", _EVEN if options.even else "1"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"),
            *("--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "vllm.json"),
            "--disable-tqdm",
        ]

    def guidellm(port: int, directory: Path, turn: int) -> Sequence[str]:
        target = f"http://127.0.0.1:{port}"
        return [
            *(str(options.guidellm), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={target},model={model},request_format=/v1/completions"),
            *("--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_ANSWER}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--profile", f"kind={arrivals},rate={options.rate}", "--seed", f"kind=static,value={turn}"),
            *("--constraint", f"kind=max_requests,count={options.requests}"),
            *("--output", f"kind=json,path={directory / 'guidellm.json'}"),
        ]

    found: dict[str, Command] = {"fastgen": ours}
    if options.vllm:
        found["vllm"] = vllm
    if options.guidellm:
        found["guidellm"] = guidellm
    return found


def measured(directory: Path) -> tuple[Summary, Latencies]:
    """Returns the summary of what a tool wrote, and the latencies of each answered request."""
    runs = sorted(directory.glob("*.jsonl"))
    if runs:
        run = read_run(runs[0])
        kept = run.complete
        found = {
            "ttft": [[1e3 * (each.ttft_s or 0.0)] for each in kept],
            "tpot": [[1e3 * (each.tpot_s or 0.0)] for each in kept],
            "itl": [[1e3 * gap_s for gap_s in each.gaps_s] for each in kept],
            # As vLLM counts: tokens of one chunk have no gap between them.
            "chunk": [[1e3 * gap_s for gap_s in each.gaps_s if gap_s] for each in kept],
            "e2el": [[1e3 * each.e2el_s] for each in kept],
        }
        return summarize(run), found
    (file,) = directory.glob("*.json")
    (summary,) = read_results(file)
    data = json.loads(file.read_text())
    return summary, _of_guidellm(data) if "benchmarks" in data else _of_vllm(data)


def _of_vllm(data: dict[str, Any]) -> Latencies:
    gaps = [[1e3 * gap_s for gap_s in each] for each in data["itls"]]
    entries = zip(data["ttfts"], gaps, data["output_lens"], data["errors"], strict=True)
    each = [(ttft_s, own, count) for ttft_s, own, count, error in entries if not error]
    return {
        "ttft": [[1e3 * ttft_s] for ttft_s, _, _ in each],
        "tpot": [[sum(own) / (count - 1)] for _, own, count in each if count > 1],
        "chunk": [own for _, own, _ in each],
        "e2el": [[1e3 * ttft_s + sum(own)] for ttft_s, own, _ in each],
    }


def _of_guidellm(data: dict[str, Any]) -> Latencies:
    requests = data["benchmarks"][0]["requests"]["successful"]
    return {
        "ttft": [[each["time_to_first_token_ms"]] for each in requests],
        "tpot": [[each["inter_token_latency_ms"]] for each in requests],
        "e2el": [[1e3 * each["request_latency"]] for each in requests],
    }


def figures_of(latencies: Latencies) -> dict[str, Figure]:
    """Returns mean, median and P99 of each latency. ``chunk`` is the gap between chunks."""
    return {
        f"{statistic}_{name}_ms": figure
        for name, values in latencies.items()
        for statistic, figure in described(samples(values)).items()
        if statistic in ("mean", "median", "p99")
    }


def turn_facts(summary: Summary, latencies: Latencies) -> dict[str, Any]:
    """Returns each figure of a run with its interval, and whether the run counts."""
    found = figures_of(latencies) | {name: summary[name] for name in OTHERS}
    figures = {name: plain(figure) for name, figure in found.items()}
    return {"source": summary.source, "invalid": summary.invalid, "figures": figures}


def plain(figure: Figure) -> list[Any]:
    interval = figure.interval and [round(float(end), 5) for end in figure.interval]
    return [None if figure.value is None else round(float(figure.value), 5), interval]


def compared(turns: Sequence[Mapping[str, Any]], other: str) -> dict[str, Any]:
    """Returns by figure how far ``other`` is from ours, over the turns that count."""
    counted = [turn for turn in turns if not turn["fastgen"]["invalid"]]
    found: dict[str, Any] = {}
    for name in turns[0][other]["figures"]:
        pairs = [tuple(turn[tool]["figures"][name][0] for tool in ("fastgen", other)) for turn in counted]
        pairs = [(mine, theirs) for mine, theirs in pairs if mine and theirs is not None]
        ours, our_interval = over_turns([mine for mine, _ in pairs])
        theirs, their_interval = over_turns([theirs for _, theirs in pairs])
        difference, difference_interval = over_turns([theirs / mine - 1 for mine, theirs in pairs])
        found[name] = {
            "ours": ours,
            "ours_interval": our_interval,
            "theirs": theirs,
            "theirs_interval": their_interval,
            "intervals_overlap": overlap(our_interval, their_interval) if our_interval and their_interval else None,
            "turns": len(pairs),
            "difference": difference,
            "difference_interval": difference_interval,
        }
    return found


def over_turns(values: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """Returns the mean of a figure over turns, and its t interval of 95 % if there are 2 to 12."""
    if not values:
        return None, None
    if not 2 <= len(values) <= MAX_VALUES:
        return round(statistics.fmean(values), 5), None
    mean, *ends = mean_interval(values)
    return round(mean, 5), [round(end, 5) for end in ends]


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def text(comparison: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table: for each figure and tool, how far it is from ours."""
    lines = []
    for tool, figures in comparison.items():
        lines.append(f"{tool} beside fastgen bench: means over turns, and the mean difference of a turn")
        for name, found in figures.items():
            low, high = found["difference_interval"] or (math.nan, math.nan)
            share = math.nan if found["difference"] is None else found["difference"]
            verdict = {True: "agree", False: "differ", None: "not known"}[found["intervals_overlap"]]
            lines.append(
                f"  {name:20} {_shown(found, 'ours')} {_shown(found, 'theirs')}  {verdict:9} "
                f"{100 * share:+7.2f} % [{100 * low:+.2f}, {100 * high:+.2f}]"
            )
    return "\n".join(lines)


def _shown(found: Mapping[str, Any], side: str) -> str:
    value, interval = found[side], found[f"{side}_interval"]
    if value is None:
        return f"{'–':>28}"
    return f"{value:9.3f}" + (f" [{interval[0]:7.2f}, {interval[1]:7.2f}]" if interval else " " * 19)


def run(options: argparse.Namespace, raw: Path) -> list[dict[str, Any]]:
    """Returns all turns. Raises ``RuntimeError`` if a tool fails."""
    tools, turns = commands(options), []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with served(options.model, shlex.split(options.server)) as port:
        for number in range(options.turns):
            names = list(tools)
            order = names[number % len(names) :] + names[: number % len(names)]
            turn: dict[str, Any] = {"date": now(), "order": order}
            for name in order:
                directory = raw / f"{number}-{name}"
                directory.mkdir(parents=True)
                command = tools[name](port, directory, number)
                done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
                turn[name] = turn_facts(*measured(directory))
            turns.append(turn)
            said = {name: f"{turn[name]['figures']['mean_ttft_ms'][0]:.2f} ms" for name in names}
            print(f"turn {number + 1}: mean TTFT {said}", flush=True)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--guidellm", help="guidellm's program")
    parser.add_argument("--model", default="tiny-llama", help="a built-in, or a directory with a model")
    parser.add_argument("--server", default=FLAGS, help="flags of fastgen serve")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--requests", type=int, default=500, help="requests of a run; a P99 takes 500")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--even", action="store_true", help="send requests at equal intervals")
    parser.add_argument("--output", type=new_file)
    parser.add_argument("--raw", type=Path, help="keep the tools' own results in this .tar.gz")
    options = parser.parse_args()
    if not options.vllm and not options.guidellm:
        parser.error("name --vllm, --guidellm or both")
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory, "raw")
        turns = run(options, raw)
        model = Path(options.model).name
        if options.raw:
            for file in (each for each in raw.rglob("*") if each.is_file()):  # results name no directory of the machine
                file.write_text(file.read_text().replace(options.model, model))
            with tarfile.open(options.raw, "w:gz") as archive:
                archive.add(raw, "raw")
    names = [name for name in commands(options) if name != "fastgen"]
    comparison = {tool: compared(turns, tool) for tool in names}
    print(text(comparison))
    load = {"prompt": NUM_PROMPT, "answer": NUM_ANSWER, "requests": options.requests, "rate": options.rate}
    load["arrivals"] = "constant" if options.even else "poisson"
    about = {"made": now(), "machine": machine_facts(), "model": model, "server": options.server, "load": load}
    if options.output:
        options.output.write_text(json.dumps({**about, "comparison": comparison, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
