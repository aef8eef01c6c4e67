"""Arrangements of devices for a model: how many share it, how many copies there are, and how fast each is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fastgen.errors import InvalidArgumentError, OutOfMemoryError
from fastgen.lab.devices.datasheets import Datasheet
from fastgen.lab.devices.roofline import Efficiency, Roofline, model_build, roofline
from fastgen.lab.devices.shards import shard
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.models import DescribedModel
from fastgen.lab.plan.capacity import Capacity, Shape, ShardMemory, Sizes, capacity
from fastgen.lab.plan.steady import Steady, steady_states, with_waiting
from fastgen.lab.records import RequestRecord
from fastgen.models.shard.obstacles import parallel_sizes
from fastgen.runtime.step_cost.cost import StepCost

# Token budgets that are tried where none is given.
_BUDGETS = (256, 512, 1024, 2048, 4096)
# Numbers of clients that are tried grow by this factor.
_GROWTH = 1.25


@dataclass(frozen=True)
class Question:
    """Holds the question that a plan answers. Fields that are ``None`` are to be found."""

    model: DescribedModel
    device: Datasheet
    # Most devices to use.
    num_devices: int
    shape: Shape
    slo: SLO | None = None
    tensor_parallel: int | None = None
    token_budget: int | None = None
    clients: int | None = None
    # Requests a second to carry.
    rate: float | None = None
    # Dollars an hour of one device.
    price: float | None = None
    # Share of the requests that keep the SLO where a simulation says so.
    attainment: float = 0.99
    weight_format: str | None = None
    kv_dtype: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    efficiency: Efficiency = field(default_factory=Efficiency)
    # In place of the datasheet: the cost of a step as it was measured, on as many devices as share a copy, the time
    # between two steps and for an arriving request, and the largest budget that it was measured for.
    measured: StepCost | None = None
    step_gap_s: float = 0.0
    arrival_s: float = 0.0
    most_budget: int | None = None

    @property
    def budgets(self) -> tuple[int, ...]:
        """Returns the token budgets to try."""
        if self.token_budget is not None:
            return (self.token_budget,)
        most = self.most_budget or _BUDGETS[-1]
        return (*(budget for budget in _BUDGETS if budget < most), most)


@dataclass(frozen=True)
class Point:
    """One way to run one copy of the model, and what its clients see on average."""

    tensor_parallel: int
    token_budget: int
    steady: Steady
    # Answer tokens of a request.
    answer: int
    # Limits of the SLO that the means break.
    broken: tuple[str, ...]

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.steady.requests_per_s * self.answer / self.tensor_parallel

    @property
    def tokens_per_s_per_user(self) -> float:
        return self.steady.tokens_per_s_per_user


@dataclass(frozen=True)
class Arrangement:
    """``tensor_parallel`` devices that share one copy of a model, and all points at which they may run."""

    tensor_parallel: int
    # ``None`` where the steps were measured.
    roofline: Roofline | None
    capacities: dict[int, Capacity]
    costs: dict[int, StepCost]
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        """Returns the best point of all budgets; ``None`` if the SLO allows none."""
        return _best(self.points)

    def best_of(self, token_budget: int) -> Point | None:
        """Returns the best point of one budget; ``None`` if the SLO allows none."""
        return _best([point for point in self.points if point.token_budget == token_budget])


def _best(points: Sequence[Point]) -> Point | None:
    """Returns the point with the most requests a second that the SLO allows, or rather the one with the fewest clients
    and the smallest budget that comes within 1 % of it.
    """
    allowed = [point for point in points if not point.broken]
    enough = 0.99 * max((point.steady.requests_per_s for point in allowed), default=0.0)
    near = [point for point in allowed if point.steady.requests_per_s >= enough]
    return min(near, key=lambda point: (point.steady.clients, point.token_budget), default=None)


@dataclass(frozen=True)
class Refusal:
    """A number of devices on which the model does not fit, and why."""

    tensor_parallel: int
    reason: str


def arrangements(question: Question) -> tuple[list[Arrangement], list[Refusal]]:
    """Returns the arrangements on which the model fits, and the others.

    :raises InvalidArgumentError: for a ``tensor_parallel`` that the model cannot be split into, or that takes more
        devices than there are.
    """
    spec = question.model.spec
    if question.tensor_parallel is not None:
        shard(spec, question.tensor_parallel)
        if question.tensor_parallel > question.num_devices:
            raise InvalidArgumentError(
                f"tensor_parallel={question.tensor_parallel}: a copy of the model takes so many devices, and there are "
                f"{question.num_devices}"
            )
        candidates: Sequence[int] = (question.tensor_parallel,)
    else:
        candidates = parallel_sizes(spec, min(question.num_devices, question.device.most_linked))
    found, refused = [], []
    for size in candidates:
        try:
            found.append(_arrangement(question, size))
        except OutOfMemoryError as error:
            refused.append(Refusal(size, str(error)))
    return found, refused


def _arrangement(question: Question, size: int) -> Arrangement:
    model, device = question.model, question.device
    memory = ShardMemory(model, device, size=size, weight_format=question.weight_format, kv_dtype=question.kv_dtype)
    found = _roofline(question, size)
    capacities: dict[int, Capacity] = {}
    costs: dict[int, StepCost] = {}
    points: list[Point] = []
    for budget in question.budgets:
        try:
            fits = capacity(memory, question.shape, question.sizes, budget)
        except OutOfMemoryError:
            if not capacities:
                raise
            break  # larger ones take more
        capacities[budget] = fits
        costs[budget] = found.cost(budget) if found else _measured(question)
        points += _points(question, size, budget, fits, costs[budget])
    return Arrangement(size, found, capacities, costs, tuple(points))


def _roofline(question: Question, size: int) -> Roofline | None:
    if question.measured is not None:
        return None
    model, device = question.model, question.device
    build = model_build(model.spec, device, model.dtype, question.weight_format)
    return roofline(build, device, tensor_parallel=size, kv_dtype=question.kv_dtype, efficiency=question.efficiency)


def _measured(question: Question) -> StepCost:
    assert question.measured is not None
    return question.measured


def _points(question: Question, size: int, budget: int, fits: Capacity, cost: StepCost) -> Iterator[Point]:
    shape = question.shape
    # Without room for decodes and a prompt's token, a step makes no progress with prompts.
    running = min(fits.concurrent, budget - 1, question.clients or fits.concurrent)
    states = steady_states(cost, shape, token_budget=budget, most=max(1, running))
    for clients in (question.clients,) if question.clients else _client_numbers(len(states)):
        steady = states[clients - 1] if clients <= len(states) else with_waiting(states[-1], clients)
        yield Point(size, budget, steady, shape.answer, broken_limits(question.slo, shape, steady))


def _client_numbers(most: int) -> Iterator[int]:
    """Yields numbers of clients from 1 to ``most``, both included."""
    clients = 1
    while clients < most:
        yield clients
        clients = max(clients + 1, int(clients * _GROWTH))
    yield max(1, most)


def mean_record(shape: Shape, steady: Steady) -> RequestRecord:
    """Returns the mean answer as a record: its gaps are the mean ones, but for one step that is full of prompts."""
    gaps = [steady.tpot_s] * (shape.answer - 1)
    if gaps and steady.longest_gap_s > steady.tpot_s:
        others_s = max(0.0, (steady.tpot_s * len(gaps) - steady.longest_gap_s) / max(1, len(gaps) - 1))
        gaps = [steady.longest_gap_s, *([others_s] * (len(gaps) - 1))]
    times_s = tuple(accumulate([steady.ttft_s, *gaps]))
    return RequestRecord(
        request=0,
        num_prompt_tokens=shape.prompt,
        num_new_tokens=shape.answer,
        due_s=0.0,
        sent_s=0.0,
        token_times_s=times_s,
        ended_s=times_s[-1],
    )


def broken_limits(slo: SLO | None, shape: Shape, steady: Steady) -> tuple[str, ...]:
    """Returns the limits of the SLO that the mean answer breaks."""
    return () if slo is None else tuple(slo.broken(mean_record(shape, steady)))


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Returns the points that no other exceeds in both tokens a second and device, and a second and user; the fastest
    for a user first.
    """
    front: list[Point] = []
    order = sorted(points, key=lambda each: (-each.tokens_per_s_per_user, -each.tokens_per_s_per_device))
    for point in order:
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device:
            front.append(point)
    return front
