"""Writes docs/status.md, and the README's rows on what was measured: ``python -m tools.status``.

The words are in ``tools/status.md.j2`` and ``tools/readme_rows.md.j2``. A figure of a file in ``benchmarks/results`` is
an expression over it where it may be measured again, so that a new measurement changes the page. One that no file has
is marked as not recorded.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import replicas, serving
from benchmarks.cpu.comparison import FORMATS, against_best, looks_below, models_of, weight_bytes
from benchmarks.cpu.engines.protocol import ADAPTERS
from benchmarks.cpu.evidence import LEAST_STEADY, Figure, Lack
from benchmarks.cpu.report import machine
from benchmarks.cpu.targets import TARGETS
from benchmarks.gpu import verdict
from benchmarks.result_files import RESULTS, build, files

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "status.md"
README = ROOT / "README.md"
_MEASURED = ("turns", "samples", "steps")  # of a model, in a file of whole models
# Errors of simulations that are wanted at most.
_MOST_ERROR = {"mean_tpot_ms": 0.05, "mean_e2el_ms": 0.05, "p50_ttft_ms": 0.10, "p99_ttft_ms": 0.15}
_WORKLOADS = {
    "W1": "one stream",
    "W2": "prompt of 2048",
    "W3": "mixed serving",
    "W4": "sixteen streams",
}


def render(results: Path = RESULTS, template: str = "status.md.j2") -> str:
    """Returns a page made of the newest results of each kind.

    Raises:
        jinja2.UndefinedError: The words name a figure that the results do not have.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"range": spread, "median": statistics.median, "within_turns": within_turns}
    environment.filters |= {"keeps_goals": keeps_goals, "over_rounds": over_rounds, "by_target": by_target}
    environment.filters["kind_of_attack"] = lambda how: how.partition(":")[0]
    return environment.from_string((ROOT / "tools" / template).read_text()).render(
        newest=lambda kind: newest(results, kind),
        since=lambda kind, first: since(results, kind, first),
        speeds_of=newest_of_each_model(results),
        named=lambda stem: json.loads((results / f"{stem}.json").read_text()),
        build=build,
        has=lambda kind: bool(files(results, kind)),
        headline=headline,
        token_gaps=token_gaps(results),
        more_bytes=more_bytes,
        lost=lambda entry, side: value_of(serving.loss(entry, side)),
        losses=losses,
        speeds=speeds,
        misses=misses,
        doubts=doubts,
        gpu_goals=lambda kind: gpu_goals(results, kind),
        machine=machine,
        http_loss=lambda entry, side: serving.shown(serving.loss(entry, side)),
        first_token_added_ms=serving.first_token_added_ms,
        replica_loss=lambda entry: serving.shown(replicas.loss(entry["turns"])),
        replica_added_ms=lambda entry: replicas.first_token_added_ms(entry["first_token_ms"]),
        least_steady=LEAST_STEADY,
    )


def newest(results: Path, kind: str) -> dict[str, Any]:
    """Returns the last file of a kind, with its ``link`` in the page."""
    return _with_link(files(results, kind)[-1])


def since(results: Path, kind: str, first: str) -> list[dict[str, Any]]:
    """Returns the files of a kind from the one with the stem ``first`` on, the newest last, as :func:`newest` does."""
    paths = files(results, kind)
    return [_with_link(path) for path in paths[[path.stem for path in paths].index(first) :]]


def _with_link(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data | {"link": f"[{path.stem}](../benchmarks/results/{path.name})"}


def newest_of_each_model(results: Path) -> list[dict[str, Any]]:
    """Returns the measurements of whole models on a CPU, the newest first, each with its ``link`` and with the models
    that no newer one has. Those without such a model are left out.
    """
    found: list[dict[str, Any]] = []
    for path in reversed(files(results, "cpu_models")):
        data = json.loads(path.read_text())
        models = set(models_of(data)).difference(*map(models_of, found))
        kept = {kind: [each for each in data.get(kind, ()) if each["model"] in models] for kind in _MEASURED}
        if models:
            found.append(_with_link(path) | kept)
    return found


def gpu_goals(results: Path, kind: str) -> dict[str, Any]:
    """Returns the ``lines`` of the verdict on the newest measurement of each part in the files of a kind, and ``links``
    to these files."""
    paths = files(results, kind)
    datas = [json.loads(each.read_text()) for each in paths]
    parts = {name: part for data in datas for name, part in data["parts"].items()}
    links = ", ".join(f"[{each.stem}](../benchmarks/results/{each.name})" for each in paths)
    return {"lines": verdict.lines(parts, datas[-1]["about"]["device"]), "links": links}


def token_gaps(results: Path) -> dict[str, dict[str, Any]]:
    """Returns the newest measurement of token gaps, ``quiet``. With it come one beside other work, ``busy``, and one of
    a single target, ``quiet, one target``, if they are as new."""
    quiet = newest(results, "token_gaps")
    more = {"busy": "token_gaps_busy_machine", "quiet, one target": "token_gaps_40_ms"}
    others = {label: newest(results, kind) for label, kind in more.items()}
    return {"quiet": quiet} | {label: file for label, file in others.items() if file["date"] >= quiet["date"]}


def by_target(runs: Sequence[dict[str, Any]]) -> dict[float | None, list[dict[str, Any]]]:
    """Returns the runs of each target, of those without one under ``None``, in the order of the first."""
    targets = dict.fromkeys(run["itl_target_ms"] for run in runs)
    return {target: [run for run in runs if run["itl_target_ms"] == target] for target in targets}


def over_rounds(values: Sequence[float], shape: str = "{:g}") -> str:
    """Writes the median, with the least and the greatest value where there are several."""
    middle = shape.format(statistics.median(values))
    return f"{middle} ({spread(values, shape)})" if len(values) > 1 else middle


def spread(values: Sequence[float], shape: str = "{:g}") -> str:
    """Writes the least and the greatest value, or one number where they look the same."""
    least, greatest = shape.format(min(values)), shape.format(max(values))
    return least if least == greatest else f"{least} to {greatest}"


def within_turns(compared: Mapping[str, Any]) -> str:
    """Writes how far another tool's figure is from ours within a turn, with the interval of that."""
    low, high = compared["difference_interval"]
    return f"{100 * compared['difference']:+.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def keeps_goals(accuracy: Mapping[str, Any]) -> bool:
    """Returns whether a simulated load keeps every goal of accuracy that it has a figure for."""
    error = accuracy["error"]
    return all(error.get(figure, 0.0) <= most for figure, most in _MOST_ERROR.items())


def more_bytes(model: str) -> list[float]:
    """Returns how many percent more of int4 weights each other engine reads for a token than fastgen does."""
    ours = weight_bytes(model, "fastgen", "int4")
    assert ours is not None
    sizes = [size for engine in ADAPTERS if engine != "fastgen" and (size := weight_bytes(model, engine, "int4"))]
    return [100 * (size / ours - 1) for size in sizes]


def value_of(found: Figure | Lack) -> float:
    """Returns the figure's value. Raises ``ValueError`` where there is none."""
    if isinstance(found, Lack):
        raise ValueError(f"no figure: {found.reason}")
    return found.value


def losses(http: Sequence[float], library: Sequence[float]) -> list[float]:
    """Returns the throughput that each round lost, in percent."""
    return [100 * (1 - ours / theirs) for ours, theirs in zip(http, library, strict=True)]


def compared(data: dict[str, Any]) -> list[tuple[str, str, dict[str, Figure | Lack]]]:
    """Returns for each model and format, by workload, fastgen's speed over the best other engine."""
    return [
        (model, each, {name: against_best(name)(data, model, each) for name in _WORKLOADS})
        for model in models_of(data)
        for each in FORMATS
    ]


def speeds(data: dict[str, Any]) -> str:
    """Writes a table of fastgen's speed over the best other engine, for each model, format and workload."""
    lines = [
        "| model | format | " + " | ".join(f"{what} ({name})" for name, what in _WORKLOADS.items()) + " |",
        "|---" * (2 + len(_WORKLOADS)) + "|",
    ]
    for model, weight_format, found in compared(data):
        lines.append(f"| {model} | {weight_format} | {' | '.join(map(_cell, found.values()))} |")
    return "\n".join(lines)


def _cell(found: Figure | Lack) -> str:
    if isinstance(found, Lack):
        return f"– ({found.reason.removeprefix('turns that were steady: ')})"
    return f"{found.engine} {found.value:.2f} ({found.least:.2f} to {found.most:.2f}, {found.num_steady} turns)"


def misses(data: dict[str, Any]) -> list[str]:
    """Writes every floor that was missed."""
    return [
        f"{model}, {weight_format}: {target.what}: {found.value:.2f} of {floor:g}"
        for model in models_of(data)
        for target in TARGETS
        for weight_format, floor in target.floors.items()
        if isinstance(found := target.result(data, model, weight_format), Figure)
        if not target.reached(found.value, floor)
    ]


def doubts(data: dict[str, Any]) -> list[str]:
    """Writes every floor beside other engines that too few turns leave open, and that looks missed by what there is."""
    return [
        f"{model}, {weight_format}: {_WORKLOADS[name]} ({name}), floor {floor:g}"
        for model in models_of(data)
        for name in _WORKLOADS
        for target in TARGETS
        if f"({name}), over the best engine" in target.what
        for weight_format, floor in target.floors.items()
        if looks_below(data, model, weight_format, name, floor)
    ]


def headline(measured: Sequence[dict[str, Any]]) -> str:
    """Writes the README's words on speed: the least favourable of all ratios that were ``measured``, what is missed,
    and what looks missed.
    """
    cells = [
        (model, weight_format, name, each, f"on {data['about']['machine']} with {data['about']['threads']} threads")
        for data in measured
        for model, weight_format, found in compared(data)
        for name, each in found.items()
    ]
    figures = [
        (model, weight_format, name, each, here)
        for model, weight_format, name, each, here in cells
        if isinstance(each, Figure)
    ]
    num_open = sum(len(doubts(data)) for data in measured)
    if not figures:
        few = f"; {num_open} of the required speeds look missed, and have too few turns for a figure"
        doubt = few if num_open else ""
        here = cells[0][-1]
        return f"no comparison with OpenVINO, llama.cpp, vLLM has {LEAST_STEADY} steady turns yet, {here}{doubt}"
    doubt = f"; {num_open} more look missed, and have too few turns for a figure" if num_open else ""
    model, weight_format, name, least, here = min(figures, key=lambda each: each[3].value)
    missed = [each for data in measured for each in misses(data) if "over the best engine" in each]
    models = {each[0] for each in figures}
    all_of = f", all of {model}" if len(models) == 1 < len({each[0] for each in cells}) else ""
    return (
        f"at least {least.value:.2f} times the best other engine run beside it, {here}, in the {len(figures)}"
        f" of {len(cells)} comparisons with enough steady turns{all_of} (least: {model}, {weight_format},"
        f" {_WORKLOADS[name]}, {least.engine})."
        f" Of the speeds required beside other engines, {len(missed)} are missed{doubt}"
    )


def with_rows(text: str, rows: str) -> str:
    """Returns the README with these rows in place of those that begin alike. Raises ``ValueError`` if it lacks one."""
    lines = text.split("\n")
    for row in rows.splitlines():
        begin = row[: row.index("|", 1) + 1]
        places = [place for place, line in enumerate(lines) if line.startswith(begin)]
        if len(places) != 1:
            raise ValueError(f"README.md has {len(places)} rows {begin!r}, not 1")
        lines[places[0]] = row
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(render())
    README.write_text(with_rows(README.read_text(), render(template="readme_rows.md.j2")))


if __name__ == "__main__":
    main()
