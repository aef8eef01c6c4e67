"""Compares results with the goals: a table of floor, goal and measured, and the exit status.

Goals are those of an H200. On another GPU the goals that memory or matrix units limit are scaled by what this machine's
copy or matrix product reaches beside :data:`H200`; the others stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.measuring import Limits, Row

# What an H200 is expected to reach; only GPUs of another name are compared with it.
H200 = Limits(copy_bytes_per_s=4.2e12, gemm_flops_per_s=7.0e14)
_LARGE_BYTES = 64 << 20  # of keys and values, from which on decode attention has a goal
_MANY_TOKENS = 2048  # from which on elementwise kernels have a goal

PASSED, MISSED, UNMEASURED = 0, 1, 3  # exit statuses

Parts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A figure to be reached: at least ``floor``, or at most where ``less_is_better``. ``find`` returns the measured
    number of a part's rows, ``None`` where there is none. ``unit`` is a multiple of the rows' unit, with its name.
    """

    name: str
    part: str
    floor: float
    goal: float
    unit: tuple[float, str]
    find: Callable[[list[Row]], float | None]
    less_is_better: bool = False
    scaled_by: Literal["copy", "gemm", ""] = ""

    def scaled(self, limits: Limits | None) -> tuple[float, float]:
        """Returns floor and goal for a machine with these limits; ``None`` for an H200."""
        if limits is None or not self.scaled_by:
            return self.floor, self.goal
        key = {"copy": "copy_bytes_per_s", "gemm": "gemm_flops_per_s"}[self.scaled_by]
        ratio = getattr(limits, key) / getattr(H200, key)
        return (
            (self.floor / ratio, self.goal / ratio) if self.less_is_better else (self.floor * ratio, self.goal * ratio)
        )


@dataclass(frozen=True)
class Line:
    """A row of the table. ``state`` is one of goal, floor, MISSED, not measured."""

    goal: Goal
    floor: float
    target: float
    measured: float | None

    @property
    def state(self) -> str:
        if self.measured is None:
            return "not measured"
        sign = -1 if self.goal.less_is_better else 1
        if sign * self.measured >= sign * self.target:
            return "goal"
        return "floor" if sign * self.measured >= sign * self.floor else "MISSED"


def _named(begin: str, key: str) -> Callable[[list[Row]], float | None]:
    """Finds ``key`` in the row whose case begins so."""
    return lambda rows: next((row[key] for row in rows if row.get("case", "").startswith(begin) and key in row), None)


def _best_of_each(rows: list[Row], key: str) -> list[float]:
    """Returns the best of each size over tilings and block sizes: an engine takes the best tiling."""
    best: dict[str, float] = {}
    for row in rows:
        size = row["case"].split(",")[0]
        best[size] = max(best.get(size, 0.0), row[key])
    return list(best.values())


def _prefill(rows: list[Row]) -> float | None:
    found = [row for row in rows if "flops_per_s" in row]
    return min(_best_of_each(found, "flops_per_s"), default=None)


def _decode(rows: list[Row]) -> float | None:
    found = [row for row in rows if "bytes_per_s" in row and row.get("kv_bytes", 0) >= _LARGE_BYTES]
    return min(_best_of_each(found, "fraction_of_copy"), default=None)


def _elementwise(rows: list[Row]) -> float | None:
    sizes = [(row, row["case"].rpartition(" × ")[2]) for row in rows if "fraction_of_copy" in row]
    return min((row["fraction_of_copy"] for row, size in sizes if int(size) >= _MANY_TOKENS), default=None)


def _idle(rows: list[Row]) -> float | None:
    return max((row["idle_seconds"] for row in rows if "idle_seconds" in row), default=None)


def _last_rate(rows: list[Row]) -> float | None:
    return next((row["requests_per_s"] for row in reversed(rows) if "requests_per_s" in row), None)


_MS, _US, _S = (1e-3, "ms"), (1e-6, "µs"), (1.0, "s")
_LESS: dict[str, Any] = {"less_is_better": True}
GOALS = (
    Goal("attention, prefill of 4096 and more", "attention", 450, 630, (1e12, "TFLOP/s"), _prefill, scaled_by="gemm"),
    Goal("attention, decode, 64 MiB and more", "attention", 0.80, 0.90, (1.0, "of copy"), _decode),
    Goal("elementwise, 2048 tokens and more", "elementwise", 0.85, 0.92, (1.0, "of copy"), _elementwise),
    Goal("7B step, batch 1", "decode", 3.70, 3.45, _MS, _named("batch 1,", "seconds"), **_LESS, scaled_by="copy"),
    Goal("7B step, batch 32", "decode", 8.8, 8.0, _MS, _named("batch 32,", "seconds"), **_LESS, scaled_by="copy"),
    Goal("7B step, batch 256", "decode", 25.5, 23.5, _MS, _named("batch 256,", "seconds"), **_LESS, scaled_by="copy"),
    Goal("idle between steps", "decode", 50, 20, _US, _idle, **_LESS),
    Goal("capture of a graph", "decode", 30, 15, _MS, _named("capture", "seconds_per_graph"), **_LESS),
    Goal("SplitFuse 2600/60", "splitfuse", 11, 12.5, (1.0, "requests/s"), _last_rate, scaled_by="gemm"),
    Goal("warm start", "start", 15, 8, _S, _named("warm", "seconds"), **_LESS),
    Goal("transformers over fastgen", "transformers", 4, 4, (1.0, "times"), _named("transformers over", "ratio")),
)


def lines(parts: Parts, device: str) -> list[Line]:
    """Returns a line for each goal. ``parts`` are results as :mod:`benchmarks.gpu` writes them, of ``device``."""
    found = []
    for goal in GOALS:
        part = parts.get(goal.part, {})
        limits = Limits(**part["limits"]) if "limits" in part and "H200" not in device else None
        measured = goal.find([row for row in part.get("rows", ()) if "error" not in row])
        floor, target = goal.scaled(limits)
        found.append(Line(goal, floor, target, None if measured is None else measured / goal.unit[0]))
    return found


def errors(parts: Parts) -> list[str]:
    """Returns the cases that failed, gates and tests among them, and the parts that broke off."""
    broken = [
        f"{name}: {part['ended']}"
        for name, part in parts.items()
        if part.get("ended", "").startswith("with status") and not any("error" in row for row in part.get("rows", ()))
    ]
    return [*_with(parts, "error"), *broken]


def _with(parts: Parts, key: str) -> list[str]:
    return [
        f"{name}: {row.get('case', '')}: {row[key]}"
        for name, part in parts.items()
        for row in part.get("rows", ())
        if key in row
    ]


def verdict(parts: Parts, device: str, *, wanted: list[str]) -> tuple[str, int]:
    """Returns the table of the goals of the ``wanted`` parts, and the exit status: :data:`MISSED` where a floor is
    missed or a case failed, else :data:`UNMEASURED` where something is missing, else :data:`PASSED`. Cases that were
    left out are listed.
    """
    parts = {name: part for name, part in parts.items() if name in wanted}
    found = [line for line in lines(parts, device) if line.goal.part in wanted]
    failed = errors(parts)
    rows: list[tuple[str, ...]] = [("", "floor", "goal", "measured", "")]
    for line in found:
        unit = line.goal.unit[1]
        numbers = (f"{number:.3g}" for number in (line.floor, line.target))
        rows.append((line.goal.name, *numbers, _shown(line.measured, unit), line.state))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    scaled = "" if "H200" in device else f"goals of an H200, scaled to {device} where memory or matrix units limit\n"
    text = f"{scaled}{table}\n"
    if failed:
        text += "failed:\n" + "".join(f"  {each}\n" for each in failed)
    if missing := _with(parts, "left_out"):
        text += "left out:\n" + "".join(f"  {each}\n" for each in missing)
    ended = [name for name in wanted if "ended" in parts.get(name, {"ended": ""})]
    if failed or any(line.state == "MISSED" for line in found):
        return text, MISSED
    is_part = ended or missing or any(line.measured is None for line in found)
    return text, UNMEASURED if is_part else PASSED


def _shown(measured: float | None, unit: str) -> str:
    return "-" if measured is None else f"{measured:.3g} {unit}"
