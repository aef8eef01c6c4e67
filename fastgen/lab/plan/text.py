"""A plan as text for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastgen.lab.metrics.summary import Summary
from fastgen.lab.plan.arithmetic import memory_lines, time_lines
from fastgen.lab.plan.arrangements import Point, Refusal
from fastgen.lab.plan.capacity import Capacity
from fastgen.lab.plan.plan import Offer, Plan
from fastgen.lab.plan.steady import Steady

# Points of the front that are shown to people; all of them are in the JSON.
_MOST_SHOWN = 12


def as_text(plan: Plan) -> str:
    """Returns the plan as sections of lines."""
    return "\n\n".join("\n  ".join(section) for section in _sections(plan))


def _sections(plan: Plan) -> Iterator[list[str]]:
    question, (arrangement, fits) = plan.question, plan.shown
    spec, shape = question.model.spec, question.shape
    formats = [str(question.model.dtype).removeprefix("torch."), question.weight_format]
    kv = f", KV cache in {question.kv_dtype}" if question.kv_dtype else ""
    slo = "" if question.slo is None else f"; {question.attainment:.0%} of the answers keep {_slo(plan)}"
    yield [
        f"{question.model.name}: {spec.architecture}, {_large(spec.num_parameters)} parameters, "
        f"{' with '.join(each for each in formats if each)}{kv}",
        f"on up to {question.num_devices} {question.device.name}",
        f"requests of {shape.prompt} + {shape.answer} tokens{slo}",
    ]
    yield ["answer", *_answer(plan)]
    if plan.offers:
        yield ["arrangements", *_table(_OFFER_TITLES, [_offer_row(plan, each) for each in plan.offers])]
    if plan.refused:
        yield ["does not fit", *(_refusal(each) for each in plan.refused)]
    size = arrangement.tensor_parallel
    yield [f"memory of each device, tensor_parallel={size}", *str(fits.ledger).splitlines()]
    yield ["memory, line by line", *memory_lines(question, arrangement, fits)]
    if lines := time_lines(question, arrangement):
        yield ["time, line by line", *lines]
    if plan.front:
        shown = _spread(plan.front)
        yield [
            "tokens/s of a device against tokens/s of a user (means in closed form, without the SLO)",
            *_table(_FRONT_TITLES, [_front_row(each) for each in shown]),
        ]
    yield ["where the figures come from", *_sources(plan)]


def _refusal(refusal: Refusal) -> str:
    """Returns why a number of devices is too few, without the terms of the sum."""
    terms, equals, total = refusal.reason.rpartition(" = ")
    reason = f"it takes {total}" if equals and terms.count(" + ") else refusal.reason
    return f"tensor_parallel={refusal.tensor_parallel}: {reason}"


def _answer(plan: Plan) -> list[str]:
    question, chosen = plan.question, plan.chosen
    if plan.misses:
        return [f"no arrangement keeps {_slo(plan)}:", *map(str, plan.misses)]
    if chosen is None:
        return _unreached(plan)
    size, copies = chosen.arrangement.tensor_parallel, chosen.copies
    each = f"{size} {question.device.name}" if size > 1 else f"one {question.device.name}"
    kept = "good requests/s" if question.slo else "requests/s"
    best = chosen.point
    lines = [
        f"{_count(copies, 'copy')} of the model, each on {each}, with token_budget={best.token_budget}",
        f"carries {_count(chosen.clients * copies, 'client')} that send the next request when they are answered: "
        f"{chosen.requests_per_s * copies:.3g} {kept}",
    ]
    if question.rate is not None:
        lines.append(f"{question.rate:g} requests/s were asked for: {chosen.num_devices} devices")
    if plan.dollars_per_million is not None:
        lines.append(
            f"at {question.price:g} dollars an hour and device: {plan.dollars_per_million:.3g} dollars for a "
            "million answer tokens"
        )
    steady, run = best.steady, chosen.simulated
    if run is None:
        first, gap = f"{1e3 * steady.ttft_s:.0f} ms", f"{1e3 * steady.tpot_s:.1f} ms"
    else:
        first = _latency(run.summary, "ttft", 0)
        gap = _latency(run.summary, "itl", 1)
    return [*lines, f"first token after {first}, then a token every {gap}"]


def _latency(summary: Summary, name: str, digits: int) -> str:
    """Returns the mean of a latency, and the percentiles for which there are enough samples."""
    figures = [(f"P{percent}", summary[f"p{percent}_{name}_ms"].value) for percent in (50, 90, 99)]
    known = ", ".join(f"{title} {value:.{digits}f}" for title, value in figures if value is not None)
    return f"{_figure(summary[f'mean_{name}_ms'].value):.{digits}f} ms ({known})"


def _unreached(plan: Plan) -> list[str]:
    question = plan.question
    lines = []
    for offer in plan.offers:
        size, run = offer.arrangement.tensor_parallel, offer.simulated
        if run is not None and run.good < question.attainment:
            lines.append(
                f"tensor_parallel={size}: the means keep {_slo(plan)}, but with "
                f"{_count(run.clients, 'client')} only {run.good:.1%} of the answers do"
            )
        elif question.rate is not None:
            needed = -(-question.rate // offer.requests_per_s)
            lines.append(
                f"tensor_parallel={size}: {question.rate:g} requests/s take {needed:.0f} copies, {needed * size:.0f} "
                f"devices, and there are {question.num_devices}"
            )
    return lines


def _slo(plan: Plan) -> str:
    assert plan.question.slo is not None
    return ", ".join(f"{name}={limit:g}" for name, limit in plan.question.slo.as_json().items())


_OFFER_TITLES = (
    *("tensor parallel", "copies", "token budget", "clients a copy", "requests/s a copy"),
    *("TTFT ms", "TPOT ms", "tokens/s a device", "tokens/s a user", ""),
)


def _offer_row(plan: Plan, offer: Offer) -> list[str]:
    steady, run, size = offer.point.steady, offer.simulated, offer.arrangement.tensor_parallel
    ttft_ms, tpot_ms = 1e3 * steady.ttft_s, 1e3 * steady.tpot_s
    if run is not None:
        ttft_ms, tpot_ms = (_figure(run.summary[name].value) for name in ("mean_ttft_ms", "mean_tpot_ms"))
    rate = offer.requests_per_s * plan.question.shape.answer / size
    return [
        *(str(size), str(offer.copies or "-"), str(offer.point.token_budget), str(offer.clients)),
        *(f"{offer.requests_per_s:.3g}", f"{ttft_ms:.0f}", f"{tpot_ms:.1f}", f"{rate:.1f}"),
        f"{1e3 / tpot_ms:.1f}" if tpot_ms else "-",
        "chosen" if offer is plan.chosen else "",
    ]


_FRONT_TITLES = ("tokens/s a user", "tokens/s a device", "tensor parallel", "token budget", "clients a copy", "TTFT ms")


def _front_row(point: Point) -> list[str]:
    steady = point.steady
    return [
        *(f"{point.tokens_per_s_per_user:.1f}", f"{point.tokens_per_s_per_device:.1f}", str(point.tensor_parallel)),
        *(str(point.token_budget), str(steady.clients), f"{1e3 * steady.ttft_s:.0f}"),
    ]


def _sources(plan: Plan) -> list[str]:
    question = plan.question
    memory = "memory: the ledger of an engine on that device, from the recipe and the configuration alone"
    if question.measured is not None:
        steps = "times of steps: measured by a calibration"
    else:
        reached = question.efficiency
        steps = (
            f"times of steps: the datasheet of {question.device.name}, of which {reached.memory:.0%} of the bandwidth, "
            f"{reached.products:.0%} of the matrix rate and {reached.link:.0%} of the links are taken to be reached"
        )
    searched = "arrangements, budgets and clients were searched with means in closed form"
    if any(offer.simulated for offer in plan.offers):
        runs = [offer.simulated for offer in plan.offers if offer.simulated]
        spread = (
            "vary by 30 %, as the paper's" if all(run.varies for run in runs) else "are equal: the context is short"
        )
        return [
            *(memory, steps),
            f"{searched}; the best of each were run with the scheduler in virtual time, where lengths {spread}",
        ]
    return [memory, steps, searched]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def _spread(points: Sequence[Point]) -> list[Point]:
    """Returns at most :data:`_MOST_SHOWN` points, evenly over all, the first and the last among them."""
    count = min(_MOST_SHOWN, len(points))
    return [points[round(place * (len(points) - 1) / max(1, count - 1))] for place in range(count)]


def _count(count: int, name: str) -> str:
    """Returns a count with its noun, "1 copy" or "2 copies"."""
    plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
    return f"{count} {name if count == 1 else plural}"


def _large(count: int) -> str:
    """Returns a count in billions or millions."""
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _figure(value: float | None) -> float:
    return 0.0 if value is None else value


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns everything of the plan as JSON."""
    question = plan.question
    return {
        "model": question.model.name,
        "architecture": question.model.spec.architecture,
        "parameters": question.model.spec.num_parameters,
        "dtype": str(question.model.dtype).removeprefix("torch."),
        "quantize": question.weight_format,
        "kv_dtype": question.kv_dtype,
        "device": question.device.name,
        "devices": question.num_devices,
        "prompt": question.shape.prompt,
        "answer": question.shape.answer,
        "slo": None if question.slo is None else question.slo.as_json(),
        "attainment": question.attainment,
        "rate": question.rate,
        "simulated": plan.is_simulated,
        "dollars_per_million_answer_tokens": plan.dollars_per_million,
        "chosen": None if plan.chosen is None else _offer_json(plan, plan.chosen),
        "offers": [_offer_json(plan, offer) for offer in plan.offers],
        "does_not_fit": [asdict(each) for each in plan.refused],
        "misses": [asdict(miss) for miss in plan.misses],
        "front": [_point_json(point) for point in plan.front],
    }


def _offer_json(plan: Plan, offer: Offer) -> dict[str, Any]:
    question, arrangement = plan.question, offer.arrangement
    lines = [*memory_lines(question, arrangement, offer.capacity), *time_lines(question, arrangement)]
    run = offer.simulated
    return {
        "tensor_parallel": arrangement.tensor_parallel,
        "copies": offer.copies,
        "devices": offer.num_devices,
        "token_budget": offer.point.token_budget,
        "clients": offer.clients,
        "requests_per_s": offer.requests_per_s,
        "expected": _point_json(offer.point),
        "simulated": None if run is None else run.summary.as_json() | {"good": run.good},
        "memory": _capacity_json(offer.capacity),
        "arithmetic": lines,
    }


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "tensor_parallel": point.tensor_parallel,
        "token_budget": point.token_budget,
        "tokens_per_s_per_device": point.tokens_per_s_per_device,
        "tokens_per_s_per_user": point.tokens_per_s_per_user,
        **_steady_json(point.steady),
    }


def _steady_json(steady: Steady) -> dict[str, Any]:
    return asdict(steady) | {"e2el_s": steady.e2el_s}


def _capacity_json(fits: Capacity) -> dict[str, Any]:
    return {
        "config": asdict(fits.config),
        "ledger": fits.ledger.as_json(),
        "block_bytes": fits.block_bytes,
        "bytes_per_token": fits.bytes_per_token,
        "kv_tokens": fits.kv_tokens,
        "blocks": fits.num_blocks,
        "blocks_of_request": fits.blocks_of_request,
        "concurrent": fits.concurrent,
        "concurrent_reserved": fits.concurrent_reserved,
    }
