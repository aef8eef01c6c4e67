"""Random-weight checkpoints made by transformers, and transformers' own answers for them: the independent reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import fastgen
from fastgen.runtime.requests.outputs import GenerationOutput

NUM_STEPS = 24
TOLERANCE = 1e-4


def randomise(model: PreTrainedModel, seed: int, spread: float = 1.2) -> PreTrainedModel:
    """Weights so large that a wrong eps, scale, bias or norm changes the answer, norms away from 1 and biases from 0.

    Matrices get a standard deviation of ``spread / sqrt(fan in)``, so that scores and logits spread by several units,
    yet rounding is not amplified: at twice the spread transformers' own fp32 answer lies 1e-4 from its fp64 one. So
    does an embedding that is the head as well; another one gets a standard deviation of 1. Norms, which may keep their
    difference from 1 only, and biases are moved from where transformers starts them. So is what corrects a router.
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    turned = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    corrections = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim >= 2 and "norm" not in name:
                looked_up = "embed" in name and parameter is not head
                fan_in = parameter.shape[0 if id(parameter) in turned else -1]
                parameter.copy_(noise * (1.0 if looked_up else spread / fan_in**0.5))
            else:
                parameter.copy_(noise * 0.3 + parameter.mean())
    return model.eval()


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


@torch.no_grad()
def log_probs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """``[len(token_ids), V]``: row ``i`` is the distribution of the token after ``token_ids[: i + 1]``."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float().log_softmax(-1)


def check_family(
    config: PreTrainedConfig,
    model_class: Any,
    options: dict[str, Any],
    seed: int,
    *,
    attention: str = "eager",
    write: Callable[[PreTrainedModel, Path], object] = save,
    num_steps: int = NUM_STEPS,
) -> float:
    """A model of ``config`` answers here as in transformers: three prompts, and ``num_steps`` greedy steps after each.

    ``options`` are :func:`fastgen.load`'s, the reference's target unless they say another, in fp32 unless they say
    another ``dtype``; ``write`` puts the checkpoint into a directory. Returns the largest difference of a
    log-probability.
    """
    # the plain loop over experts: transformers' grouped product takes sizes that are multiples of 16 bytes only
    config._experts_implementation = "eager"
    model = randomise(model_class._from_config(config, attn_implementation=attention), seed)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = config.vocab_size
    lengths = torch.randint(1, 50, (3,), generator=generator).tolist()
    prompts = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as directory:
        write(model, Path(directory))
        with fastgen.load(directory, **({"dtype": "float32", "target": "torch"} | options)) as llm:
            outputs = llm.generate(
                prompts,
                temperature=0,
                max_new_tokens=num_steps,
                ignore_eos=True,
                logprobs=vocab_size,
                prompt_logprobs=vocab_size,
            )
    assert [len(output.token_ids) for output in outputs] == [num_steps] * 3
    return max(assert_equal_to_reference(model, each, tolerance=TOLERANCE, vocab_size=vocab_size) for each in outputs)


def assert_equal_to_reference(
    model: PreTrainedModel, output: GenerationOutput, *, tolerance: float, vocab_size: int
) -> float:
    """Whole distributions at every prompt position and every step, and the greedy token wherever the margin tells.

    ``output`` was generated greedily with ``logprobs`` and ``prompt_logprobs`` of the whole vocabulary. Returns the
    largest difference.
    """
    prompt, answer = output.prompt_token_ids, output.token_ids
    expected = log_probs(model, prompt + answer[:-1])
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(output.logprobs) == len(answer)
    found = [row for row in output.prompt_logprobs[1:] if row is not None] + output.logprobs
    assert len(found) == len(expected)
    rows = torch.tensor([[row[token_id] for token_id in range(vocab_size)] for row in found])
    difference = (rows - expected).abs().amax(-1)
    worst = int(difference.argmax())
    assert difference[worst] <= tolerance, f"position {worst} differs by {difference[worst]:.2e}, prompt {len(prompt)}"
    for step, token_id in enumerate(answer):
        row = expected[len(prompt) - 1 + step]
        best, second = row.topk(2).values.tolist()
        if best - second > 2 * tolerance:
            assert token_id == int(row.argmax()), f"step {step}"
    return float(difference[worst])


def rounding_errors(
    config: PreTrainedConfig,
    model_class: Any,
    *,
    attention: str = "eager",
    dtype: torch.dtype = torch.bfloat16,
    write: Callable[[PreTrainedModel, Path], object] = save,
    **options: Any,
) -> tuple[float, float]:
    """Returns how far answers in 16 bits lie from the exact ones of the same weights in fp32: ours and transformers'.

    ``options`` are :func:`fastgen.load`'s, the reference's target unless they say another.

    The root of the mean square of a position's log-probabilities, at the median of a prompt's positions: where rounding
    sends a token to another expert, on either side, that position is off by twenty times as much as the others.
    """
    config._experts_implementation = "eager"
    exact = randomise(model_class._from_config(config, attn_implementation=attention), 7, spread=0.8)
    exact.to(dtype).to(torch.float32)
    rounded = model_class._from_config(config, attn_implementation=attention)
    rounded.load_state_dict(exact.state_dict())
    rounded = rounded.to(dtype).eval()
    vocab_size = config.vocab_size
    prompt = torch.randint(vocab_size, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    with tempfile.TemporaryDirectory() as directory:
        write(rounded, Path(directory))
        with fastgen.load(directory, **({"max_model_len": 96, "target": "torch"} | options)) as llm:
            output = llm.generate(prompt, max_new_tokens=1, temperature=0, prompt_logprobs=vocab_size, ignore_eos=True)
    ours = torch.tensor([[row[i] for i in range(vocab_size)] for row in output.prompt_logprobs[1:]])
    truth, theirs = log_probs(exact, prompt[:-1]), log_probs(rounded, prompt[:-1])
    return _median_error(ours, truth), _median_error(theirs, truth)


def _median_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return (found - truth).square().mean(-1).sqrt().median().item()
