"""Says by how much an SLO is missed, and what limits the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.plan.arrangements import Arrangement, Point, Question, mean_record
from fastgen.lab.plan.capacity import Shape
from fastgen.lab.plan.steady import Steady, decode_work_of, mixed_work_of
from fastgen.runtime.goodput import PROMPT_RATE, is_first_token_in_time, longest_average_gap_s

# The part of the paper's rule that does not depend on the rate.
_PAPER_FIRST = "paper_first_token_ms"


@dataclass(frozen=True)
class Miss:
    """One limit that no arrangement keeps: the best value there is, in the limit's unit."""

    # "ttft_ms", or another field of :class:`SLO`; "paper_first_token_ms" is the paper's limit on the first token.
    name: str
    limit: float
    value: float
    # How many times the limit is exceeded.
    times: float
    # The work that takes most of the time, in words.
    limited_by: str

    def __str__(self) -> str:
        return (
            f"{self.name} is at best {self.value:.4g}, {self.times:.3g} times the limit of {self.limit:g}, limited by "
            f"{self.limited_by}"
        )


class Excess(NamedTuple):
    """The value of the mean answer, in the unit of a limit, and how many times the limit it is."""

    value: float
    limit: float
    times: float
    is_kept: bool


def excesses(slo: SLO, shape: Shape, steady: Steady) -> dict[str, Excess]:
    """Returns the excess of each limit, by the name that :class:`Miss` has for it."""
    record = mean_record(shape, steady)
    assert record.ttft_s is not None
    values_ms = {
        "ttft_ms": record.ttft_s,
        "tpot_ms": record.tpot_s or 0.0,
        "itl_ms": max(record.gaps_s, default=0.0),
        "e2el_ms": record.e2el_s,
    }
    found = {
        name: Excess(1e3 * value_s, limit, 1e3 * value_s / limit, value_s <= limit / 1e3)
        for name, value_s in values_ms.items()
        if (limit := getattr(slo, name)) is not None
    }
    if (rate := slo.paper_tokens_per_s) is not None:
        first_ms, limit_ms = 1e3 * record.ttft_s, 1e3 * shape.prompt / PROMPT_RATE
        in_time = is_first_token_in_time(shape.prompt, record.ttft_s)
        found[_PAPER_FIRST] = Excess(first_ms, limit_ms, first_ms / limit_ms, in_time)
        if gap_s := longest_average_gap_s(record.gaps_s):
            found["paper_tokens_per_s"] = Excess(1 / gap_s, rate, gap_s * rate, gap_s < 1 / rate)
    return found


def misses(question: Question, found: Iterable[Arrangement]) -> list[Miss]:
    """Returns the limits that are missed where all limits together are missed by least; none if some point keeps
    them."""
    slo = question.slo
    candidates = [(arrangement, point) for arrangement in found for point in arrangement.points]
    if slo is None or not candidates or any(not point.broken for _, point in candidates):
        return []

    def worst(candidate: tuple[Arrangement, Point]) -> float:
        return max(each.times for each in excesses(slo, question.shape, candidate[1].steady).values())

    arrangement, point = min(candidates, key=worst)
    return [
        Miss(name, excess.limit, excess.value, excess.times, _limited_by(question, arrangement, point, name))
        for name, excess in excesses(slo, question.shape, point.steady).items()
        if not excess.is_kept
    ]


def _limited_by(question: Question, arrangement: Arrangement, point: Point, name: str) -> str:
    shape, steady, sights = question.shape, point.steady, arrangement.costs[point.token_budget].sights
    if name in ("tpot_ms", "paper_tokens_per_s"):
        work = decode_work_of(shape, steady.decodes, sights)
    else:
        room = point.token_budget - steady.decodes
        work = mixed_work_of(shape, steady.decodes, min(shape.prompt, room), sights)
    where = (
        f"tensor_parallel={point.tensor_parallel} and {steady.clients} {'client' if steady.clients == 1 else 'clients'}"
    )
    if arrangement.roofline is None:
        return f"the measured steps, with {where}"
    return f"{arrangement.roofline.parts(work).limit}, with {where}"
