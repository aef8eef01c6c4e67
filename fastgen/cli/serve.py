"""``fastgen serve``: a model behind HTTP, until it is told to end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fastgen.cli import options


def serve(
    ctx: typer.Context,
    model: options.Model,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    tool_format: Annotated[
        str | None, typer.Option(help="How the model writes calls of tools; by default as its chat template says.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of API keys, one a line; FASTGEN_API_KEY is one too.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM), to speak HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
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
        float, typer.Option(help="Seconds that requests may take to finish once the server is told to end.")
    ] = 30.0,
    engine_timeout: Annotated[
        float, typer.Option(help="Seconds that an engine may be silent before it is started again.")
    ] = 60.0,
    log_format: Annotated[str, typer.Option(help="text or json: what is logged, as lines or as objects.")] = "text",
    log_requests: Annotated[bool, typer.Option(help="Log a line for each request, without its prompt.")] = False,
    log_prompts: Annotated[bool, typer.Option(help="With --log-requests: log what was asked too.")] = False,
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
    """Serve MODEL."""
    from fastgen.serving.admission import Limits
    from fastgen.serving.api_keys import ApiKeys
    from fastgen.serving.options import ConnectionLimits, ServeOptions, parse_log_format
    from fastgen.serving.run import run

    arguments = {"model": model, **options.given_load_arguments(ctx)}
    if itl_target is not None:
        arguments["itl_target_ms"] = itl_target
    limits = {
        "max_queued_requests": max_queued_requests,
        "max_queued_tokens": max_queued_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "ttft_slo_s": ttft_slo,
        "itl_target_ms": itl_target,
    }
    connections = {
        "max_connections": max_connections,
        "max_body_bytes": max_body_bytes,
        "header_timeout_s": header_timeout,
        "body_timeout_s": body_timeout,
        "write_timeout_s": write_timeout,
        "keep_alive_s": keep_alive,
    }
    serve_options = ServeOptions(
        host=host,
        port=port,
        tool_format=tool_format,
        limits=Limits(**_given(limits)),
        connections=ConnectionLimits(**_given(connections)),
        api_keys=ApiKeys.load(api_key_file, os.environ),
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_origins=tuple(allow_origin or ()),
        drain_timeout_s=drain_timeout,
        engine_timeout_s=engine_timeout,
        log_format=parse_log_format(log_format),
        log_requests=log_requests,
        log_prompts=log_prompts,
    )
    run(arguments, serve_options)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Those that were given; the others have their defaults where they are declared."""
    return {name: value for name, value in fields.items() if value is not None}
