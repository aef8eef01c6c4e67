"""Figures that compare fastgen with other engines: turns of both, for each model, format and workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.cpu.engines.protocol import ADAPTERS, BITS
from benchmarks.cpu.evidence import Data, Evidence, Figure, Lack, around, evidence, is_steady_turn
from benchmarks.cpu.models import SHAPES

FORMATS = tuple(ADAPTERS["fastgen"].formats)


def decode_rate(run: Data) -> float | None:
    return None if run["decode_rate"] is None else float(run["decode_rate"])


def new_rate(run: Data) -> float:
    return float(run["new_tokens"] / run["seconds"])


def prompt_rate(run: Data) -> float:
    return float(run["prompt_tokens"] / run["seconds"])


def request_rate(run: Data) -> float:
    """Returns a workload's total work a second."""
    return float(1 / run["seconds"])


# By which figure engines are compared; more is better.
RATES: dict[str, Callable[[Data], float | None]] = {
    "W1": decode_rate,
    "W2": prompt_rate,
    "W3": request_rate,
    "W4": new_rate,
}


def our_format(weight_format: str) -> str:
    """Returns fastgen's format of as many bits."""
    return next(each for each in FORMATS if BITS[each] == BITS[weight_format])


def models_of(data: Data) -> list[str]:
    """Returns the models that a file has something of, the smallest first."""
    found = {each["model"] for kind in ("turns", "samples", "steps") for each in data.get(kind, ())}
    return [model for model in SHAPES if model in found]


def turns_of(data: Data, model: str, engine: str, weight_format: str, workload: str) -> Evidence | None:
    key = {"model": model, "engine": engine, "format": weight_format, "workload": workload}
    return evidence((each for each in data.get("turns", ()) if key.items() <= each.items()), is_steady_turn, "turns")


def beside(data: Data, model: str, engine: str, weight_format: str, workload: str) -> Figure | Lack:
    """Returns fastgen's speed over the other engine's in the same turn."""
    found = turns_of(data, model, engine, weight_format, workload)
    if found is None:
        return Lack(absence(data, model, engine, weight_format))
    figure = found.figure(lambda turn: ratio_of(turn, workload))
    return figure.beside(engine) if isinstance(figure, Figure) else figure


def ratio_of(turn: Data, workload: str) -> float | None:
    ours, theirs = (RATES[workload](turn[side]) for side in ("ours", "theirs"))
    return None if ours is None or theirs is None else ours / theirs


def absence(data: Data, model: str, engine: str, weight_format: str) -> str:
    """Returns why an engine has no turns at all."""
    facts = data["engines"].get(f"{model} / {engine} / {weight_format}")
    if facts is None:
        return "no run of it is recorded"
    return str(facts.get("absent", "not run in turns"))


def rows(data: Data, model: str, weight_format: str, workload: str) -> list[tuple[str, str, Figure | Lack]]:
    """Returns for every other engine its name, its format of as many bits, and fastgen's speed over it."""
    found: list[tuple[str, str, Figure | Lack]] = []
    for engine, adapter in ADAPTERS.items():
        if engine == "fastgen":
            continue
        formats = [each for each in adapter.formats if BITS[each] == BITS[weight_format]]
        found += [(engine, each, beside(data, model, engine, each, workload)) for each in formats]
        if not formats:
            found.append((engine, weight_format, Lack("the benchmark has no such weights for it")))
    return found


def against_best(workload: str) -> Callable[[Data, str, str], Figure | Lack]:
    """Makes a figure of the smallest ratio over any other engine of as many bits."""

    def figure(data: Data, model: str, weight_format: str) -> Figure | Lack:
        every = rows(data, model, weight_format, workload)
        figures = [found for *_, found in every if isinstance(found, Figure)]
        if figures:
            return min(figures, key=lambda each: each.value)
        counted = [
            f"{engine}{'' if other == weight_format else f' in {other}'} {len(found.steady)} of {found.num_measured}"
            for engine, other, _ in every
            if (found := turns_of(data, model, engine, other, workload)) is not None
        ]
        return Lack(f"turns that were steady: {', '.join(counted)}" if counted else "no turns")

    return figure


def looks_below(data: Data, model: str, weight_format: str, workload: str, floor: float) -> bool:
    """Returns true if what turns there are, steady or not, are too few for a ratio and lie below the floor."""
    for engine, other, found in rows(data, model, weight_format, workload):
        turns = turns_of(data, model, engine, other, workload)
        if turns is not None and isinstance(found, Lack):
            ratios = [each for turn in turns.measured if (each := ratio_of(turn, workload)) is not None]
            if ratios and statistics.median(ratios) < floor:
                return True
    return False


def weight_bytes(model: str, engine: str, weight_format: str) -> float | None:
    """Returns the bytes of weights that one token reads, by the engine's file format; ``None`` if that is not known."""
    sizes = ADAPTERS[engine].bytes_per_weight.get(weight_format)
    if sizes is None:
        return None
    shape = SHAPES[model]
    return sizes[0] * shape.layer_weights + sizes[1] * shape.head_weights


def share_of_memory(model: str, engine: str, weight_format: str) -> Callable[[Data], float | None]:
    """Makes a figure of one stream's run: the bytes of weights it reads a second, over the read bandwidth meanwhile."""
    size = weight_bytes(model, engine, weight_format)

    def share(run: Data) -> float | None:
        rate = decode_rate(run)
        return None if rate is None or size is None else rate * size / around(run, "read")

    return share
