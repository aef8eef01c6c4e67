"""Runs the same prompts through the engine alone, batched, in chunks, at every captured size, and with kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.verify.cases import Case
from fastgen.verify.disagreement import TOLERANCE
from fastgen.verify.subject import load_subject

LARGEST_SIZE = 64
_NUM_STEPS = 5
_MARGIN = 1e-3
_SAMPLING: dict[str, Any] = {
    "temperature": 0,
    "max_new_tokens": _NUM_STEPS,
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 0,
}


@dataclass(frozen=True)
class EngineResult:
    """The deviation of one run from the reference and from the prompts alone; ``problem`` describes a too large one."""

    check: str
    difference: float
    problem: str | None


def engine_results(
    recipe: Recipe,
    case: Case,
    spec: ModelSpec,
    logits: Tensor,
    sizes: Iterable[int],
    targets: Iterable[str],
    device: str = "cpu",
) -> Iterator[EngineResult]:
    """Compares log-probabilities of prompt and answer.

    It runs each prompt alone, then all together at every token budget in ``sizes``, then with the kernels of each of
    ``targets`` on ``device``. ``logits [T, V]`` are those of the reference for all prompts, concatenated.
    """
    prompts = [list(prompt) for prompt in case.prompts]
    expected = _expected(case, logits)
    alone = _outputs(recipe, case, spec, LARGEST_SIZE, prompts, one_by_one=True)
    yield _result("alone", alone, alone, expected, "one prompt alone")
    for size in sizes:
        outputs = _outputs(recipe, case, spec, size, prompts)
        check = "whole" if size >= max(map(len, prompts)) else "chunked"
        yield _result(check, outputs, alone, expected, f"{len(prompts)} prompts at token_budget={size}")
    for target in targets:
        outputs = _outputs(recipe, case, spec, LARGEST_SIZE, prompts, target, device)
        where = "" if device == "cpu" else f", device={device!r}"
        yield _result("kernels", outputs, alone, expected, f"{len(prompts)} prompts on target={target!r}{where}")


def _outputs(
    recipe: Recipe,
    case: Case,
    spec: ModelSpec,
    size: int,
    prompts: list[list[int]],
    target: str = "torch",
    device: str = "cpu",
    *,
    one_by_one: bool = False,
) -> list[GenerationOutput]:
    subject = load_subject(
        case.directory, recipe, spec, token_budget=size, max_num_seqs=min(size, 3), target=target, device=device
    )
    with subject as llm:
        batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        return [output for batch in batches for output in llm.generate(batch, **_SAMPLING)]


def _expected(case: Case, logits: Tensor) -> list[list[float]]:
    """Returns for every prompt the reference's log-probability of each token except the first."""
    rows, start = [], 0
    logprobs = logits.log_softmax(-1)
    for prompt in case.prompts:
        piece = logprobs[start : start + len(prompt) - 1]
        rows.append([float(piece[index, token]) for index, token in enumerate(prompt[1:])])
        start += len(prompt)
    return rows


def _result(
    check: str,
    outputs: list[GenerationOutput],
    alone: list[GenerationOutput],
    expected: list[list[float]],
    what: str,
) -> EngineResult:
    worst = 0.0
    for output, single, wanted in zip(outputs, alone, expected, strict=True):
        rows = (output.prompt_logprobs or [None])[1:]
        found = [row[token] for row, token in zip(rows, output.prompt_token_ids[1:], strict=True) if row is not None]
        worst = max([worst, *(abs(a - b) for a, b in zip(found, wanted, strict=True))])
        for step, (token, other) in enumerate(zip(output.token_ids, single.token_ids, strict=True)):
            mine, theirs = (output.logprobs or [])[step], (single.logprobs or [])[step]
            if token != other:
                best, second = sorted(theirs.values(), reverse=True)[:2]
                if best - second > _MARGIN:
                    gives = f"{what}: step {step} gives token {token}, alone {other} by a margin of {best - second:.1e}"
                    return EngineResult(check, worst, gives)
                break
            worst = max(worst, abs(mine[token] - theirs[token]))
    problem = None if worst <= TOLERANCE else f"{what}: log-probabilities differ by {worst:.1e}"
    return EngineResult(check, worst, problem)
