"""``fastgen serve``: a model behind HTTP and gRPC, until it is told to end."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fastgen.cli import options
from fastgen.errors import FastgenError


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A built-in such as tiny-llama, a local directory, or a hub id."),
    ] = None,
    properties: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A serving.properties of LMI, translated; flags given beside it count."),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List what is served on this machine, and end.")] = False,
    stop: Annotated[str | None, typer.Option(metavar="NAME", help="End the server of this model, and wait.")] = None,
    host: Annotated[
        str | None, typer.Option(help="The address to listen on, 127.0.0.1 by default; 0.0.0.0 is every one.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="For HTTP, 8000 by default; 0 takes any that is free.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="For gRPC, which is not served without.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; MODEL by default.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keys, one a line, of which clients need one.")
    ] = None,
    tls_cert_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Speak TLS, with this certificate chain (PEM).")
    ] = None,
    tls_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds that requests may take to finish when it ends; 30 by default.")
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
    _need_extra()
    if list_all:
        _list()
    elif stop is not None:
        _stop(stop)
    else:
        _serve(ctx)


def _serve(ctx: typer.Context) -> None:
    from fastgen.serving.options import ServeOptions
    from fastgen.serving.run import run

    ours = [field.name for field in fields(ServeOptions)]
    given = options.given_load_arguments(ctx)
    given |= {name: value for name in ("model", *ours) if (value := ctx.params.get(name)) is not None}
    if ctx.params["properties"] is not None:
        given = _translated(ctx.params["properties"]) | given
    if "model" not in given:
        options.usage_error("MODEL is missing: a built-in such as tiny-llama, a local directory, or a hub id")
    run(
        {name: value for name, value in given.items() if name not in ours},
        ServeOptions(**{name: value for name, value in given.items() if name in ours}),
    )


def _translated(file: Path) -> dict[str, Any]:
    """What ``file`` asks for; what became of each of its keys is told."""
    from fastgen.serving.lmi import translate

    translation = translate(file)
    for note in translation.notes:
        print(note, file=sys.stderr)
    return translation.arguments


def _list() -> None:
    from fastgen.serving.deployments import deployments

    for one in deployments():
        print(
            f"{one.name}  {one.address}  process {one.pid}" + (f"  gRPC {one.grpc_address}" if one.grpc_address else "")
        )


def _stop(name: str) -> None:
    from fastgen.serving.client import client

    client(name).terminate_server()


def _need_extra() -> None:
    for module in ("fastapi", "uvicorn", "zmq", "msgspec", "grpc", "grpc_health", "grpc_reflection", "httpx2"):
        if importlib.util.find_spec(module) is None:
            raise FastgenError(f"serving needs the package {module}; pip install 'fastgen[serve]'")
