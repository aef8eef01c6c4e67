"""Runs that differ only in how much load they had belong to one series; a series has a name by what sets it apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastgen.lab.report.results import Result

# Facts that make a point of a series and not a series: how much was sent, and with which draw.
_LOAD_FACTS: Final = ("load.clients", "load.arrivals.rate", "target.replicas")
# What vllm bench calls them.
_OTHER_NAMES: Final = {"load.max_concurrency": "load.clients", "load.request_rate": "load.arrivals.rate"}
_NO_DIFFERENCE: Final = frozenset({*_LOAD_FACTS, "load.warm_ups", "load.seed", "load.num_prompts", "workload.n"})
_UNITS: Final = {"load.clients": "clients", "load.arrivals.rate": "requests/s sent", "target.replicas": "replicas"}


@dataclass(frozen=True)
class Series:
    """Results in the order of their load."""

    label: str
    results: tuple[Result, ...]


def facts(result: Result) -> dict[str, Any]:
    """Returns tool, target, workload and load of a run as one flat dictionary with dotted names."""
    about = result.summary.about
    found = _flat({name: about[name] for name in ("target", "workload", "load") if about.get(name)})
    return {"tool": result.summary.source} | {_OTHER_NAMES.get(name, name): value for name, value in found}


def load_of(result: Result, name: str) -> float | None:
    """Returns the load fact ``name`` of a run, a number; ``None`` if the run has none."""
    value = facts(result).get(name)
    return float(value) if isinstance(value, int | float) else None


def swept(results: Iterable[Result]) -> tuple[str, str] | None:
    """Returns the load fact in which the runs differ most, and its unit; ``None`` if they do not differ."""
    results = list(results)
    counts = {name: len({load_of(result, name) for result in results} - {None}) for name in _LOAD_FACTS}
    name = max(counts, key=lambda each: counts[each])
    return (name, _UNITS[name]) if counts[name] > 1 else None


def series(results: Sequence[Result]) -> list[Series]:
    """Returns the usable results in series, in the order of their first results."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for each in results:
        if each.usable:
            groups.setdefault(_identity(each), []).append(each)
    labels = _labels([dict(key) for key in groups])
    axis = swept(results)
    order = (lambda each: load_of(each, axis[0]) or 0.0) if axis else (lambda _: 0.0)
    return [
        Series(label, tuple(sorted(members, key=order))) for label, members in zip(labels, groups.values(), strict=True)
    ]


def _identity(result: Result) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in facts(result).items() if name not in _NO_DIFFERENCE)


def _labels(groups: list[dict[str, str]]) -> list[str]:
    """Returns a name for each group from the fewest facts that set them apart, the shortest names first."""
    chosen: list[str] = []
    names = sorted({name for group in groups for name in group}, key=lambda name: (name.count("."), len(name), name))
    for name in names:
        if _num_distinct(groups, [*chosen, name]) > _num_distinct(groups, chosen):
            chosen.append(name)
    if not chosen:
        return [group.get("workload.name", "all runs") for group in groups]
    short = [name.rpartition(".")[2] for name in chosen]
    return [
        ", ".join(_phrase(word, group.get(name)) for word, name in zip(short, chosen, strict=True)) for group in groups
    ]


def _num_distinct(groups: list[dict[str, str]], names: list[str]) -> int:
    return len({tuple(group.get(name) for name in names) for group in groups})


def _phrase(word: str, value: str | None) -> str:
    """Returns a fact in a label; one whose value is a word needs no name."""
    if value is None:
        return f"no {word}"
    return value if value[:1].isalpha() and value not in ("None", "True", "False") else f"{word} {value}"


def _flat(value: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{before}{name}.")
        else:
            yield f"{before}{name}", each
