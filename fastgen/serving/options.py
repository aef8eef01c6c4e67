"""The arguments of serving: where, to whom, and within which limits. The arguments of the model and its engine are in
:class:`fastgen.options.LoadOptions`.

This module imports nothing heavy: the command line needs it for ``--help``, also where the extra ``serve`` is not
installed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fastgen.arguments import ABOVE_0, AT_LEAST_0, AT_LEAST_1, PORT, Check, Option, check
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.routing import ROUTERS
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.tools.formats import tool_format_named

LogFormat = Literal["text", "json"]
# The Origin that browsers send for a page; a site in another form would never match one.
_HOST_NAME = re.compile(r"\*|[A-Za-z0-9_.-]+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the work that a server takes on. A request is *queued* until its first token comes."""

    max_queued_requests: Annotated[
        int,
        Option(
            "Most requests that may wait for their first token.",
            "Beyond that 429 with Retry-After.",
            check=AT_LEAST_1,
            lmi_key="job_queue_size",
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Option(
            "Most tokens in the prompts of queued requests together.",
            "One prompt alone is admitted whatever its length.",
            check=AT_LEAST_1,
        ),
    ] = 1 << 20
    max_prompt_tokens: Annotated[
        int | None, Option("Most tokens in one prompt.", check=AT_LEAST_1, default="as many as the model takes")
    ] = None
    ttft_slo_s: Annotated[
        float | None,
        Option("Refuse requests whose first token would come later, in seconds.", check=ABOVE_0, flag="--ttft-slo"),
    ] = None
    itl_target_ms: Annotated[
        float | None,
        Option(
            "Set --itl-target-ms, and refuse requests that would make all gaps between tokens longer, in ms.",
            check=ABOVE_0,
            name="itl_target",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the memory and the time that a connection may cost."""

    max_connections: Annotated[
        int,
        Option(
            "Most connections that are open at once, by HTTP and by gRPC each.",
            check=AT_LEAST_1,
        ),
    ] = 1024
    max_body_bytes: Annotated[
        int, Option("Most bytes in the body of one request, by HTTP and gRPC.", check=AT_LEAST_1)
    ] = 16 << 20
    # From the beginning of a connection or a request to the end of the request's head.
    header_timeout_s: Annotated[
        float,
        Option(
            "Seconds for the head of a request, or until a gRPC connection is set up.",
            check=ABOVE_0,
            flag="--header-timeout",
        ),
    ] = 10.0
    # From the end of the head to the end of the body.
    body_timeout_s: Annotated[
        float, Option("Seconds for the body of a request.", check=ABOVE_0, flag="--body-timeout")
    ] = 60.0
    write_timeout_s: Annotated[
        float,
        Option(
            "Seconds for a client to take 64 KiB of what waits for it, or all.",
            "After that the connection is closed.",
            check=ABOVE_0,
            flag="--write-timeout",
        ),
    ] = 30.0
    keep_alive_s: Annotated[
        float, Option("Seconds that an idle connection is kept open.", check=ABOVE_0, flag="--keep-alive")
    ] = 30.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments of ``fastgen serve`` beside those of ``fastgen.load``."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 is every address of the machine.")] = "127.0.0.1"
    port: Annotated[int, Option("Port for HTTP; 0 takes any free one.", check=PORT)] = 8000
    grpc_port: Annotated[
        int | None,
        Option("Port for gRPC, on the same host; 0 takes any free one.", check=PORT, default="gRPC is not served"),
    ] = None
    name: Annotated[str | None, Option("Name by which clients call the model.", default="MODEL")] = None
    tool_format: Annotated[
        str | None, Option("How the model writes tool calls.", default="as its chat template says")
    ] = None
    limits: Limits = field(default_factory=Limits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    api_keys: Annotated[
        ApiKeys,
        Option(
            "File of API keys, one a line; FASTGEN_API_KEY is one too.",
            "# begins a comment. With any key, requests need authorization: Bearer KEY.",
            name="api_key_file",
            type=str | Path | None,
        ),
    ] = field(default_factory=ApiKeys)
    tls_cert: Annotated[
        Path | None,
        Option(
            "Certificate (PEM), to serve HTTPS.",
            "The file also holds intermediate certificates. gRPC uses TLS too.",
            type=str | Path | None,
            convert=Path,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Option("Private key (PEM) of the certificate.", type=str | Path | None, convert=Path)
    ] = None
    allow_origins: Annotated[
        tuple[str, ...],
        Option(
            "Site whose pages may call this server (CORS), such as https://example.org.",
            flag_help="Repeatable.",
            flag="--allow-origin",
            metavar="SITE",
            type=Sequence[str],
            convert=tuple,
        ),
    ] = ()
    allow_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Name under which clients may call a server of this machine that has no keys.",
            "localhost and addresses in numbers may always be used; * is every name.",
            flag_help="Repeatable.",
            flag="--allow-host",
            metavar="NAME",
            type=Sequence[str],
            convert=tuple,
        ),
    ] = ()
    drain_timeout_s: Annotated[
        float,
        Option(
            "Seconds that running requests may take when the server ends.", check=AT_LEAST_0, flag="--drain-timeout"
        ),
    ] = 30.0
    engine_timeout_s: Annotated[
        float,
        Option(
            "Seconds without a sign of the engine after which it is restarted.", check=ABOVE_0, flag="--engine-timeout"
        ),
    ] = 60.0
    replicas: Annotated[
        int | None,
        Option(
            "Replicas of the model behind one address, on Ray Serve.",
            "scaling.md says more.",
            check=AT_LEAST_1,
            default="one engine, without Ray",
        ),
    ] = None
    address: Annotated[
        str | None,
        Option(
            "Cluster of Ray that the replicas run on: auto, or HOST:PORT of its head.",
            default="one of this machine alone, started for this server",
        ),
    ] = None
    router: Annotated[
        str,
        Option(
            "Router that chooses the replica of a request: prefix, least_tokens, round_robin or random.",
            "prefix takes the replica that holds the most of the prompt's blocks, unless it is much busier than "
            "another.",
            check=Check(f"one of {', '.join(map(repr, ROUTERS))}", lambda value: value in ROUTERS),
        ),
    ] = "prefix"
    log_format: Annotated[
        LogFormat,
        Option(
            "Log lines of text, or a JSON object for each: text or json.",
            check=Check("'text' or 'json'", lambda value: value in ("text", "json")),
        ),
    ] = "text"
    log_requests: Annotated[bool, Option("Log a line for each request, without its prompt.")] = False
    log_prompts: Annotated[bool, Option("With --log-requests: log the prompt too.")] = False

    def __post_init__(self) -> None:
        check(self)
        if self.tool_format is not None:
            tool_format_named(self.tool_format)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_cert and tls_key go together: a certificate and its private key")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidArgumentError(
                    f"allow_origins={origin!r}: expected a site as browsers write it, such as https://example.org or "
                    "http://localhost:3000, in small letters and with nothing after the port, or * for all"
                )
        for host in self.allow_hosts:
            if not _HOST_NAME.fullmatch(host):
                raise InvalidArgumentError(
                    f"allow_hosts={host!r}: expected a name such as models.example.org, without a scheme or a port, or "
                    "* for all"
                )
        for name, value, default in (("address", self.address, None), ("router", self.router, "prefix")):
            if self.replicas is None and value != default:
                raise InvalidArgumentError(f"{name}={value!r}: needs replicas; without them there is one engine")
        if self.log_prompts and not self.log_requests:
            raise InvalidArgumentError("log_prompts needs log_requests: prompts are part of its lines")
