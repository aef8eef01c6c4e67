"""``fastgen bench``: measures an engine or a server, and searches for the load that it carries."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fastgen.arguments import arguments_of, build
from fastgen.cli import options
from fastgen.cli.bench_options import (
    BatchOptions,
    EndpointOptions,
    OutputOptions,
    SearchOptions,
    SLOOptions,
    TrafficOptions,
    WorkloadOptions,
)
from fastgen.cli.bench_output import (
    Output,
    end,
    latency_text,
    print_json,
    search_text,
    startup_text,
    summary_text,
    turns_text,
)
from fastgen.cli.bench_setup import opened, opened_engine, traffic_of, workload_of
from fastgen.cli.command import App, Command

if TYPE_CHECKING:
    from fastgen.lab.experiments.search import Found
    from fastgen.lab.metrics.goodput import SLO
    from fastgen.lab.records import Run
    from fastgen.lab.workloads.request import Workload

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIMIT = re.compile(r"(ttft|tpot|itl|e2el|paper):[\d.]+")
_MODEL = typer.Argument(metavar="MODEL", help=f"{options.MODEL_HELP} Not needed with --base-url.")
Model = Annotated[str | None, _MODEL]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as a JSON object.")]


class BenchCommand(Command):
    """A command that takes several limits after one ``--goodput``, as ``vllm bench serve`` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        for argument in args:
            if len(spread) > 1 and spread[-2] == "--goodput" and _LIMIT.fullmatch(argument):
                spread.append("--goodput")
            spread.append(argument)
        return super().parse_args(ctx, spread)


class _BenchApp(App):
    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return typer.Typer.command(self, name, cls=BenchCommand, **settings)


app = _BenchApp(name="bench", help="Measure an engine or a server under a load, and search for the load it carries.")
_ENDPOINT, _WORKLOAD, _TRAFFIC = map(arguments_of, (EndpointOptions, WorkloadOptions, TrafficOptions))
_SLO, _OUTPUT, _SEARCH, _BATCH = map(arguments_of, (SLOOptions, OutputOptions, SearchOptions, BatchOptions))


@app.command()
@options.with_flags(
    endpoint=_ENDPOINT, workload=_WORKLOAD, traffic=_TRAFFIC, slo=_SLO, output=_OUTPUT, load=options.LOAD_ARGUMENTS
)
def serve(
    model: Model = None,
    *,
    workload: options.Given,
    traffic: options.Given,
    endpoint: options.Given,
    slo: options.Given,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Measure a load on an engine in this process, or on a server.

    Open loop: requests come at a rate, whether or not earlier ones were answered. Closed loop: a number of clients,
    each of which waits for its answer. Ctrl-C keeps what was measured.
    """
    from fastgen.lab.experiments.serve import serve as run_load
    from fastgen.lab.load.generator import LoadGenerator

    given, when, limits = build(WorkloadOptions, workload), build(TrafficOptions, traffic), _slo(slo)
    results = Output(build(OutputOptions, output))
    with opened(model, build(EndpointOptions, endpoint), load) as setup:
        asked = workload_of(given, setup)
        run = run_load(
            LoadGenerator(setup.target),
            asked,
            traffic_of(when, asked, setup),
            vocab_size=setup.vocab_size,
            seed=given.seed,
            num_warm_ups=when.num_warmups,
        )
    _finish("serve", run, limits, results, as_json)


@app.command()
@options.with_flags(endpoint=_ENDPOINT, workload=_WORKLOAD, slo=_SLO, output=_OUTPUT, load=options.LOAD_ARGUMENTS)
def throughput(
    model: Model = None,
    *,
    workload: options.Given,
    endpoint: options.Given,
    slo: options.Given,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Measure how fast all requests of a workload are answered that are sent at once."""
    from fastgen.lab.experiments.serve import AtOnce
    from fastgen.lab.experiments.serve import serve as run_load
    from fastgen.lab.load.generator import LoadGenerator

    given, limits, results = build(WorkloadOptions, workload), _slo(slo), Output(build(OutputOptions, output))
    with opened(model, build(EndpointOptions, endpoint), load) as setup:
        run = run_load(
            LoadGenerator(setup.target),
            workload_of(given, setup),
            AtOnce(),
            vocab_size=setup.vocab_size,
            seed=given.seed,
        )
    _finish("throughput", run, limits, results, as_json)


@app.command()
@options.with_flags(endpoint=_ENDPOINT, batch=_BATCH, output=_OUTPUT, load=options.LOAD_ARGUMENTS)
def latency(
    model: Model = None,
    *,
    batch: options.Given,
    endpoint: options.Given,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Measure one batch of requests of one shape, again and again."""
    from fastgen.lab.experiments.latency import latency as measure
    from fastgen.lab.load.generator import LoadGenerator

    shape, results = build(BatchOptions, batch), Output(build(OutputOptions, output))
    with opened(model, build(EndpointOptions, endpoint), load) as setup:
        found = measure(
            LoadGenerator(setup.target),
            batch_size=shape.batch_size,
            num_prompt_tokens=shape.input_len,
            num_new_tokens=shape.output_len,
            vocab_size=setup.vocab_size,
            num_warm_ups=shape.num_iters_warmup,
            num_repeats=shape.num_iters,
            seed=shape.seed,
        )
    facts = found.as_json() | {"batch": vars(shape)}
    if found.runs:
        from fastgen.lab.experiments.pooled import pooled

        results.write("latency", {"": pooled(found.runs)}, facts)
    if as_json:
        print_json(facts)
    else:
        print(latency_text(found))
    end(found.runs, interrupted=len(found.runs) < shape.num_iters)


@app.command()
@options.with_flags(output=_OUTPUT, load=options.LOAD_ARGUMENTS)
def startup(
    model: options.Model,
    num_iters_cold: Annotated[int, typer.Option(help="Processes with an empty kernel cache.", min=0)] = 3,
    num_iters_warm: Annotated[int, typer.Option(help="Processes with a filled kernel cache.", min=0)] = 5,
    *,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Measure the time from the start of a process to a loaded model and to its first token."""
    from fastgen.lab.experiments.startup import startup as measure

    if num_iters_cold + num_iters_warm == 0:
        options.usage_error("--num-iters-cold and --num-iters-warm are both 0, so there is nothing to measure")
    results = Output(build(OutputOptions, output))
    found = measure({"model": model, **load}, num_cold=num_iters_cold, num_warm=num_iters_warm)
    results.write("startup", {}, found.as_json())
    if as_json:
        print_json(found.as_json())
    else:
        print(startup_text(found))
    end([], interrupted=found.interrupted)


@app.command()
@options.with_flags(
    workload=_WORKLOAD,
    traffic=_TRAFFIC,
    slo=_SLO,
    output=_OUTPUT,
    load=options.without(options.LOAD_ARGUMENTS, "policy", "prefix_caching", "itl_target_ms"),
)
def policies(
    model: options.Model,
    policy: Annotated[
        list[str], typer.Option(help="A policy to compare. Repeatable. Default: splitfuse, prefill_first and orca.")
    ] = [],  # noqa: B006 (typer reads it)
    rounds: Annotated[int, typer.Option(help="Runs of each policy.", min=1)] = 3,
    *,
    workload: options.Given,
    traffic: options.Given,
    slo: options.Given,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Compare scheduling policies on one engine, with the same requests, in turns. There is no prefix cache."""
    from fastgen.lab.experiments.policies import policies as compare
    from fastgen.lab.experiments.serve import serve as run_load
    from fastgen.lab.load.generator import LoadGenerator
    from fastgen.lab.metrics.summary import summarize

    given, when, limits = build(WorkloadOptions, workload), build(TrafficOptions, traffic), _slo(slo)
    results, names = Output(build(OutputOptions, output)), policy or ["splitfuse", "prefill_first", "orca"]
    with opened_engine(model, load | {"prefix_caching": False}) as (target, setup):
        asked = workload_of(given, setup)
        arrivals, runs = traffic_of(when, asked, setup), LoadGenerator(target)

        def measure(number: int) -> Run:
            return run_load(runs, asked, arrivals, vocab_size=setup.vocab_size, seed=given.seed + number)

        found = compare(target, names, measure, num_rounds=rounds)
    summaries = {name: summarize(found.run(name), slo=limits) for name in found.names}
    facts = {"policies": {name: summary.as_json() for name, summary in summaries.items()}}
    results.write("policies", {f"{turn.policy}-{turn.round}": turn.run for turn in found.turns}, facts)
    if as_json:
        print_json(facts)
    else:
        print(turns_text(summaries))
    end([turn.run for turn in found.turns])


@app.command()
@options.with_flags(
    endpoint=_ENDPOINT,
    workload=_WORKLOAD,
    slo=_SLO,
    limits=_SEARCH,
    output=_OUTPUT,
    load=options.LOAD_ARGUMENTS,
)
def search(
    model: Model = None,
    *,
    slo: options.Given,
    limits: options.Given,
    workload: options.Given,
    endpoint: options.Given,
    output: options.Given,
    as_json: AsJson = False,
    load: options.Given,
) -> None:
    """Search for the most clients, or the highest rate, at which enough answers keep the limits of --goodput.

    The answer is an interval: up to there the limits are kept, from there on they are missed. A run with N clients has
    at least 4 N + 32 requests or sessions.
    """
    from fastgen.lab.experiments.levels import by_clients, by_rate
    from fastgen.lab.experiments.search import search as find
    from fastgen.lab.load.generator import LoadGenerator

    given, how, wanted = build(WorkloadOptions, workload), build(SearchOptions, limits), _slo(slo)
    if wanted is None:
        options.usage_error("--goodput is missing: the limits to keep, such as --goodput ttft:200 tpot:50")
    results, is_integer = Output(build(OutputOptions, output)), how.search_by == "clients"
    with opened(model, build(EndpointOptions, endpoint), load) as setup:

        def runs(title: str) -> LoadGenerator:
            return LoadGenerator(setup.target, title)

        least = workload_of(given, setup).facts().get("n") or 0

        def of_size(number: int) -> Workload:
            return workload_of(replace(given, num_prompts=max(number, least)), setup)

        size = {"vocab_size": setup.vocab_size, "seed": given.seed}
        found = find(
            by_clients(runs, of_size, **size) if is_integer else by_rate(runs, of_size, seconds=how.seconds, **size),
            wanted,
            share=how.share,
            start=how.start,
            is_integer=is_integer,
            resolution=how.resolution,
            max_repeats=how.max_repeats,
        )
    _finish_search(found, how, results, as_json)


def _finish_search(found: Found, how: SearchOptions, results: Output, as_json: bool) -> None:
    facts = {"search_by": how.search_by, **found.as_json()}
    runs = {f"{level.value:g}-{number}": run for level in found.levels for number, run in enumerate(level.runs)}
    results.write("search", runs, facts)
    if as_json:
        print_json(facts)
    else:
        print(search_text(found, "clients" if how.search_by == "clients" else "requests/s"))
    end(list(runs.values()), interrupted=found.interrupted)


@app.command("import")
def import_results(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A JSON result of vllm bench serve, or of guidellm.")],
    as_json: AsJson = False,
) -> None:
    """Print the results of vllm bench serve or guidellm like our own."""
    from fastgen.lab.imports.results import read_results

    for summary in read_results(file):
        if as_json:
            print_json(summary.as_json())
        else:
            print(f"{summary.source}\n{summary_text(summary)}")


@app.command()
def workloads() -> None:
    """List the workloads and the arrival processes, with their parameters."""
    from fastgen.lab.workloads.arrivals import ARRIVALS
    from fastgen.lab.workloads.named import described
    from fastgen.lab.workloads.registry import described_workloads

    print(f"{described_workloads()}\n\nFor --arrivals:\n\n{described(ARRIVALS)}")


def _slo(given: options.Given) -> SLO | None:
    from fastgen.lab.metrics.goodput import parse_slo

    words = [word for text in given.get("goodput", ()) for word in re.split(r"[\s,]+", text) if word]
    return parse_slo(words) if words else None


def _finish(command: str, run: Run, slo: SLO | None, results: Output, as_json: bool) -> None:
    from fastgen.lab.metrics.summary import summarize

    summary = summarize(run, slo=slo)
    results.write(command, {"": run}, summary.as_json())
    if as_json:
        print_json(summary.as_json())
    else:
        print(summary_text(summary))
    end([run])
