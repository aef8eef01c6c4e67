"""``fastgen serve``: a model behind HTTP, until it is told to end."""

from __future__ import annotations

from typing import Annotated

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
    from fastgen.serving.options import ServeOptions
    from fastgen.serving.run import run

    run(
        {"model": model, **options.given_load_arguments(ctx)},
        ServeOptions(host=host, port=port, tool_format=tool_format),
    )
