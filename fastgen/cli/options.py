"""Flags that several commands share: the arguments of ``fastgen.load`` and the fields of ``SamplingParams``.

Each flag is the argument's name in kebab case, a repeatable one in the singular. ``None``, or an empty list, means that
the flag was not given; the argument is then not passed, so that defaults are stated in one place only.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any, NoReturn, TextIO

import typer

import fastgen
from fastgen.errors import FastgenError, InvalidArgumentError, KernelError, OutOfMemoryError

LOAD_ARGUMENTS = (
    *("recipe", "device", "dtype", "token_budget", "max_num_seqs", "kv_cache_memory", "block_size", "max_model_len"),
    *("policy", "itl_target_ms", "aging_s"),
    *("prefix_caching", "num_threads", "target", "quantize", "speculative", "num_draft_tokens", "sealed", "revision"),
    "allow_config_keys",
)
SAMPLING_FIELDS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("logprobs", "prompt_logprobs", "timeout_s", "priority", "response_format"),
    *("beam_width", "length_penalty", "early_stopping"),
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A built-in such as tiny-llama, a local directory, or a hub id.")
]

Recipe = Annotated[str | None, typer.Option(help="A recipe's file or name, instead of the one the model asks for.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, or auto.")]
Dtype = Annotated[str | None, typer.Option(help="Such as float32 or bfloat16; auto is the checkpoint's own.")]
TokenBudget = Annotated[int | None, typer.Option(help="How many tokens a step may forward.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="How many sequences may run at once.")]
KvCacheMemory = Annotated[str | None, typer.Option(help="Memory for the KV cache: bytes, or such as 4GiB.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens in a block of the KV cache.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]
Policy = Annotated[str | None, typer.Option(help="splitfuse, prefill_first, orca, dynamic or static.")]
ItlTargetMs = Annotated[
    float | None, typer.Option(help="Longest gap that the prompts of others may put between two tokens, in ms.")
]
AgingS = Annotated[float | None, typer.Option(help="Seconds after which a request that waits moves up a class.")]
PrefixCaching = Annotated[
    bool | None, typer.Option(help="Use again what the KV cache has of prompts that begin alike; on by default.")
]
NumThreads = Annotated[int | None, typer.Option(help="Threads that compute on a CPU.")]
Target = Annotated[str | None, typer.Option(help="Whose kernels run: torch (the reference), cpp, or auto.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Keep matrices in few bits: int8_weight_only; by kernels for a CPU also int8 and int4, by those for a GPU "
        "int4_weight_only and fp8_weight_only."
    ),
]
Speculative = Annotated[str | None, typer.Option(help="ngram: draft what comes next from what stands there already.")]
NumDraftTokens = Annotated[int | None, typer.Option(help="With --speculative: most drafts a step and answer.")]
Sealed = Annotated[
    bool | None, typer.Option("--sealed", help="Compile nothing: run from the bundle beside the weights.")
]
Bundle = Annotated[str | None, typer.Option(metavar="DIR", help="The same, from the bundle in this directory.")]
Revision = Annotated[str | None, typer.Option(help="A hub repository's branch, tag or commit.")]
AllowConfigKeys = Annotated[
    list[str] | None,
    typer.Option("--allow-config-key", metavar="KEY", help="Pass over this key of config.json. Repeatable."),
]

MaxNewTokens = Annotated[int | None, typer.Option(help="Longest answer, in tokens.")]
MinNewTokens = Annotated[int | None, typer.Option(help="Shortest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that make up this probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many of the likeliest tokens; 0 is all.")]
MinP = Annotated[float | None, typer.Option(help="Draw from tokens that have this share of the likeliest's.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 makes tokens seen before less likely.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Taken from the logit of each token generated before.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, times how often it was generated.")]
LogitBias = Annotated[list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit. Repeatable.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
NumAnswers = Annotated[int | None, typer.Option("--n", "-n", help="How many answers to each prompt.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text. Repeatable.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="End the answer at this token. Repeatable.")
]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="Do not end at the end-of-text token.")]
Logprobs = Annotated[int | None, typer.Option(help="With --json: log-probabilities of so many alternatives.")]
PromptLogprobs = Annotated[int | None, typer.Option(help="With --json: the same for the prompt.")]
TimeoutS = Annotated[float | None, typer.Option(help="Seconds after which an answer is cut off.")]
ResponseFormat = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='What shape the answer must have, such as {"type": "json_object"}.'),
]
BeamWidth = Annotated[int | None, typer.Option(help="Search for the answer with so many beams.")]
LengthPenalty = Annotated[float | None, typer.Option(help="With beams: above 0 favours long answers.")]
EarlyStopping = Annotated[
    str | None, typer.Option(metavar="true|false|never", help="With beams: end when as many answers have ended.")
]
Priority = Annotated[int | None, typer.Option(help="The lower the more urgent, among requests that run together.")]


# The arguments of ``fastgen.serve`` that errors are about.
SERVE_ARGUMENTS = (
    *("port", "grpc_port", "tool_format", "api_key_file", "tls_cert", "tls_key", "allow_origins"),
    *("max_queued_requests", "max_queued_tokens", "max_prompt_tokens", "ttft_slo_s", "itl_target"),
    *("max_connections", "max_body_bytes", "header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s"),
    *("drain_timeout_s", "engine_timeout_s", "log_format", "log_requests", "log_prompts"),
)
# Of the arguments whose flags are called otherwise.
FLAG_NAMES = {
    "allow_config_keys": "allow_config_key",
    "allow_origins": "allow_origin",
    "ttft_slo_s": "ttft_slo",
    "header_timeout_s": "header_timeout",
    "body_timeout_s": "body_timeout",
    "write_timeout_s": "write_timeout",
    "keep_alive_s": "keep_alive",
    "drain_timeout_s": "drain_timeout",
    "engine_timeout_s": "engine_timeout",
}
_ARGUMENT = re.compile(rf"(?<![\w./'\"`-])({'|'.join(LOAD_ARGUMENTS + SERVE_ARGUMENTS)})\b(=?)(?=(\S?))")


def in_flags(error: FastgenError) -> str:
    """The message of ``error`` with the arguments of ``fastgen.load`` and ``fastgen.serve`` in it (``dtype='int3'``) as
    flags (``--dtype``).

    Only an error about arguments means one by its mere name; elsewhere that may be a key of some file. A kernel's error
    tells its parameters, which are nobody's flags.
    """
    if isinstance(error, KernelError):
        return str(error)
    about_arguments = isinstance(error, InvalidArgumentError | OutOfMemoryError)

    def flag(found: re.Match[str]) -> str:
        name, equals, following = found.groups()
        if not equals and not (about_arguments and "_" in name):
            return found[0]
        gap = " " if following.isalnum() or following in ("'", '"', "-", "[") else ""
        return f"--{FLAG_NAMES.get(name, name).replace('_', '-')}{gap if equals else ''}"

    return _ARGUMENT.sub(flag, str(error))


def usage_error(message: str) -> NoReturn:
    """Ends the command with ``message`` and exit status 2."""
    raise typer.BadParameter(message)


def given_load_arguments(ctx: typer.Context) -> dict[str, Any]:
    """The arguments of ``fastgen.load`` that the command line names; ``--bundle DIR`` is ``sealed=DIR``."""
    bundle = ctx.params.get("bundle")
    return _given(ctx, LOAD_ARGUMENTS) | ({} if bundle is None else {"sealed": bundle})


def given_sampling_fields(ctx: typer.Context) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that the command line names, checked here: before a model is loaded."""
    fields = _given(ctx, SAMPLING_FIELDS)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(_parse_bias(text) for text in fields["logit_bias"])
    if "response_format" in fields:
        fields["response_format"] = _parse_json("--response-format", fields["response_format"])
    if fields.get("early_stopping") in ("true", "false"):
        fields["early_stopping"] = fields["early_stopping"] == "true"
    fastgen.SamplingParams(**fields)
    return fields


def stdin() -> TextIO:
    """Standard input. Raises :class:`InvalidArgumentError` where it is closed."""
    if sys.stdin is None:
        raise InvalidArgumentError("standard input is closed, so there is nothing to read")
    return sys.stdin


def check_text(text: str) -> str:
    """``text``, unless it came from bytes that are not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        usage_error("a prompt is not UTF-8 text")
    return text


def _given(ctx: typer.Context, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: ctx.params[name] for name in names if ctx.params.get(name) not in (None, [], ())}


def _parse_json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        usage_error(f"{flag} is not JSON: {error}")


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        usage_error(f"--logit-bias {text}: expected ID=BIAS, such as 17=-100")
