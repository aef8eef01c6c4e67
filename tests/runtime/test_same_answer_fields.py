"""A request's answer is its own: every sampling field at once, cut into any chunks, at every small budget, preempted.

On the ``cpp`` target, where the logits are the same bits, so that nothing is left to a margin: ids, text, reasons and
log-probabilities are equal or wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import GenerationOutput, SamplingParams
from fastgen.runtime.scheduling.policies import splitfuse
from tests.draws import number
from tests.runtime.checkpoints import VOCAB_SIZE, families, save_checkpoint, save_tokenizer, small_cache
from tests.runtime.held import assert_nothing_held

NUM_REQUESTS = 41
LONGEST = 60  # tokens of prompt and answer


def drawn_fields(rng: random.Random) -> dict[str, Any]:
    """Each field in about half of the requests, within its range."""
    values: dict[str, Any] = {
        "temperature": rng.choice([0.4, 0.9, 1.5]),
        "top_k": rng.randint(1, 40),
        "top_p": rng.uniform(0.3, 1),
        "min_p": rng.uniform(0, 0.2),
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5) for _ in range(5)},
        "n": rng.randint(2, 3),
        "stop": [rng.choice("abcdefghij"), rng.choice(["th", "e c", "at"])],
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), 3),
        "min_new_tokens": rng.randint(1, 8),
        "ignore_eos": True,
        "logprobs": rng.randint(0, 4),
        "prompt_logprobs": rng.randint(0, 4),
    }
    return {name: value for name, value in values.items() if rng.random() < 0.5}


def drawn_request(index: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(index)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
    length = rng.randint(8, LONGEST - len(prompt))
    return prompt, SamplingParams(seed=rng.getrandbits(64), max_new_tokens=length, **drawn_fields(rng))


PROMPTS, SAMPLINGS = zip(*map(drawn_request, range(NUM_REQUESTS)), strict=True)


@pytest.fixture(scope="module", params=families("mistral"))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[GenerationOutput]:
    with fastgen.load(directory, target="cpp") as llm:
        outputs = [llm.generate(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    reasons = [completion.finish_reason for output in outputs for completion in output.completions]
    assert {"stop", "length"} == set(reasons)
    return outputs


def result_of(output: GenerationOutput) -> list[object]:
    """All that a request is given, its times aside."""
    return [
        (each.text, each.token_ids, each.finish_reason, each.error, each.logprobs, each.prompt_logprobs)
        for each in output.completions
    ]


def assert_same(alone: SequenceOf[GenerationOutput], outputs: SequenceOf[GenerationOutput]) -> None:
    for index, (one, other) in enumerate(zip(alone, outputs, strict=True)):
        assert result_of(other) == result_of(one), f"request {index}: {SAMPLINGS[index]}"


def test_at_every_small_budget(directory: Path, alone: list[GenerationOutput]) -> None:
    for token_budget in range(8, 25, number(1, in_short=3)):
        with fastgen.load(directory, target="cpp", token_budget=token_budget) as llm:
            some = slice(token_budget % 4, None, 4)
            assert_same(alone[some], llm.generate(PROMPTS[some], SAMPLINGS[some]))
            assert_nothing_held(llm._engine)


def test_among_forty_others_in_any_chunks(
    directory: Path, alone: list[GenerationOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of even shares, each step takes a random part of what is pending."""
    rng = random.Random(3)

    def any_chunk(num_decodes: int, num_pending: int, token_budget: int, sizes: SequenceOf[int]) -> tuple[int, int]:
        most = min(num_pending, token_budget - num_decodes)
        taken = rng.choice([min(1, most), rng.randint(min(1, most), most)])
        return splitfuse.smallest_size(num_decodes + taken, sizes), taken

    monkeypatch.setattr(splitfuse, "even_share", any_chunk)
    with fastgen.load(directory, target="cpp", token_budget=48, max_num_seqs=48) as llm:
        assert_same(alone, llm.generate(PROMPTS, SAMPLINGS))
        assert_nothing_held(llm._engine)


def test_with_preemptions(directory: Path, alone: list[GenerationOutput]) -> None:
    options = {"target": "cpp", "block_size": 4, "token_budget": 16}
    with fastgen.load(directory, kv_cache_memory=small_cache(directory, LONGEST, **options), **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS)
        assert_nothing_held(llm._engine)
    assert sum(each.metrics.preemptions for output in outputs for each in output.completions) >= 10
    assert_same(alone, outputs)


def test_while_streams_are_closed_and_requests_come(directory: Path, alone: list[GenerationOutput]) -> None:
    """By the public face alone: streams are drained, closed early or dropped, and generate runs between."""
    rng = random.Random(11)
    with fastgen.load(directory, target="cpp", token_budget=16, max_num_seqs=5) as llm:
        for index in range(0, NUM_REQUESTS - 1, 2):
            mine = llm.stream(PROMPTS[index], SAMPLINGS[index])
            closed = llm.stream(PROMPTS[index + 1], SAMPLINGS[index + 1])
            dropped = llm.stream(PROMPTS[index], max_new_tokens=20)
            for stream in rng.sample([closed, dropped], 2):
                for _ in range(rng.randint(0, 3)):
                    next(stream, None)
            if rng.random() < 0.5:
                assert_same_at(alone, index + 1, llm.generate(PROMPTS[index + 1], SAMPLINGS[index + 1]))
            closed.close()
            del stream, dropped
            texts = [""] * SAMPLINGS[index].n
            for chunk in mine:
                texts[chunk.index] += chunk.text
            assert texts == [completion.text for completion in mine.output.completions]
            assert_same_at(alone, index, mine.output)
            del mine, closed
        assert_nothing_held(llm._engine)


def assert_same_at(alone: list[GenerationOutput], index: int, output: GenerationOutput) -> None:
    assert result_of(output) == result_of(alone[index]), f"request {index}: {SAMPLINGS[index]}"
