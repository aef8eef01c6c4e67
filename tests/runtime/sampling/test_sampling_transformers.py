"""The sampler beside transformers' ``generate``: the processors that it builds of the same settings, in its own order,
leave the same tokens, of which the same noise draws the same; and whole greedy answers are the same, constraints too.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import fastgen
from fastgen import SamplingParams
from fastgen.compile.ops.sampling.reference import gumbel_noise
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.sampling.sampler import Sampler
from tests.runtime.constrained import EOS, KNOWN_CASES, VOCAB_SIZE, save_writer
from tests.runtime.sampling.test_sampler import cpp_kernel
from tests.runtime.scripted_matcher import ScriptedMatcher


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def drawn_settings(rng: random.Random) -> dict[str, Any]:
    """For both. A bias and a repetition penalty never go together: transformers applies the bias first."""
    return {
        "temperature": rng.choice([0.4, 1.0, 1.7]),
        "top_k": rng.choice([0, 1, 7, 50]),
        "top_p": rng.choice([1.0, 0.9, 0.4]),
        "min_p": rng.choice([0.0, 0.05, 0.3]),
        "min_new_tokens": rng.choice([0, 5]),
        **rng.choice([{}, {"repetition_penalty": rng.choice([0.7, 1.3, 4.0])}, {"bias": rng.uniform(-9, 9)}]),
    }


@pytest.mark.parametrize("target", ["torch", "cpp"])
@pytest.mark.parametrize("seed", range(5))
def test_processors_in_the_order_of_generate(model: Any, target: str, seed: int) -> None:
    rng = random.Random(f"{target} {seed}")
    sampler = Sampler([EOS], cpp_kernel(VOCAB_SIZE) if target == "cpp" else None)
    for _ in range(30):
        settings = drawn_settings(rng)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        generated = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 9))]
        allowed = sorted(rng.sample(range(VOCAB_SIZE), 60)) if rng.random() < 0.4 else None
        if allowed is not None:
            settings["min_new_tokens"] = 0  # with a format it is the format that says where an answer ends
        biased = rng.sample(range(VOCAB_SIZE), 20)
        bias = settings.pop("bias", None)
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(rng.getrandbits(31))) * 3

        config = GenerationConfig(do_sample=True, num_beams=1, num_return_sequences=1, **settings)
        if bias is not None:
            config.sequence_bias = [[[token_id], bias] for token_id in biased]
        config._eos_token_tensor = torch.tensor([EOS])
        processors = model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            prefix_allowed_tokens_fn=None if allowed is None else lambda batch, ids, allowed=allowed: allowed,
            device="cpu",
        )
        scores = processors(torch.tensor([prompt + generated]), logits.clone())
        where = [torch.tensor([each]) for each in (seed, len(prompt) + len(generated), 0)]
        weights = scores - scores.amax()
        expected = (weights + gumbel_noise(*where, VOCAB_SIZE)).argmax().item()  # type: ignore[arg-type]

        sampling = SamplingParams(
            **settings,
            seed=seed,
            logit_bias={} if bias is None else dict.fromkeys(biased, bias),
            response_format=None if allowed is None else ResponseFormat("json_object"),
        )
        sequence = Request(0, prompt, sampling, arrival_s=0.0).sequences[0]
        sequence.token_ids.extend(generated)
        if allowed is not None:
            sequence.matcher = ScriptedMatcher(allowed, VOCAB_SIZE)  # type: ignore[assignment]
        assert sampler.sample(logits, [sequence])[0].token_id == expected, settings


@pytest.mark.parametrize("target", ["torch", "cpp"])
@pytest.mark.parametrize("case", [None, *KNOWN_CASES], ids=lambda case: str(case and case.format)[:40])
def test_whole_greedy_answers(directory: Path, model: Any, target: str, case: Any) -> None:
    """Constrained by ``prefix_allowed_tokens_fn``, which asks of each token whether the text can get the format."""
    with fastgen.load(directory, target=target) as llm:
        tokenizer = llm.tokenizer
        vocabulary = {each: tokenizer.decode([each]) for each in tokenizer.get_vocab().values() if each > EOS}
        # Of characters of several bytes one only knows when they are whole: what could begin one is kept from both.
        halves = [each for each, text in vocabulary.items() if not text.isascii()]
        prompt = [5, 60, 61]
        fields: dict[str, Any] = {"repetition_penalty": 1.2, "min_new_tokens": 0 if case else 4}

        def allowed(_: int, token_ids: torch.Tensor) -> list[int]:
            text = "".join(vocabulary.get(each, "") for each in token_ids[len(prompt) :].tolist())
            whole = ((each, added) for each, added in vocabulary.items() if each not in halves)
            possible = [each for each, added in whole if case.can_become(text + added)]
            return possible + [EOS] * (case.has_it(text) or not possible)

        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
            eos_token_id=EOS,
            bad_words_ids=[[each] for each in halves],
            prefix_allowed_tokens_fn=allowed if case else None,
            **fields,
        )[0].tolist()[len(prompt) :]
        found = llm.generate(
            prompt,
            max_new_tokens=20,
            temperature=0,
            logit_bias=dict.fromkeys(halves, -100.0),
            response_format=case and case.unforced,
            **fields,
        )
    # Where nothing can follow, fastgen ends without the end-of-text token that transformers has to be given.
    assert found.token_ids in (expected, expected[:-1] if expected[-1] == EOS else expected)
