"""Writes a page of what was measured: ``python -m benchmarks.cpu.report FILE … > docs/performance.md``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cpu.comparison import (
    FORMATS,
    RATES,
    models_of,
    our_format,
    rows,
    share_of_memory,
    turns_of,
    weight_bytes,
)
from benchmarks.cpu.engines.protocol import ADAPTERS, BITS
from benchmarks.cpu.evidence import LEAST_STEADY, Data, Figure, Lack, around
from benchmarks.cpu.targets import TARGETS, Result, Target, outside_kernels, step_seconds

_ABOUT_WORKLOADS = {
    "W1": ("one request, prompt of 128 tokens, 128 new ones", "tokens/s while decoding"),
    "W2": ("one request, prompt of 2048 tokens, one new one", "prompt tokens/s"),
    "W3": ("32 requests at once, about 520 tokens of prompt and 26 new ones each", "seconds in all"),
    "W4": ("16 requests at once, prompts of 32 tokens, 128 new ones each", "new tokens/s"),
}
_RULES = f"""\
How the figures are made:

- Engines are compared *in turns*. fastgen and one other engine are loaded side by side and run alternately, A B and
  B A. fastgen's speed over the other's is taken within each turn. Engines that ran minutes apart are not compared.
- A turn is *steady* if the machine's own limits (read bandwidth, fp32 rate) moved by at most 15 % during each run, and
  the memory's speed beside the two runs differs by at most 15 %. Other turns are left out.
- A ratio is the median over at least {LEAST_STEADY} steady turns of one build, with the least and the greatest. Where
  there are fewer, there is no ratio, and the page says how many there are.
- Figures of fastgen alone follow the same rule: at least {LEAST_STEADY} steady runs or steps of one build, each between
  two measurements of the machine's limits.
- A build is a commit. Files made before 2026-11-23 do not record it; what they measured on one day counts as one build.
- "Over the best engine" is the smallest ratio over any engine of as many bits a weight that has one. The tables of the
  workloads say which engines have none, and why.
- A figure that is not possible, such as reading faster than the memory, is left out and reaches nothing.

What the comparison leaves open:

- `openvino-genai` runs with `INFERENCE_PRECISION_HINT=f32` in every format, so it has no 16-bit row. On a CPU with bf16
  units its default would be bf16. `openvino-genai default` leaves the precision to OpenVINO.
- Equal bits are not equal bytes. Each model has a table of the bytes that a token reads.
- Equal bits are not equal accuracy. The last table of each model has what the numeric gate found: in int8, for example,
  fastgen's worst token of the 110M model lies 33 times as far below the best logit as llama.cpp's."""
_CASES = {(1, 16): "1 request", (8, 16): "8 requests", (16, 16): "16 requests", (1, 4000): "1 request, 4,000 cached"}


def render(files: Sequence[Data], names: Sequence[str]) -> str:
    """Returns the page of results from ``benchmarks.cpu.in_turns`` and ``whole_model``; ``names`` are the files'. Each
    model is shown as the first file has it.
    """
    lines = [
        "# Performance on a CPU",
        "",
        f"Written by `python -m benchmarks.cpu.report {' '.join(names)}`;"
        " [benchmarks/README.md](../benchmarks/README.md) says how to measure again. Models have random weights.",
        "",
        _RULES,
    ]
    shown: set[str] = set()
    for data in files:
        models = [model for model in models_of(data) if model not in shown]
        shown |= set(models)
        for model in models:
            lines += ["", f"## {model}", "", *_about(data), *_targets(data, model)]
            for workload in RATES:
                lines += _workload(data, model, workload)
            lines += [*_sizes(model), *_steps(data, model), *_memory(data, model), *_engines(data, model)]
    return "\n".join(lines) + "\n"


def _about(data: Data) -> list[str]:
    about = data["about"]
    runs = [*data["samples"], *(turn[side] for turn in data.get("turns", ()) for side in ("ours", "theirs"))]
    text = f"Every figure of this section is of this machine: {machine(data)}."
    if runs:
        read, fp32, int8, mkl = (
            statistics.median(around(each, name) for each in runs) / 1e9 for name in ("read", "fp32", "int8", "mkl")
        )
        text += (
            f" Its limits, medians beside all runs: {read:.1f} GB/s read, {fp32:.0f} GFLOP/s in fp32 and"
            f" {int8:.0f} GOP/s in int8 from registers, {mkl:.0f} GFLOP/s in MKL's fp32 product of 512 x 2048 x 2048."
        )
    return [f"{text} First measured on {about['date'][:10]}."]


def machine(data: Data) -> str:
    about = data["about"]
    version, _, _ = about["kernel"].partition("-")  # the rest names a build of the kernel
    return f"{about['machine']}, {about['threads']} threads, Linux {version}"


def _targets(data: Data, model: str) -> list[str]:
    lines = ["", "### What was to be reached", ""]
    lines += _table("", "format", "measured", "least to most", "floor", "goal", "", "taken from")
    for target in TARGETS:
        for weight_format, floor in target.floors.items():
            found, goal = target.result(data, model, weight_format), target.goals[weight_format]
            shown, spread, basis = "–", "–", ""
            if isinstance(found, Figure):
                shown, spread, basis = f"{found.value:.2f}", _spread(found), found.basis
            cells = (target.what, weight_format, shown, spread, f"{floor:g}", f"{goal:g}")
            lines.append(_row(*cells, _verdict(target, found, floor, goal), basis))
    return lines


def _spread(found: Figure) -> str:
    return f"{found.least:.2f} to {found.most:.2f}"


def _verdict(target: Target, found: Result, floor: float, goal: float) -> str:
    if isinstance(found, Lack):
        return f"no figure: {found.reason}"
    reached = (name for name, bound in (("goal", goal), ("floor", floor)) if target.reached(found.value, bound))
    return next(reached, "missed")


def _workload(data: Data, model: str, name: str) -> list[str]:
    """Lists for each format how many times as fast fastgen is as each engine, or why that is not known."""
    what, unit = _ABOUT_WORKLOADS[name]
    lines = ["", f"### {name}: {what}", ""]
    heads = ["format", "engine", "fastgen's speed over it", "least to most", f"{unit}, both", "first token, s, both"]
    heads += ["gap p99, ms, both", *(["of the memory's speed, both"] if name == "W1" else []), "steady turns", "build"]
    lines += _table(*heads)
    absent: dict[str, list[str]] = {}
    for weight_format in FORMATS:
        for engine, other, found in rows(data, model, weight_format, name):
            turns = turns_of(data, model, engine, other, name)
            if turns is None:
                assert isinstance(found, Lack)
                absent.setdefault(f"{engine}: {found.reason}", []).append(other)
                continue
            counts = (f"{len(turns.steady)} of {turns.num_measured}", turns.build)
            if isinstance(found, Lack):
                lines.append(_row(other, engine, *["–"] * (len(heads) - 4), *counts))
                continue
            cells = [f"{found.value:.2f}", _spread(found), *_both_sides(data, model, engine, other, name)]
            lines.append(_row(other, engine, *cells, *counts))
    if absent:
        lines += ["", "Not compared:", ""]
        lines += [f"- {why} ({', '.join(dict.fromkeys(formats))})" for why, formats in absent.items()]
    return lines


def _both_sides(data: Data, model: str, engine: str, weight_format: str, name: str) -> list[str]:
    """Writes medians of fastgen and of the engine over the same steady turns."""
    turns = turns_of(data, model, engine, weight_format, name)
    assert turns is not None

    def both(shape: str, ours: Callable[[Data], float | None], theirs: Callable[[Data], float | None]) -> str:
        found = [turns.figure(lambda turn: ours(turn["ours"])), turns.figure(lambda turn: theirs(turn["theirs"]))]
        return " / ".join(shape.format(each.value) if isinstance(each, Figure) else "–" for each in found)

    def seconds(run: Data) -> float:
        return float(run["seconds"])

    def first(run: Data) -> float | None:
        return run["first_token_s"].get("p50")  # type: ignore[no-any-return]

    def gap_ms(run: Data) -> float | None:
        gap = run["gap_s"].get("p99")
        return None if gap is None else 1e3 * float(gap)

    speed = seconds if name == "W3" else RATES[name]
    cells = [both("{:.2f}" if name == "W3" else "{:.1f}", speed, speed)]
    cells += [both("{:.2f}", first, first), both("{:.1f}", gap_ms, gap_ms)]
    if name == "W1":
        ours = share_of_memory(model, "fastgen", our_format(weight_format))
        cells.append(both("{:.2f}", ours, share_of_memory(model, engine, weight_format)))
    return cells


def _sizes(model: str) -> list[str]:
    """Lists the bytes of weights that a token reads, by the formats of the engines' files."""
    formats = list(BITS)
    lines = ["", "### Weights that a token reads, MB", "", *_table("engine", *formats)]
    for engine in ADAPTERS:
        sizes = [weight_bytes(model, engine, each) for each in formats]
        lines.append(_row(engine, *("–" if size is None else f"{size / 1e6:.0f}" for size in sizes)))
    lines += ["", "By the definitions of the file formats, not by inspection. Vectors are left out: less than 1 %."]
    return lines


def _steps(data: Data, model: str) -> list[str]:
    lines = ["", "### Decode steps of fastgen: milliseconds, and the share during which no kernel runs", ""]
    lines += _table("format", *_CASES.values(), "build")
    formats = [each for each in FORMATS if isinstance(step_seconds(data, model, each, 1, 16), Figure)]
    for weight_format in formats:
        cells, builds = [], []
        for case in _CASES:
            seconds, share = (figure(data, model, weight_format, *case) for figure in (step_seconds, outside_kernels))
            if isinstance(seconds, Lack) or isinstance(share, Lack):
                cells.append("–")
                continue
            spread = f"{1e3 * seconds.least:.2f} to {1e3 * seconds.most:.2f}"
            cells.append(f"{1e3 * seconds.value:.2f} ({spread}), {share.value:.1%}")
            builds.append(seconds.build)
        lines.append(_row(weight_format, *cells, ", ".join(dict.fromkeys(builds))))
    return lines if formats else []


def _memory(data: Data, model: str) -> list[str]:
    """Lists the memory of loading, in MB."""
    entries = {each["format"]: each for each in data["steps"] if each["model"] == model}
    if not entries:
        return []
    lines = ["", "### Memory of loading, MB beyond what the process held before", ""]
    lines += _table("format", "weights a step reads", "held after loading", "most while loading")
    for weight_format, entry in entries.items():
        memory = entry["memory"]
        values = (entry["weight_bytes"], memory["after"] - memory["before"], memory["most"] - memory["before"])
        lines.append(_row(weight_format, *(f"{value / 1e6:.0f}" for value in values)))
    lines += ["", "Held after loading: those weights, the embedding table, and what of the KV cache was touched."]
    return lines


def _engines(data: Data, model: str) -> list[str]:
    found = {row: each for row, each in data["engines"].items() if row.startswith(f"{model} / ")}
    if not found:
        return []
    lines = ["", "### Engines, and what the numeric gate found", ""]
    lines += _table("engine", "format", "worst token below the greatest logit", "versions", "set up with")
    absent = []
    for row, facts in found.items():
        _, engine, weight_format = row.split(" / ")
        if "gate_below" not in facts:
            absent.append(f"- {engine} in {weight_format}: {facts.get('absent', 'not measured')}")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        options = ", ".join(f"{name} {value}" for name, value in facts["options"].items())
        lines.append(_row(engine, weight_format, f"{facts['gate_below']:.3g}", versions, options))
    return [*lines, *(["", "Not measured:", "", *absent] if absent else [])]


def _table(*heads: str) -> list[str]:
    return [_row(*heads), "|---" * len(heads) + "|"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    print(
        render([json.loads(each.read_text()) for each in options.files], [str(each) for each in options.files]), end=""
    )


if __name__ == "__main__":
    main()
