"""``fastgen serve``: a model behind HTTP and gRPC, until it is told to end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fastgen.cli import options


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A built-in such as tiny-llama, a local directory, or a hub id."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address to listen on, 127.0.0.1 by default; 0.0.0.0 is every one.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="For HTTP, 8000 by default; 0 takes any that is free.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="For gRPC, which is not served without; 0 as above.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; MODEL by default.")] = None,
    properties: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A serving.properties of LMI, translated; flags given beside it win."),
    ] = None,
    tool_format: Annotated[
        str | None, typer.Option(help="How the model writes calls of tools; by default as its chat template says.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List what is served on this machine, and end.")] = False,
    stop: Annotated[
        str | None, typer.Option(metavar="NAME", help="End the server of this name, model or address on this machine.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="A file of API keys, one a line; FASTGEN_API_KEY is one too.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="A certificate (PEM), to speak HTTPS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key (PEM).")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may ask this server, such as https://example.org.")
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="How many requests may wait for their first token; 1024 by default.")
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="How many tokens their prompts may have together; 1048576 by default.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="How many tokens a prompt may have.")] = None,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Refuse what would have its first token later than after so many seconds.")
    ] = None,
    itl_target: Annotated[
        float | None,
        typer.Option(help="--itl-target-ms, and refuse what would make all gaps longer than so many ms."),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="How many connections may be open; 1024 by default.")
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="How large a request may be; 16777216 by default.")] = None,
    header_timeout: Annotated[float | None, typer.Option(help="Seconds for a request's head; 10 by default.")] = None,
    body_timeout: Annotated[float | None, typer.Option(help="Seconds for a request's body; 60 by default.")] = None,
    write_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a client to take anything that waits for it; 30 by default.")
    ] = None,
    keep_alive: Annotated[
        float | None, typer.Option(help="Seconds that an idle connection is kept; 30 by default.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that requests may take to finish when the server ends; 30 by default.")
    ] = None,
    engine_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that an engine may be silent before it is started again; 60 by default."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text or json: what is logged, as lines or as objects; text by default.")
    ] = None,
    log_requests: Annotated[
        bool | None, typer.Option("--log-requests", help="Log a line for each request, without its prompt.")
    ] = None,
    log_prompts: Annotated[
        bool | None, typer.Option("--log-prompts", help="With --log-requests: log what was asked too.")
    ] = None,
    recipe: options.Recipe = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    token_budget: options.TokenBudget = None,
    max_num_seqs: options.MaxNumSeqs = None,
    kv_cache_memory: options.KvCacheMemory = None,
    block_size: options.BlockSize = None,
    max_model_len: options.MaxModelLen = None,
    policy: options.Policy = None,
    itl_target_ms: options.ItlTargetMs = None,
    aging_s: options.AgingS = None,
    prefix_caching: options.PrefixCaching = None,
    num_threads: options.NumThreads = None,
    target: options.Target = None,
    quantize: options.Quantize = None,
    speculative: options.Speculative = None,
    num_draft_tokens: options.NumDraftTokens = None,
    sealed: options.Sealed = None,
    bundle: options.Bundle = None,
    revision: options.Revision = None,
    allow_config_keys: options.AllowConfigKeys = None,
) -> None:
    """Serve MODEL to OpenAI's clients, by gRPC and to fastgen.client, until Ctrl-C or SIGTERM."""
    from fastgen.serving.extra import need_extra

    need_extra()
    if list_all:
        _list()
    elif stop is not None:
        _stop(stop)
    else:
        _serve(ctx)


def _serve(ctx: typer.Context) -> None:
    from fastgen.serving.arguments import SERVE_ARGUMENTS, sort_arguments
    from fastgen.serving.run import run

    arguments = {flag: argument for argument, flag in options.FLAG_NAMES.items()}
    named = {arguments.get(flag, flag): value for flag, value in ctx.params.items() if value is not None}
    given = options.given_load_arguments(ctx) | {
        name: named[name] for name in ("model", *SERVE_ARGUMENTS) if name in named
    }
    if (properties := ctx.params["properties"]) is not None:
        given = _translated(Path(properties)) | given
    if "model" not in given:
        options.usage_error("MODEL is missing: a built-in such as tiny-llama, a local directory, or a hub id")
    load_arguments, serve_options = sort_arguments(given)
    run(load_arguments, serve_options)


def _translated(file: Path) -> dict[str, Any]:
    """What ``file`` and the environment ask for; what became of each key is told."""
    from fastgen.serving.compat.lmi.translate import translate

    translation = translate(file, os.environ)
    for note in translation.notes:
        print(note, file=sys.stderr)
    return translation.arguments


def _list() -> None:
    from fastgen.serving.clients.deployments import deployments

    for one in deployments():
        by_grpc = "" if one.grpc_address is None else f"  gRPC {one.grpc_address}"
        print(f"{one.name}  {one.address}{by_grpc}  process {one.pid}")


def _stop(name: str) -> None:
    from fastgen.serving.clients.client import client

    client(name).terminate_server()
