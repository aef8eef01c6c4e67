"""Says by how much an SLO is missed, and what limits the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.plan.arrangements import Arrangement, Point, Question, mean_record
from fastgen.lab.plan.capacity import Shape
from fastgen.lab.plan.steady import Steady, decode_work_of, mixed_work_of
from fastgen.runtime.goodput import longest_average_gap_s

# The paper's limit on the first token, in prompt tokens a second.
_PAPER_PROMPT_RATE = 512


@dataclass(frozen=True)
class Miss:
    """One limit that no arrangement keeps: the best value there is, in the limit's unit."""

    # "ttft_ms", or another field of :class:`SLO`.
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


def excesses(slo: SLO, shape: Shape, steady: Steady) -> dict[str, tuple[float, float]]:
    """Returns, for each limit, the value of the mean answer and how many times the limit it is."""
    record = mean_record(shape, steady)
    assert record.ttft_s is not None
    values_ms = {
        "ttft_ms": record.ttft_s,
        "tpot_ms": record.tpot_s or 0.0,
        "itl_ms": max(record.gaps_s, default=0.0),
        "e2el_ms": record.e2el_s,
    }
    found = {
        name: (1e3 * value_s, 1e3 * value_s / limit)
        for name, value_s in values_ms.items()
        if (limit := getattr(slo, name)) is not None
    }
    if (rate := slo.paper_tokens_per_s) is not None:
        gap_s = longest_average_gap_s(record.gaps_s)
        first = record.ttft_s * _PAPER_PROMPT_RATE / shape.prompt
        found["paper_tokens_per_s"] = (1 / gap_s if gap_s else float("inf"), max(first, gap_s * rate))
    return found


def misses(question: Question, found: Iterable[Arrangement]) -> list[Miss]:
    """Returns the limits that are missed where all limits together are missed by least; none if some point keeps
    them."""
    slo = question.slo
    candidates = [(arrangement, point) for arrangement in found for point in arrangement.points]
    if slo is None or not candidates or any(not point.broken for _, point in candidates):
        return []

    def worst(candidate: tuple[Arrangement, Point]) -> float:
        return max(times for _, times in excesses(slo, question.shape, candidate[1].steady).values())

    arrangement, point = min(candidates, key=worst)
    return [
        Miss(name, getattr(slo, name), value, times, _limited_by(question, arrangement, point, name))
        for name, (value, times) in excesses(slo, question.shape, point.steady).items()
        if name in point.broken
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
