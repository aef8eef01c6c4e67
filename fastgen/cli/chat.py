"""``fastgen chat``: a conversation. Works on a terminal, and piped: there each line of stdin is a turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fastgen
from fastgen.cli import options
from fastgen.errors import FastgenError, GenerationError, RequestTooLargeError

if TYPE_CHECKING:
    from fastgen import LLM
    from fastgen.runtime.llm import Stream

_HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    ctx: typer.Context,
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = None,
    timeout_s: options.TimeoutS = None,
    response_format: options.ResponseFormat = None,
    priority: options.Priority = None,
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
    """Talk with a model.

    On a terminal, or piped: there each line of stdin is a turn. /reset begins anew, /exit or Ctrl-D leaves, Ctrl-C
    stops an answer and keeps the conversation.
    """
    fields = options.given_sampling_fields(ctx)
    opening = [{"role": "system", "content": options.check_text(system)}] if system is not None else []
    on_terminal = options.stdin().isatty()
    with fastgen.load(model, **options.given_load_arguments(ctx)) as llm:
        if on_terminal:
            print(_HELP)
        messages = list(opening)
        for turn in _read_turns(on_terminal):
            if turn in ("/exit", "/quit"):
                break
            if turn == "/reset":
                messages = list(opening)
            elif turn.startswith("/"):
                print(f"unknown command {turn.split()[0]}: {_HELP}", file=sys.stderr)
            else:
                asked = [*messages, {"role": "user", "content": turn}]
                try:
                    answer = _print_answer(llm, asked, fields)
                except FastgenError as error:
                    if not on_terminal:
                        raise
                    print(f"fastgen: {error}", file=sys.stderr)  # the turn is forgotten, the conversation goes on
                else:
                    messages = [*asked, {"role": "assistant", "content": answer}]


def _read_turns(on_terminal: bool) -> Iterator[str]:
    """What the user says, line by line, without blank lines."""
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() editing and history)
    while True:
        try:
            line = input("> ") if on_terminal else input()
        except EOFError:
            if on_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
            continue
        except UnicodeDecodeError:
            options.usage_error("stdin is not UTF-8 text")
        if line.strip():
            yield options.check_text(line.strip())


def _print_answer(llm: LLM, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
    """Prints the answer as it comes and returns it, or what there is of it when Ctrl-C stops it."""
    answer = ""
    stream = _start_answer(llm, messages, fields)
    try:
        with contextlib.closing(stream):
            for chunk in stream:
                answer += chunk.text
                print(chunk.text, end="", flush=True)
            if stream.output.error is not None:
                raise GenerationError(stream.output.error)
    except KeyboardInterrupt:
        pass
    finally:
        print()
    return answer


def _start_answer(llm: LLM, messages: list[dict[str, str]], fields: dict[str, Any]) -> Stream:
    """The answer's stream. Where nobody said how long it may be, it is cut to what the context has left."""
    try:
        return llm.stream_chat(messages, **fields)
    except RequestTooLargeError as error:
        if error.room < 1:
            raise RequestTooLargeError(
                "the conversation is as long as the model can read; /reset begins anew", room=error.room
            ) from error
        if "max_new_tokens" in fields:
            raise
        return llm.stream_chat(messages, **fields, max_new_tokens=error.room)
