"""Writes a page of what was measured: ``python -m benchmarks.cpu.report FILE … > docs/performance.md``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu.engines.protocol import BITS
from benchmarks.cpu.targets import (
    KERNELS_CHANGED,
    RATES,
    TARGETS,
    Data,
    Figure,
    Target,
    age_of,
    around,
    best_other,
    in_rounds,
    median_of,
    outside_kernels,
    rate,
    ratios_in_turns,
    read_by_stream,
    samples_of,
    step_seconds,
    turns_of,
)

_ABOUT_WORKLOADS = {
    "W1": ("one request, prompt of 128 tokens, 128 new ones", "tokens a second while decoding"),
    "W2": ("one request, prompt of 2048 tokens, one new one", "prompt tokens a second"),
    "W3": ("32 requests at once, about 520 tokens of prompt and 26 new ones each", "seconds in all"),
    "W4": ("16 requests at once, prompts of 32 tokens, 128 new ones each", "new tokens a second"),
}
_RULES = (
    "How to read the figures:",
    "",
    "- A run is *steady* if the machine's own limits (read bandwidth, fp32 rate) moved by at most 15 % meanwhile."
    " Medians are over steady runs. If no run was steady, they are over all runs.",
    "- *In turns*, fastgen and one other engine are loaded side by side and run alternately. A turn is steady if both"
    " runs were steady and the memory's speed beside them differs by at most 15 %.",
    "- *In rounds*, engines run minutes apart. Ratios stand in brackets if the memory's speed beside the two engines"
    " differs by more than 15 %, or a run was not steady.",
    '- "Over the best engine" is the smallest ratio over any engine of as many bits a weight. If an engine was'
    " measured in turns and in rounds, the less favourable figure counts, except that an uncertain figure never"
    " replaces a sound one. An uncertain figure is called *uncertain*, whatever bound it reaches.",
    f"- The kernels of {KERNELS_CHANGED[1]} changed at {KERNELS_CHANGED[0]} UTC. What was measured before is marked"
    ' "older build".',
    "",
    "What the comparison leaves open:",
    "",
    "- OpenVINO runs with `INFERENCE_PRECISION_HINT=f32` in every format, so it has no 16-bit row. On a CPU with bf16"
    " units its default would be bf16. The bf16 rows of fastgen and vLLM use these units.",
    "- Equal bits are not equal bytes. By their tools' defaults, llama.cpp keeps the head in 6 bits and OpenVINO in 8"
    " in their int4 files; fastgen's int4 rounds the head to 4 bits. For a token of the 110M model they read about 63"
    " and 65 MB, fastgen 57 MB. This part of the int4 lead is format.",
    "- Equal bits are not equal accuracy. The last table of each model has what the numeric gate found: in int8, for"
    " example, fastgen's worst token of the 110M model lies 33 times as far below the best logit as llama.cpp's.",
    '- "Not measured" names engines that have the format and lack a figure for the row.',
)
_CASES = {(1, 16): "1 request", (8, 16): "8 requests", (16, 16): "16 requests", (1, 4000): "1 request, 4,000 cached"}


def render(files: Sequence[Data], names: Sequence[str]) -> str:
    """Returns the page of results from ``benchmarks.cpu.whole_model``; ``names`` are those of the files."""
    lines = [
        "# Performance on a CPU",
        "",
        f"Written by `python -m benchmarks.cpu.report {' '.join(names)}`;"
        " [benchmarks/README.md](../benchmarks/README.md) says how to measure again. Models have random weights.",
        "",
        *_RULES,
    ]
    for data in files:
        every = [*data["samples"], *data.get("turns", ()), *data["steps"]]
        for model in dict.fromkeys(each["model"] for each in every):
            lines += ["", f"## {model}", "", *_about(data), *_targets(data, model)]
            for workload in RATES:
                lines += _workload(data, model, workload)
            lines += [*_steps(data, model), *_memory(data, model), *_engines(data, model)]
    return "\n".join(lines) + "\n"


def _about(data: Data) -> list[str]:
    about = data["about"]
    text = f"{about['machine']}, {about['threads']} threads, {about['date'][:10]}, Linux {about['kernel']}."
    samples = data["samples"]
    if samples:
        read, fp32, int8, mkl = (
            statistics.median(around(each, name) for each in samples) / 1e9 for name in ("read", "fp32", "int8", "mkl")
        )
        text += (
            f" The machine's limits, medians beside all samples: {read:.1f} GB/s read, {fp32:.0f} GFLOP/s in fp32 and"
            f" {int8:.0f} GOP/s in int8 from registers, {mkl:.0f} GFLOP/s in MKL's fp32 product of 512 x 2048 x 2048."
        )
    return [text]


def _targets(data: Data, model: str) -> list[str]:
    lines = [
        "",
        "### What was to be reached",
        "",
        "| | format | measured | floor | goal | | taken from |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        for weight_format, floor in target.floors.items():
            figure, goal = target.figure(data, model, weight_format), target.goals[weight_format]
            if figure is None:
                shown, verdict, basis = "–", "not measured", ""
            else:
                shown, verdict, basis = f"{figure.value:.2f}", _verdict(target, figure, floor, goal), figure.basis
                most = target.most and target.most(data, model, weight_format)
                if verdict == "missed" and most and not target.reached(most, floor):
                    verdict += f"; {most:.2f} at the memory's full speed"
            lines.append(f"| {target.what} | {weight_format} | {shown} | {floor:g} | {goal:g} | {verdict} | {basis} |")
    return lines


def _verdict(target: Target, figure: Figure, floor: float, goal: float) -> str:
    if figure.uncertainty:
        return f"uncertain: {figure.uncertainty}"
    return next(
        (name for name, bound in (("goal", goal), ("floor", floor)) if target.reached(figure.value, bound)), "missed"
    )


def _workload(data: Data, model: str, name: str) -> list[str]:
    """Lists engines of as many bits together, the best first, with how many times as fast fastgen is."""
    rows = {(each["engine"], each["format"]) for each in data["samples"] if each["model"] == model}
    found = [
        (engine, each, value) for engine, each in rows if (value := rate(data, model, engine, each, name)) is not None
    ]
    if not found:
        return _turns(data, model, name)
    what, figure = _ABOUT_WORKLOADS[name]
    heads = ["format", "engine", figure, "fastgen's over it", "first token, s", "gap p50 / p95 / p99, ms", "rounds"]
    heads.append("memory, GB/s")
    if name == "W1":
        heads.append("of the memory's speed meanwhile")
    lines = ["", f"### {name}: {what}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for engine, weight_format, value in sorted(found, key=lambda row: (-BITS[row[1]], -row[2])):
        samples = samples_of(data, model, engine, weight_format, name)
        shown = f"{1 / value:.2f}" if name == "W3" else f"{value:.1f}"
        over = "" if engine == "fastgen" else _in_rounds(data, model, engine, weight_format, name)
        first = median_of(samples, lambda each: each["first_token_s"].get("p50"))
        gaps = [median_of(samples, lambda each, p=part: each["gap_s"].get(p)) for part in ("p50", "p95", "p99")]
        shown_gaps = " / ".join("–" if gap is None else f"{1e3 * gap:.1f}" for gap in gaps)
        shown_first = "–" if first is None else f"{first:.2f}"
        speed = statistics.median(around(each, "read") for each in samples) / 1e9
        cells = [weight_format, engine, shown, over, shown_first, shown_gaps, str(len(samples)), f"{speed:.0f}"]
        if name == "W1":
            share = read_by_stream(data, model, engine, weight_format)
            cells.append("–" if share is None else f"{share:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    best = [best_other(data, model, each, name) for each in ("fp32", "bf16", "int8", "int4")]
    if not any(best):
        lines += ["", "No other engine was there to compare with."]
    return lines + _turns(data, model, name)


def _turns(data: Data, model: str, name: str) -> list[str]:
    rows = {(each["engine"], each["format"]) for each in data.get("turns", ()) if each["model"] == model}
    found = {row: ratios_in_turns(data, model, *row, name) for row in rows}
    if not any(found.values()):
        return []
    lines = [
        "",
        f"{name} in turns, each engine and fastgen loaded side by side: fastgen's speed over it in the same turn",
        "",
    ]
    heads = ["format", "engine", "median of steady turns", "of all", "least", "most", "steady", "turns", "taken"]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (engine, weight_format), ratios in sorted(found.items(), key=lambda row: (-BITS[row[0][1]], row[0])):
        if ratios:
            steady_ones = ratios_in_turns(data, model, engine, weight_format, name, steady_only=True)
            median = f"{statistics.median(steady_ones):.2f}" if steady_ones else "–"
            shown = " | ".join(f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))
            dates = sorted(each["date"] for each in turns_of(data, model, engine, weight_format, name))
            taken = f"{dates[0][:10]}{age_of(dates[0])}"
            cells = (weight_format, engine, median, shown, str(len(steady_ones)), str(len(ratios)), taken)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _in_rounds(data: Data, model: str, engine: str, weight_format: str, name: str) -> str:
    figure = in_rounds(data, model, engine, weight_format, name)
    if figure is None:
        return ""
    return f"({figure.value:.2f})" if figure.uncertainty else f"{figure.value:.2f}"


def _steps(data: Data, model: str) -> list[str]:
    formats = [each for each in BITS if step_seconds(data, model, each, 1, 16) is not None]
    if not formats:
        return []
    lines = ["", "### Decode steps of fastgen: milliseconds, and the share during which no kernel runs", ""]
    lines += [f"| format | {' | '.join(_CASES.values())} |", "|---" * (len(_CASES) + 1) + "|"]
    for weight_format in formats:
        cells = []
        for case in _CASES:
            seconds, share = (figure(data, model, weight_format, *case) for figure in (step_seconds, outside_kernels))
            cells.append("–" if seconds is None or share is None else f"{1e3 * seconds:.2f}, {share:.1%}")
        lines.append(f"| {weight_format} | {' | '.join(cells)} |")
    return lines


def _memory(data: Data, model: str) -> list[str]:
    """Lists the memory of loading, in MB."""
    entries = {each["format"]: each for each in data["steps"] if each["model"] == model}
    if not entries:
        return []
    lines = ["", "### Memory of loading, MB beyond what the process held before", ""]
    lines += ["| format | weights a step reads | held after loading | most while loading |", "|---|---|---|---|"]
    for weight_format, entry in entries.items():
        memory = entry["memory"]
        values = (entry["weight_bytes"], memory["after"] - memory["before"], memory["most"] - memory["before"])
        lines.append(f"| {weight_format} | {' | '.join(f'{value / 1e6:.0f}' for value in values)} |")
    lines += ["", "Held after loading: those weights, the embedding table, and what of the KV cache was touched."]
    return lines


def _engines(data: Data, model: str) -> list[str]:
    rows = {row: each for row, each in data["engines"].items() if row.startswith(f"{model} / ")}
    if not rows:
        return []
    head = "| engine | format | worst token below the greatest logit | versions | set up with |"
    lines = ["", "### Engines, and what the numeric gate found", "", head, "|---|---|---|---|---|"]
    absent = []
    for row, facts in rows.items():
        _, engine, weight_format = row.split(" / ")
        if "gate_below" not in facts:
            absent.append(f"- {engine} in {weight_format}: {facts.get('absent', 'not measured')}")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        options = ", ".join(f"{name} {value}" for name, value in facts["options"].items())
        lines.append(f"| {engine} | {weight_format} | {facts['gate_below']:.3g} | {versions} | {options} |")
    return [*lines, *(["", "Not measured:", "", *absent] if absent else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    print(
        render([json.loads(each.read_text()) for each in options.files], [str(each) for each in options.files]), end=""
    )


if __name__ == "__main__":
    main()
