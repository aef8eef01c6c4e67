"""Plans: from a question to the arrangement that answers it best, with everything that led there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastgen.errors import OutOfMemoryError
from fastgen.lab.plan.arrangements import Arrangement, Point, Question, Refusal, arrangements, pareto_front
from fastgen.lab.plan.capacity import Capacity, ShardMemory, capacity
from fastgen.lab.plan.misses import Miss, misses
from fastgen.lab.plan.simulated import Simulated, confirmed
from fastgen.models.shard.obstacles import parallel_sizes

# Budgets beside the best one that are simulated too.
_NEIGHBOURS = 1


@dataclass(frozen=True)
class Offer:
    """The best point of one arrangement, and its run in virtual time; ``None`` if nothing was simulated."""

    arrangement: Arrangement
    point: Point
    simulated: Simulated | None
    # Copies of the model; 0 if there are too few devices for the rate, or the simulation breaks the SLO.
    copies: int

    @property
    def num_devices(self) -> int:
        return self.copies * self.arrangement.tensor_parallel

    @property
    def clients(self) -> int:
        """Returns the clients of one copy."""
        return self.simulated.clients if self.simulated else self.point.steady.clients

    @property
    def requests_per_s(self) -> float:
        """Returns the good requests a second of one copy."""
        return self.simulated.requests_per_s if self.simulated else self.point.steady.requests_per_s

    @property
    def capacity(self) -> Capacity:
        return self.arrangement.capacities[self.point.token_budget]


@dataclass(frozen=True)
class Plan:
    """The answer to a question. ``chosen`` is ``None`` if no arrangement keeps the SLO or carries the rate."""

    question: Question
    arrangements: tuple[Arrangement, ...]
    # One for each arrangement that keeps the SLO by its means.
    offers: tuple[Offer, ...]
    refused: tuple[Refusal, ...]
    chosen: Offer | None
    front: tuple[Point, ...]
    misses: tuple[Miss, ...]
    # Whether the figures come from the scheduler in virtual time; otherwise from the closed form.
    is_simulated: bool

    @property
    def shown(self) -> tuple[Arrangement, Capacity]:
        """Returns what is worth a look: the chosen arrangement, or else the one with most devices a copy."""
        if self.chosen is not None:
            return self.chosen.arrangement, self.chosen.capacity
        last = self.arrangements[-1]
        return last, last.capacities[min(last.capacities)]

    @property
    def dollars_per_million(self) -> float | None:
        """Returns the price of a million answer tokens; ``None`` without a price of devices or a chosen arrangement."""
        if self.question.price is None or self.chosen is None:
            return None
        tokens_per_s = self.chosen.requests_per_s * self.question.shape.answer
        return self.question.price * self.chosen.arrangement.tensor_parallel / 3600 / tokens_per_s * 1e6


def make_plan(question: Question, *, simulates: bool = True, progress: Callable[[str], None] | None = None) -> Plan:
    """Returns the plan. ``progress`` is called with what is simulated next.

    :raises InvalidArgumentError: if the model cannot be split as asked.
    :raises OutOfMemoryError: if it fits on no number of the devices; the message says what would.
    """
    found, refused = arrangements(question)
    if not found:
        raise OutOfMemoryError(_nowhere(question, refused))
    offers = []
    for arrangement in found:
        if (point := arrangement.best) is None:
            continue
        simulated = _simulated(question, arrangement, point, progress) if simulates else None
        offers.append(_offer(question, arrangement, simulated.point if simulated else point, simulated))
    points = [point for arrangement in found for point in arrangement.points]
    return Plan(
        question,
        tuple(found),
        tuple(offers),
        tuple(refused),
        _cheapest(question, offers),
        tuple(pareto_front(points)),
        tuple(misses(question, found)),
        simulates,
    )


def _simulated(
    question: Question, arrangement: Arrangement, best: Point, progress: Callable[[str], None] | None
) -> Simulated:
    """Returns the best of simulated points: the best one of the closed form, and that of each budget beside."""
    budgets = sorted(arrangement.capacities)
    place = budgets.index(best.token_budget)
    near = budgets[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]
    runs = []
    for budget in near:
        point = arrangement.best_of(budget)
        if point is None:
            continue
        if progress is not None:
            progress(f"tensor_parallel={arrangement.tensor_parallel}, token_budget={budget}")
        runs.append(confirmed(question, arrangement, point))
    kept = [run for run in runs if run.good >= question.attainment]
    return max(kept or runs, key=lambda run: run.requests_per_s)


def _offer(question: Question, arrangement: Arrangement, point: Point, simulated: Simulated | None) -> Offer:
    offer = Offer(arrangement, point, simulated, 0)
    most = question.num_devices // arrangement.tensor_parallel
    if simulated is not None and simulated.good < question.attainment:
        return offer
    if question.rate is None:
        return replace(offer, copies=most)
    needed = math.ceil(question.rate / offer.requests_per_s)
    return replace(offer, copies=needed if needed <= most else 0)


def _cheapest(question: Question, offers: Sequence[Offer]) -> Offer | None:
    """Returns the offer that carries the rate on the fewest devices, or without a rate the one that carries most; among
    equals the one with the fewest devices a copy."""
    possible = [offer for offer in offers if offer.copies]
    if question.rate is not None:
        return min(possible, key=lambda offer: (offer.num_devices, offer.arrangement.tensor_parallel), default=None)
    return max(possible, key=lambda offer: offer.copies * offer.requests_per_s, default=None)


def _nowhere(question: Question, refused: Sequence[Refusal]) -> str:
    """Returns why the model fits nowhere, and the smallest number of devices on which it does."""
    model, device = question.model, question.device
    tried = [each.tensor_parallel for each in refused]
    last = refused[-1].reason if refused else "no number of devices was tried"
    where = f"{', '.join(map(str, tried))} {device.name}"
    for size in parallel_sizes(model.spec, device.most_linked):
        if size in tried:
            continue
        memory = ShardMemory(model, device, size=size, weight_format=question.weight_format, kv_dtype=question.kv_dtype)
        try:
            capacity(memory, question.shape, question.sizes, question.token_budget or 512)
        except OutOfMemoryError:
            continue
        return f"{model.name} does not fit on {where}, but on {size}: {last}"
    return f"{model.name} does not fit on {where}: {last}"
