"""``fastgen generate``: continues one prompt or many."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fastgen
from fastgen.cli import options

if TYPE_CHECKING:
    from fastgen import LLM, GenerationOutput


@options.with_flags(sampling=options.SAMPLING_ARGUMENTS, load=options.LOAD_ARGUMENTS)
def generate(
    model: options.Model,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")],
    lines: Annotated[bool, typer.Option("--lines", help="With -: each non-blank line is a prompt.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its answer.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print the speed to stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt, one a line.")] = False,
    *,
    sampling: options.Given,
    load: options.Given,
) -> None:
    """Continue each PROMPT. Several are generated together and printed in order."""
    if not as_json and ("logprobs" in sampling or "prompt_logprobs" in sampling):
        options.usage_error("log-probabilities are printed by --json only")
    texts = _read_prompts(prompts, lines)
    fields = options.sampling_fields(sampling)
    with fastgen.load(model, **load) as llm:
        if len(texts) == 1 and fields.get("n", 1) == 1 and not as_json and sys.stdout.isatty():
            speed, outputs = _stream(llm, texts[0], fields, echo)
        else:
            speed, outputs = _generate(llm, texts, fields)
            if as_json:
                _print_json(texts, outputs)
            else:
                _print_text(texts, outputs, echo)
    if stats:
        print(speed, file=sys.stderr)
    if _report_failures(outputs):
        raise typer.Exit(1)


def _read_prompts(arguments: list[str], lines: bool) -> list[str]:
    if "-" not in arguments:
        if lines:
            options.usage_error("--lines needs prompts from stdin: give - as the only PROMPT")
        return [options.check_text(text) for text in arguments]
    if arguments != ["-"]:
        options.usage_error("- reads the prompts from stdin and stands alone")
    try:
        text = options.stdin().buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        options.usage_error("stdin is not UTF-8 text")
    if lines:
        prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    else:
        prompts = [text.removesuffix("\n")]
    if not any(prompts):
        options.usage_error("stdin holds no prompt")
    return prompts


@dataclass(frozen=True)
class _Speed:
    """The speed of a generation."""

    num_tokens: int
    elapsed_s: float
    # The time to the first token, of each prompt that got one.
    ttft_s: list[float]

    def __str__(self) -> str:
        text = f"{self.num_tokens} tokens in {self.elapsed_s:.2f} s: {self.num_tokens / self.elapsed_s:.1f} tokens/s"
        if self.ttft_s:
            text += f", first token after {1000 * statistics.median(self.ttft_s):.0f} ms"
        return text + (f" (median of {len(self.ttft_s)})" if len(self.ttft_s) > 1 else "")


def _generate(llm: LLM, prompts: list[str], fields: dict[str, Any]) -> tuple[_Speed, list[GenerationOutput]]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, **fields)
    elapsed_s = time.perf_counter() - start
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    ttft_s = [output.metrics.ttft_s for output in outputs if output.metrics.ttft_s is not None]
    return _Speed(num_tokens, elapsed_s, ttft_s), outputs


def _stream(llm: LLM, prompt: str, fields: dict[str, Any], echo: bool) -> tuple[_Speed, list[GenerationOutput]]:
    start = time.perf_counter()
    stream = llm.stream(prompt, **fields)
    num_tokens = 0
    ttft_s: list[float] = []
    if echo:
        print(prompt, end="", flush=True)
    try:
        for chunk in stream:
            if chunk.token_ids and not ttft_s:
                ttft_s = [time.perf_counter() - start]
            num_tokens += len(chunk.token_ids)
            print(chunk.text, end="", flush=True)
    finally:
        print()
    return _Speed(num_tokens, time.perf_counter() - start, ttft_s), [stream.output]


def _print_text(prompts: list[str], outputs: list[GenerationOutput], echo: bool) -> None:
    """Prints a single answer as it is, and several answers each under a line with its prompt's number."""
    alone = len(outputs) == 1 and len(outputs[0].completions) == 1
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        for answer, completion in enumerate(output.completions, 1):
            if not alone:
                print(f"[prompt {number}" + (f", answer {answer}]" if len(output.completions) > 1 else "]"))
            print((prompt if echo else "") + completion.text)


def _print_json(prompts: list[str], outputs: list[GenerationOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        record = {"prompt": prompt, **_answer_record(output), "metrics": asdict(output.metrics)}
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _logprobs_record(output.prompt_logprobs)
        if output.error is not None:
            record["error"] = str(output.error)
        if len(output.completions) > 1:
            record["completions"] = [_answer_record(completion) for completion in output.completions]
        print(json.dumps(record, allow_nan=False))


def _answer_record(output: GenerationOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.logprobs is not None:
        record["logprobs"] = _logprobs_record(output.logprobs)
    if output.score is not None:
        record["score"] = output.score
    return record


def _logprobs_record(logprobs: Iterable[Any]) -> list[dict[int, float | None] | None]:
    """Returns ``logprobs`` as JSON, which has no infinity: the log-probability of an impossible token is null."""
    return [
        None if entry is None else {token: value if math.isfinite(value) else None for token, value in entry.items()}
        for entry in logprobs
    ]


def _report_failures(outputs: list[GenerationOutput]) -> bool:
    """Prints to stderr which answers failed and why. Returns whether any did."""
    failed = False
    for number, output in enumerate(outputs, 1):
        for completion in output.completions:
            if completion.finish_reason == "error":
                failed = True
                print(f"fastgen: prompt {number}: {completion.error}", file=sys.stderr)
    return failed
