"""Makes of the flags of ``fastgen bench`` a workload, its traffic, and a target that is ready."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastgen.cli import options
from fastgen.cli.bench_options import EndpointOptions, TrafficOptions, WorkloadOptions
from fastgen.errors import FastgenError

if TYPE_CHECKING:
    from fastgen.lab.load.endpoint import EndpointTarget
    from fastgen.lab.load.engine_target import EngineTarget
    from fastgen.lab.load.target import Target
    from fastgen.lab.workloads.arrivals import Arrivals
    from fastgen.lab.workloads.request import Workload


@dataclass(frozen=True)
class Setup:
    """A target that is ready, and the facts about its model that workloads need."""

    target: Target
    vocab_size: int
    # Returns the tokens of a text; ``None`` where there is no tokenizer here.
    encode: Callable[[str], Sequence[int]] | None


@contextmanager
def opened_engine(model: str | None, load: options.Given) -> Iterator[tuple[EngineTarget, Setup]]:
    """Yields an engine of ``model`` in this process."""
    import fastgen
    from fastgen.lab.load.engine_target import EngineTarget

    if model is None:
        options.usage_error(f"MODEL is missing. {options.MODEL_HELP}")
    llm = fastgen.load(model, **load)
    tokenizer, vocab_size = llm.tokenizer, llm.spec.vocab_size
    encode = None if tokenizer is None else lambda text: tokenizer(text)["input_ids"]
    with EngineTarget(llm.release_engine(), {"model": model, "load": {**load}}) as target:
        yield target, Setup(target, vocab_size, encode)


@contextmanager
def opened(model: str | None, given: EndpointOptions, load: options.Given) -> Iterator[Setup]:
    """Yields what the flags name: an engine in this process, a server that is started for it, or one that runs."""
    if given.base_url is None and not given.with_server:
        if given.prompts == "text":
            options.usage_error("--prompts text is for a server: give --base-url or --with-server")
        with opened_engine(model, load) as (_, setup):
            yield setup
    elif given.base_url is not None:
        if given.with_server:
            options.usage_error("--with-server starts a server, --base-url names one that runs: give one of the two")
        if load:
            options.usage_error(f"{_flags(load)}: that is up to the server that --base-url names")
        yield _served(given.base_url, given, given.tokenizer or model)
    else:
        from fastgen.lab.load.started_server import started_server

        if model is None:
            options.usage_error(f"MODEL is missing. {options.MODEL_HELP}")
        with started_server(model, load) as deployment:
            yield _served(deployment.address, given, given.tokenizer or _own_tokenizer(model))


def _served(server: str, given: EndpointOptions, tokenizer: str | None) -> Setup:
    from fastgen.lab.load.endpoint import EndpointTarget
    from fastgen.lab.load.tokenizer import open_tokenizer
    from fastgen.serving.clients.addresses import trusting
    from fastgen.serving.clients.connect import find_server

    found = find_server(server) if not server.startswith(("http://", "https://")) else _known(server)
    address, certificate = (found, None) if isinstance(found, str) else (found.address, found.certificate)
    codec = None if tokenizer is None else open_tokenizer(tokenizer)
    target = EndpointTarget(
        address,
        endpoint=given.endpoint,
        model=given.served_model_name,
        codec=codec,
        sends_text=given.prompts == "text",
        tls=None if certificate is None else trusting(certificate),
    )
    if codec is None:
        return Setup(target, _vocab_size(target), None)
    return Setup(target, len(codec.tokenizer), codec.encode)


def _own_tokenizer(model: str) -> str | None:
    """Returns ``model`` if it has a tokenizer."""
    from fastgen.lab.load.tokenizer import open_tokenizer

    try:
        open_tokenizer(model)
    except FastgenError:
        return None
    return model


def _known(address: str) -> Any:
    """Returns the server of this machine with this address, which may have a certificate of its own, or ``address``."""
    from fastgen.serving.clients.deployments import deployment_at

    return deployment_at(address) or address


def _vocab_size(target: EndpointTarget) -> int:
    """Returns how many tokens the model of a server has, as fastgen's servers say it."""
    from fastgen.lab.load.endpoint import RefusedError

    async def ask() -> Any:
        try:
            return await target.get("/info")
        finally:
            await target.close()

    try:
        return int(asyncio.run(ask())["vocab_size"])
    except (RefusedError, KeyError, TypeError, ValueError):
        raise FastgenError("the server does not say which tokens its model has: name it with --tokenizer") from None


def workload_of(given: WorkloadOptions, setup: Setup) -> Workload:
    """Returns the workload that the flags name; ``--num-prompts`` wins over its ``n``."""
    from fastgen.lab.workloads.registry import make_workload

    text = given.workload
    if given.num_prompts is not None:
        name, _, parameters = text.partition(":")
        others = [each for each in parameters.split(",") if each and not each.startswith("n=")]
        text = f"{name}:{','.join([*others, f'n={given.num_prompts}'])}"
    return make_workload(text, encode=setup.encode)


def traffic_of(given: TrafficOptions, workload: Workload, setup: Setup) -> Arrivals | int | None:
    """Returns when requests are sent, as ``fastgen.lab.experiments.serve`` takes it."""
    from fastgen.lab.experiments.serve import AtOnce
    from fastgen.lab.workloads.arrivals import Gamma, Poisson, Ramp, make_arrivals

    ramp = (given.ramp_up_strategy, given.ramp_up_start_rps, given.ramp_up_end_rps)
    ways = {
        "--request-rate": given.request_rate is not None,
        "--arrivals": given.arrivals is not None,
        "--ramp-up-strategy": any(each is not None for each in ramp),
        "--max-concurrency": given.max_concurrency is not None,
    }
    chosen = [flag for flag, is_given in ways.items() if is_given]
    if len(chosen) > 1:
        options.usage_error(
            f"{' and '.join(chosen)}: give one. A rate that waits for clients would hide how long requests would have "
            "waited"
        )
    if given.burstiness is not None and given.request_rate is None and not ways["--ramp-up-strategy"]:
        options.usage_error("--burstiness goes with --request-rate or --ramp-up-strategy")
    if given.max_concurrency is not None:
        return given.max_concurrency
    if given.arrivals is not None:
        return make_arrivals(given.arrivals)
    if ways["--ramp-up-strategy"]:
        strategy, start, end = ramp
        if strategy is None or start is None or end is None:
            options.usage_error("a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
        return Ramp(start, end, strategy, given.burstiness or 1.0)
    if given.request_rate is not None and given.request_rate < math.inf:
        return Poisson(given.request_rate) if given.burstiness is None else Gamma(given.request_rate, given.burstiness)
    if given.request_rate is None and workload.requests(vocab_size=setup.vocab_size, seed=0)[0].due_s is not None:
        return None
    return AtOnce()


def _flags(load: options.Given) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in load)
