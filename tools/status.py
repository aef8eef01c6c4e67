"""Writes docs/status.md: ``python -m tools.status``.

The words are in ``tools/status.md.j2``. Every measured figure in them is an expression over the files in
``benchmarks/results``, so that a new measurement changes the page and nobody copies numbers by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.cpu.targets import TARGETS, Figure, against_best

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "status.md"
RESULTS = ROOT / "benchmarks" / "results"
_WORKLOADS = {
    "W1": "one stream",
    "W2": "prompt of 2048",
    "W3": "mixed serving",
    "W4": "sixteen streams",
}


def render(results: Path = RESULTS) -> str:
    """Returns the page made of the newest results of each kind.

    Raises:
        jinja2.UndefinedError: The words name a figure that the results do not have.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"range": spread}
    template = environment.from_string((ROOT / "tools" / "status.md.j2").read_text())
    return template.render(newest=lambda kind: newest(results, kind), losses=losses, speeds=speeds, misses=misses)


def newest(results: Path, kind: str) -> dict[str, Any]:
    """Returns the last file of a kind, such as ``scheduler``, with its ``link`` in the page."""
    (*_, path) = sorted(
        each for each in results.glob(f"{kind}*.json") if each.stem[len(kind) :].lstrip("_0123456789-") == ""
    )
    data: dict[str, Any] = json.loads(path.read_text())
    return data | {"link": f"[{path.stem}](../benchmarks/results/{path.name})"}


def spread(values: Sequence[float], shape: str = "{:g}") -> str:
    """Writes the least and the greatest value."""
    return f"{shape.format(min(values))} to {shape.format(max(values))}"


def losses(http: Sequence[float], library: Sequence[float]) -> list[float]:
    """Returns the throughput that each round lost, in percent."""
    return [100 * (1 - ours / theirs) for ours, theirs in zip(http, library, strict=True)]


def speeds(data: dict[str, Any]) -> str:
    """Writes a table of fastgen's speed over the best other engine, for each model, format and workload."""
    lines = [
        "| model | format | " + " | ".join(f"{what} ({name})" for name, what in _WORKLOADS.items()) + " |",
        "|---" * (2 + len(_WORKLOADS)) + "|",
    ]
    for model in dict.fromkeys(each["model"] for each in [*data["samples"], *data["turns"]]):
        for weight_format in ("fp32", "bf16", "int8", "int4"):
            cells = [_cell(against_best(each)(data, model, weight_format)) for each in _WORKLOADS]
            lines.append(f"| {model} | {weight_format} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "not measured"
    engine, *_ = figure.basis.split(",")
    return f"{engine} {figure.value:.2f}{' (uncertain)' if figure.uncertainty else ''}"


def misses(data: dict[str, Any]) -> list[str]:
    """Writes every floor that was missed, and every figure that is uncertain."""
    return [
        f"{model}, {weight_format}: {target.what}: {said}"
        for model in dict.fromkeys(each["model"] for each in [*data["samples"], *data["turns"]])
        for target in TARGETS
        for weight_format, floor in target.floors.items()
        if (figure := target.figure(data, model, weight_format)) is not None
        if (said := _shortfall(target.reached, figure, floor))
    ]


def _shortfall(reached: Callable[[float, float], bool], figure: Figure, floor: float) -> str:
    if figure.uncertainty:
        return f"uncertain, {figure.value:.2f} of {floor:g} ({figure.uncertainty})"
    return "" if reached(figure.value, floor) else f"missed, {figure.value:.2f} of {floor:g}"


def main() -> None:
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
