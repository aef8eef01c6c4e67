"""The facts of :mod:`fastgen.runtime.flight.why` in sentences."""

from __future__ import annotations

from fastgen.runtime.flight.recording import Step
from fastgen.runtime.flight.time_account import Cause, OtherPrompts, Span
from fastgen.runtime.flight.why import Gap, Preemption, Why

_WORDS: dict[Cause, str] = {
    "queued_step": "queued until a step was scheduled",
    "queued_slots": "queued for a slot",
    "queued_blocks": "queued for KV cache blocks",
    "queued_tokens": "queued behind prompts before it",
    "queued_policy": "held back by the scheduling policy",
    "own": "computing its own tokens",
    "recomputing": "computing again what a preemption lost",
    "other_prompts": "sharing steps with",
    "other_decodes": "sharing steps with decodes of others",
    "passed_over": "running while others had all the step's tokens",
    "preempted": "waiting after a preemption",
    "between_steps": "with no step running",
}
_ENDS = {
    "stop": "it stopped by itself",
    "length": "it reached its length",
    "cancelled": "it was cancelled",
    "timeout": "its time was up",
    "error": "it failed",
    None: "it was still going on where the recording ends",
}


def as_text(facts: Why) -> str:
    """Returns sentences, one per line."""
    lines = [_introduction(facts), _first_token(facts)]
    if facts.other_tokens is not None and facts.tokens_per_s is not None:
        lines.append(
            f"Then {_count(facts.new_tokens - 1, 'token')}, {facts.tokens_per_s:,.1f} a second: "
            f"{_shares(facts.other_tokens)}."
        )
    if facts.worst_gap is not None and facts.median_gap_s is not None:
        lines += _gaps(facts.median_gap_s, facts.worst_gap)
    if facts.expected_s is not None:
        lines.append(
            f"Its {_count(facts.steps, 'step')} took {seconds(facts.steps_s)} in all; "
            f"{seconds(facts.expected_s)} are expected of such steps."
        )
    if facts.preemptions:
        lines.append(_preemptions(facts.preemptions))
    return "\n".join(lines)


def seconds(length_s: float) -> str:
    """Returns a duration as text, with a suitable unit and number of digits."""
    if length_s < 0.9995e-3:
        return f"{length_s * 1e6:.0f} µs"
    return f"{length_s * 1e3:.3g} ms" if length_s < 0.9995 else f"{length_s:,.2f} s"


def _introduction(facts: Why) -> str:
    request, index = facts.sequence.split(".")
    which = f"Request {request}" + (f", completion {index} of {facts.completions}" if facts.completions > 1 else "")
    cached = f" ({facts.cached_tokens:,} of them found in the prefix cache)" if facts.cached_tokens else ""
    return (
        f"{which}: a prompt of {_count(facts.prompt_tokens, 'token')}{cached}, "
        f"{_count(facts.new_tokens, 'new token')} in {_count(facts.steps, 'step')} and {seconds(facts.total_s)}; "
        f"{_ENDS[facts.finish_reason]}."
    )


def _first_token(facts: Why) -> str:
    what = "No token came in" if facts.ttft_s is None else "First token after"
    behind = f" {_count(facts.ahead, 'sequence')} waited when it came." if facts.ahead else ""
    return f"{what} {seconds(facts.first_token.seconds)}: {_shares(facts.first_token)}.{behind}"


def _shares(span: Span) -> str:
    parts = []
    for cause, percent in span.percentages.items():
        others = f" {_others(span.others)}" if cause == "other_prompts" and span.others else ""
        if percent:
            parts.append(f"{percent} % {_WORDS[cause]}{others}")
    return ", ".join(parts) or "no time passed"


def _others(others: OtherPrompts) -> str:
    longest = f"{others.longest_tokens:,}-token prompt of request {others.longest_request}"
    return (
        f"the {longest}" if others.num_requests == 1 else f"{others.num_requests:,} prompts, the longest the {longest}"
    )


def _gaps(median_s: float, worst: Gap) -> list[str]:
    step = worst.step
    num_prompt_tokens = sum(entry.num_tokens for entry in step.prompts)
    num_decodes = len(step.entries) - len(step.prompts)
    what = [_count(num_decodes, "decode")] if num_decodes else []
    what += [_count(num_prompt_tokens, "prompt token")] if num_prompt_tokens else []
    preempted = "; meanwhile it was preempted" if worst.preempted else ""
    expected = "" if worst.expected_s is None else f", where {seconds(worst.expected_s)} are expected"
    return [
        f"Gaps between tokens: median {seconds(median_s)}, worst {seconds(worst.span.seconds)} after token "
        f"{worst.after:,}: {_shares(worst.span)}.",
        f"The longest step of that gap was step {step.step:,}, {seconds(step.end_s - step.began_s)} for "
        f"{' and '.join(what)}{expected} ({_phases(step)}){preempted}.",
    ]


def _phases(step: Step) -> str:
    if step.ran_s is None or step.ended_s is None:
        return f"schedule {seconds(step.scheduled_s - step.began_s)}, then it failed"
    phases = {
        "schedule": step.scheduled_s - step.began_s,
        "build": step.build_s,
        "forward and sample": step.ran_s - step.scheduled_s - step.build_s,
        "update": step.ended_s - step.ran_s,
    }
    return ", ".join(f"{name} {seconds(length_s)}" for name, length_s in phases.items())


def _preemptions(preemptions: tuple[Preemption, ...]) -> str:
    named = ", ".join(f"{each.step:,}" for each in preemptions[:5])
    more = f" and {len(preemptions) - 5:,} more" if len(preemptions) > 5 else ""
    lost = sum(each.lost_tokens for each in preemptions)
    waited_s = sum(each.waited_s for each in preemptions)
    return (
        f"{_count(len(preemptions), 'preemption')} (step {named}{more}): {_count(lost, 'token')} to compute again, "
        f"{seconds(waited_s)} until blocks were free."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
