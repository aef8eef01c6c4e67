"""``fastgen plan``: how many requests devices carry, and how fast, from a recipe and a configuration alone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastgen.cli import options

if TYPE_CHECKING:
    from fastgen.lab.plan.arrangements import Question
    from fastgen.lab.plan.sheet import Preset

# The arguments that decide how much memory an engine takes.
_LOAD = options.only(
    options.LOAD_ARGUMENTS,
    *("recipe", "dtype", "quantize", "token_budget", "max_num_seqs", "kv_cache_memory", "block_size", "max_model_len"),
)
_SLO_HELP = "Limits such as ttft:500,tpot:50 (ms); ttft, tpot, itl, e2el, or paper:4 (tokens/s by the paper's rule)."


@options.with_flags(load=_LOAD)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A config.json, a directory with one, a built-in, or a published name (llama-2-70b)."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A100-80, A6000, H100, H200, A10G, RTX-4090, or cpu.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices there are at most.", show_default="8")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Devices that share a copy of the model.", show_default="all that fit")
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default="2600")] = None,
    answer: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer.", show_default="60")] = None,
    slo: Annotated[str | None, typer.Option(metavar="LIMITS", help=_SLO_HELP)] = None,
    attainment: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of answers that keep the limits.")] = 0.99,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients of a copy.", show_default="the best")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second to carry on the fewest devices.")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Type of the KV cache: float32, bfloat16, float16, fp8, int8.")
    ] = None,
    efficiency: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Shares of the datasheet's rates that are reached, such as memory=0.8,products=0.6,link=0.7; "
            "attention, and the times layer_s and host_s.",
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A post's question: mistral-7b-24gb or falcon-40b-4x24gb.")
    ] = None,
    simulate: Annotated[bool, typer.Option(help="Run the best points with the scheduler, in virtual time.")] = True,
    *,
    load: options.Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show how many requests of a shape MODEL carries on devices, which need not be here, and how fast."""
    from fastgen.lab.plan.plan import make_plan
    from fastgen.lab.plan.sheet import preset as preset_named
    from fastgen.lab.plan.text import as_json as plan_json
    from fastgen.lab.plan.text import as_text

    given = {
        "model": model,
        "device": device,
        "devices": devices,
        "tensor_parallel": tensor_parallel,
        "prompt": prompt,
        "answer": answer,
        **load,
    }
    post = None if preset is None else preset_named(preset)
    if post is not None:
        given = _preset_arguments(post) | {name: value for name, value in given.items() if value is not None}
    if given["model"] is None or given["device"] is None:
        raise typer.BadParameter("give MODEL and --device, or --preset")
    question = _question(
        given,
        slo=slo,
        attainment=attainment,
        clients=clients,
        rate=rate,
        kv_dtype=kv_dtype,
        efficiency=efficiency,
    )
    found = make_plan(question, simulates=simulate, progress=_report if sys.stderr.isatty() else None)
    if as_json:
        sheet = {} if post is None else {"preset": {"title": post.title, "says": post.says, **post.sheet.as_json()}}
        print(json.dumps(plan_json(found) | sheet))
        return
    if post is not None:
        print(post.title, *post.sheet.lines(), f"the post: {post.says}", sep="\n  ")
        print()
    print(as_text(found))


def _preset_arguments(post: Preset) -> dict[str, Any]:
    names = ("model", "device", "devices", "tensor_parallel", "prompt", "answer", "dtype", "max_model_len")
    return {name: getattr(post, name) for name in names}


def _question(
    given: dict[str, Any],
    *,
    slo: str | None,
    attainment: float,
    clients: int | None,
    rate: float | None,
    kv_dtype: str | None,
    efficiency: str | None,
) -> Question:
    from fastgen.errors import InvalidArgumentError
    from fastgen.lab.devices.datasheets import datasheet
    from fastgen.lab.devices.roofline import KV_BYTES, parse_efficiency
    from fastgen.lab.metrics.goodput import parse_slo
    from fastgen.lab.models import describe
    from fastgen.lab.plan.arrangements import Question
    from fastgen.lab.plan.capacity import Shape, Sizes

    if kv_dtype is not None and kv_dtype not in KV_BYTES:
        raise InvalidArgumentError(f"--kv-dtype {kv_dtype}: expected one of {', '.join(KV_BYTES)}")
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidArgumentError(f"--rate {rate:g}: expected requests a second, above 0")
    return Question(
        model=describe(given["model"], dtype=given.get("dtype") or "auto", recipe=given.get("recipe")),
        device=datasheet(given["device"]),
        num_devices=given["devices"] or given["tensor_parallel"] or 8,
        shape=Shape(given["prompt"] or 2600, given["answer"] or 60),
        slo=None if slo is None else parse_slo(slo.split(",")),
        tensor_parallel=given["tensor_parallel"],
        token_budget=given.get("token_budget"),
        clients=clients,
        rate=rate,
        attainment=attainment,
        weight_format=given.get("quantize"),
        kv_dtype=kv_dtype,
        sizes=Sizes(
            **{name: given.get(name) for name in ("max_num_seqs", "max_model_len", "block_size", "kv_cache_memory")}
        ),
        efficiency=parse_efficiency(efficiency),
    )


def _report(what: str) -> None:
    print(f"simulating {what}", file=sys.stderr)
