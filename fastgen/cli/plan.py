"""``fastgen plan``: how many requests devices carry, and how fast, from a recipe and a configuration alone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastgen.arguments import arguments_of
from fastgen.cli import options
from fastgen.cli.plan_options import ANSWER, DEVICES, PROMPT, PlanOptions

if TYPE_CHECKING:
    from fastgen.lab.plan.arrangements import Question
    from fastgen.lab.plan.sheet import Preset

# The arguments that decide how much memory an engine takes.
_LOAD = options.only(
    options.LOAD_ARGUMENTS,
    *("recipe", "dtype", "quantize", "token_budget", "max_num_seqs", "kv_cache_memory", "block_size", "max_model_len"),
)
# What a preset says, where the command line does not.
_OF_PRESET = (
    *("model", "device", "devices", "tensor_parallel", "prompt", "answer"),
    *("dtype", "max_model_len", "kv_cache_memory", "block_size"),
)


@options.with_flags(question=arguments_of(PlanOptions), load=_LOAD)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A config.json, a directory with one, a built-in, or a published name (llama-2-70b)."
        ),
    ] = None,
    *,
    question: options.Given,
    load: options.Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show how many requests of a shape MODEL carries on devices, which need not be here, and how fast."""
    from fastgen.lab.plan.plan import make_plan
    from fastgen.lab.plan.sheet import preset
    from fastgen.lab.plan.text import as_json as plan_json
    from fastgen.lab.plan.text import as_text

    asked = PlanOptions(**question)
    chosen = None if asked.preset is None else preset(asked.preset)
    given = {} if chosen is None else {name: getattr(chosen, name) for name in _OF_PRESET}
    given |= {name: value for name, value in (("model", model), *question.items(), *load.items()) if value is not None}
    if not given.get("model") or not given.get("device"):
        raise typer.BadParameter("give MODEL and --device, or --preset")
    found = make_plan(
        _question(asked, given), simulates=asked.simulate, progress=_report if sys.stderr.isatty() else None
    )
    if as_json:
        print(json.dumps(plan_json(found) | ({} if chosen is None else {"preset": _preset_facts(chosen)})))
        return
    if chosen is not None:
        print(chosen.title, *chosen.sheet.lines(), f"published: {chosen.says}", sep="\n  ", end="\n\n")
    print(as_text(found))


def _question(asked: PlanOptions, given: dict[str, Any]) -> Question:
    """Returns the question of the command line; ``given`` has what a preset may say too, and the load's arguments."""
    from fastgen.errors import InvalidArgumentError
    from fastgen.lab.devices.calibration import read_calibration
    from fastgen.lab.devices.datasheets import datasheet
    from fastgen.lab.devices.roofline import KV_BYTES, parse_efficiency
    from fastgen.lab.metrics.goodput import parse_slo
    from fastgen.lab.models import describe
    from fastgen.lab.plan.arrangements import Question
    from fastgen.lab.plan.capacity import Shape, Sizes

    if asked.kv_dtype is not None and asked.kv_dtype not in KV_BYTES:
        raise InvalidArgumentError(f"--kv-dtype {asked.kv_dtype}: expected one of {', '.join(KV_BYTES)}")
    tensor_parallel = given.get("tensor_parallel")
    measured = None if asked.calibration is None else read_calibration(asked.calibration)
    return Question(
        model=describe(given["model"], dtype=given.get("dtype", "auto"), recipe=given.get("recipe")),
        device=datasheet(given["device"]),
        num_devices=given.get("devices") or tensor_parallel or DEVICES,
        shape=Shape(given.get("prompt", PROMPT), given.get("answer", ANSWER)),
        slo=None if asked.slo is None else parse_slo(asked.slo.split(",")),
        tensor_parallel=tensor_parallel,
        token_budget=given.get("token_budget"),
        clients=asked.clients,
        rate=asked.rate,
        price=asked.price,
        attainment=asked.attainment,
        weight_format=given.get("quantize"),
        kv_dtype=asked.kv_dtype,
        sizes=Sizes(
            **{name: given.get(name) for name in ("max_num_seqs", "max_model_len", "block_size", "kv_cache_memory")}
        ),
        efficiency=parse_efficiency(asked.efficiency),
        measured=None if measured is None else measured.cost,
        step_gap_s=0.0 if measured is None else measured.step_gap_s,
        arrival_s=0.0 if measured is None else measured.arrival_s,
        most_budget=None if measured is None else measured.engine["token_budget"],
    )


def _preset_facts(chosen: Preset) -> dict[str, Any]:
    return {"title": chosen.title, "says": chosen.says, **chosen.sheet.as_json()}


def _report(what: str) -> None:
    print(f"simulating {what}", file=sys.stderr)
