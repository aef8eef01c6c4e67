"""The flags that several commands of ``fastgen bench`` share, each stated once. Names are those of ``vllm bench`` where
the same thing is meant.
"""

# Annotations are not postponed: fastgen.arguments reads the types of the fields.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastgen.arguments import ABOVE_0, AT_LEAST_1, WHOLE_FROM_0, Check, Option, check

_RAMPS = ("linear", "exponential")


@dataclass(frozen=True)
class WorkloadOptions:
    """Holds the flags of the workload."""

    workload: Annotated[
        str, Option("NAME or NAME:PARAMETER=VALUE,…; `fastgen bench workloads` lists all.", metavar="WORKLOAD")
    ] = "fixed"
    num_prompts: Annotated[
        int | None, Option("Number of requests or sessions.", check=AT_LEAST_1, default="the workload's own")
    ] = None
    seed: Annotated[int, Option("Seed of prompts, lengths and arrivals.", check=WHOLE_FROM_0)] = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrafficOptions:
    """Holds the flags of open and closed loops."""

    request_rate: Annotated[
        float | None,
        Option(
            "Open loop: requests per second, by a Poisson process; inf sends all at once.",
            check=ABOVE_0,
            default="the workload's own times, or all at once",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        Option("With --request-rate: below 1 burstier, above 1 more even.", check=ABOVE_0, default="1, Poisson"),
    ] = None
    arrivals: Annotated[
        str | None, Option("Another open loop, such as constant:rate=4 or ramp:start=1,end=8.", metavar="ARRIVALS")
    ] = None
    ramp_up_strategy: Annotated[
        str | None,
        Option("How the rate changes: linear or exponential.", check=Check("linear or exponential", _RAMPS.count)),
    ] = None
    ramp_up_start_rps: Annotated[float | None, Option("The rate at the beginning of a ramp.", check=ABOVE_0)] = None
    ramp_up_end_rps: Annotated[float | None, Option("The rate at the end of a ramp.", check=ABOVE_0)] = None
    max_concurrency: Annotated[
        int | None,
        Option("Closed loop: clients, each of which waits for its answer before it asks again.", check=AT_LEAST_1),
    ] = None
    num_warmups: Annotated[
        int, Option("Open loop: requests before the run. Clients of a closed loop send one each.", check=WHOLE_FROM_0)
    ] = 1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class EndpointOptions:
    """Holds the flags of a server that is measured in place of an engine in this process."""

    base_url: Annotated[
        str | None,
        Option(
            "Measure the server at this address, such as http://127.0.0.1:8000, or with this name on this machine.",
            metavar="URL",
            default="an engine in this process",
        ),
    ] = None
    with_server: Annotated[bool, Option("Start fastgen serve for the run, and measure it by HTTP.")] = False
    endpoint: Annotated[
        str, Option("/v1/completions, /v1/chat/completions, or fastgen's own /generate.", metavar="PATH")
    ] = "/v1/completions"
    served_model_name: Annotated[
        str | None, Option("The server's name of the model.", default="the first that it lists")
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "Directory, built-in or hub id of the server's tokenizer.", default="MODEL; fastgen's server needs none"
        ),
    ] = None
    prompts: Annotated[
        str,
        Option(
            "How a server gets prompts: ids (token ids), or text, which it encodes as part of the measured time.",
            check=Check("ids or text", ("ids", "text").count),
        ),
    ] = "ids"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class OutputOptions:
    """Holds the flags of files of results."""

    output: Annotated[
        Path | None,
        Option("Write raw records (JSON Lines) and the summary (JSON) to this directory.", metavar="DIR", convert=Path),
    ] = None
    save_result: Annotated[bool, Option("Write records and summary to the current directory.")] = False


@dataclass(frozen=True)
class SLOOptions:
    """Holds the limits of good answers."""

    goodput: Annotated[
        Sequence[str],
        Option(
            "Limits of a good answer in ms: ttft:200 tpot:50 itl:100 e2el:5000; or paper:4 (tokens/s). Repeatable.",
            metavar="LIMITS",
        ),
    ] = ()


@dataclass(frozen=True)
class SearchOptions:
    """Holds the flags of a search."""

    search_by: Annotated[
        str,
        Option(
            "clients (closed loop) or rate (open loop, Poisson).",
            check=Check("clients or rate", ("clients", "rate").count),
        ),
    ] = "clients"
    share: Annotated[
        float,
        Option("Share of requests that must be good.", check=Check("a number between 0 and 1", lambda x: 0 < x < 1)),
    ] = 0.9
    start: Annotated[float, Option("The first number of clients, or rate.", check=ABOVE_0)] = 1.0
    resolution: Annotated[
        float, Option("By rate: end when the upper bound is within this share of the lower.", check=ABOVE_0)
    ] = 0.05
    seconds: Annotated[float, Option("By rate: how long a run lasts at least.", check=ABOVE_0)] = 30.0
    max_repeats: Annotated[int, Option("Most runs at one level.", check=AT_LEAST_1)] = 4

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class BatchOptions:
    """Holds the shape of the batch of ``fastgen bench latency``."""

    input_len: Annotated[int, Option("Tokens of a prompt.", check=AT_LEAST_1)] = 32
    output_len: Annotated[int, Option("Tokens of an answer.", check=AT_LEAST_1)] = 128
    batch_size: Annotated[int, Option("Requests that are sent at once.", check=AT_LEAST_1)] = 8
    num_iters_warmup: Annotated[int, Option("Batches before those that count.", check=WHOLE_FROM_0)] = 3
    num_iters: Annotated[int, Option("Batches that count.", check=AT_LEAST_1)] = 30
    seed: Annotated[int, Option("Seed of the prompts.", check=WHOLE_FROM_0)] = 0

    def __post_init__(self) -> None:
        check(self)
