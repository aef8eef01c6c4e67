"""The sampler's draws as a distribution: frequencies against exact probabilities after all penalties, biases, masks
and filters; and draws at neighbouring seeds, positions and sequences independent of each other. On every target.

Draws are a fixed function of seed, position, sequence and token, so a test that passes passes always. A limit is
the 1 − 1e-6 quantile of chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from fastgen.compile.backends.choose import backend_of
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.sampling.slot_sampler import slot_sampler
from fastgen.runtime.step.input_batch import InputBatch
from tests.chi_square import chi_square
from tests.runtime.scripted_matcher import ScriptedMatcher

VOCAB = 24
PROMPT = [1, 2, 3]
GENERATED = [4, 5, 5, 5, 2]
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
ALLOWED = [token_id for token_id in range(VOCAB) if token_id % 5 != 3]
NUM_DRAWS = 8000
MAX_ROWS = 400
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 9},
    "top-p": {"temperature": 1.0, "top_p": 0.85},
    "min-p": {"temperature": 1.5, "min_p": 0.12},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": -0.4},
    "bias": {"temperature": 0.7, "logit_bias": {0: 2.0, 7: -1.0, 23: 100.0, 22: 99.0}},
    "mask": {"temperature": 1.1, "masked": True},
    "everything": {
        "temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.03, "masked": True, "logit_bias": {6: 1.5},
        "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "min_new_tokens": 9,
        "stop_token_ids": [0],
    },
}  # fmt: skip


def exact(way: dict[str, Any]) -> dict[int, float]:
    """The probability of each token that can be drawn, from the definitions, one number after the other."""
    scores = [float(value) for value in LOGITS]
    for token_id in range(VOCAB):
        count = GENERATED.count(token_id)
        if token_id in PROMPT + GENERATED:
            penalty = way.get("repetition_penalty", 1.0)
            scores[token_id] = scores[token_id] * penalty if scores[token_id] < 0 else scores[token_id] / penalty
        scores[token_id] -= way.get("presence_penalty", 0.0) * (count > 0) + way.get("frequency_penalty", 0.0) * count
        scores[token_id] += way.get("logit_bias", {}).get(token_id, 0.0)
        if way.get("masked"):
            if token_id not in ALLOWED:
                scores[token_id] = -math.inf
        elif len(GENERATED) < way.get("min_new_tokens", 0) and token_id in way["stop_token_ids"]:
            scores[token_id] = -math.inf
        scores[token_id] /= way["temperature"]
    ranked = sorted(range(VOCAB), key=lambda token_id: (-scores[token_id], token_id))
    kept = [token_id for token_id in ranked if scores[token_id] > -math.inf][: way.get("top_k") or VOCAB]
    weights = softmax(kept, scores)
    nucleus, mass = [], 0.0
    for token_id in kept:
        if mass >= way.get("top_p", 1.0):
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    weights = softmax(nucleus, scores)
    least = way.get("min_p", 0.0) * weights[nucleus[0]]
    return softmax([token_id for token_id in nucleus if weights[token_id] >= least], scores)


def softmax(token_ids: list[int], scores: list[float]) -> dict[int, float]:
    peak = max(scores[token_id] for token_id in token_ids)
    weights = {token_id: math.exp(scores[token_id] - peak) for token_id in token_ids}
    total = sum(weights.values())
    return {token_id: weight / total for token_id, weight in weights.items()}


# Draws


@cache
def sampler(target: str) -> Sampler:
    if target == "torch":
        return Sampler()
    loader = KernelLoader(CppBuilder(cpp_arch(device.current("cpu"))))
    load_thread_pool(loader)
    made = backend_of(loader, max_rows=MAX_ROWS)
    kernel = made.row_sampling(VOCAB, max_rows=MAX_ROWS)
    made.build()
    return Sampler(kernel=kernel)


def drawn_on_slots(sequences: list[Sequence]) -> list[int]:
    """By interpreted Triton kernels, each sequence in a slot of its own."""
    count = len(sequences)
    inputs = InputBatch(
        token_budget=count,
        max_num_seqs=count,
        max_rows=count,
        num_groups=1,
        max_blocks=1,
        block_size=4,
        device=torch.device("cpu"),
    )
    made = backend_of(KernelLoader(TritonBuilder("interpret")), max_rows=count, max_num_seqs=count)
    slots = slot_sampler(made, VOCAB, inputs)
    assert slots is not None
    made.build()
    sampler = Sampler(slots=slots)
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
    sampler.prepare(sequences)
    sampler.constrain(sequences)
    rows = inputs.sampled_rows(count)
    rows[0][:] = torch.arange(count)
    rows[1][:] = torch.tensor([each.num_tokens for each in sequences])
    logits = LOGITS.expand(count, -1).contiguous()
    slots.launch(logits)
    return ids(sampler.sample(logits, sequences))


def ids(sampled: list[Any]) -> list[int]:
    assert all(each.error is None for each in sampled)
    return [each.token_id for each in sampled]


def sequence(way: dict[str, Any], *, seed: int, shift: int = 0, index: int = 0) -> Sequence:
    """Its next token stands ``shift`` places later than that of others; the prompt is longer by a token used anyway."""
    fields = {name: value for name, value in way.items() if name != "masked"}
    if way.get("masked"):
        fields["response_format"] = ResponseFormat("json_object")
    sampling = SamplingParams(**fields, seed=seed)
    request = Request(0, [1] * shift + PROMPT, sampling, arrival_s=0.0)
    made = Sequence(request, index)
    made.token_ids.extend(GENERATED)
    if way.get("masked"):
        made.matcher = ScriptedMatcher(ALLOWED, VOCAB)  # type: ignore[assignment]
    return made


def drawn(target: str, way: dict[str, Any], axis: str, count: int) -> list[int]:
    """``count`` draws that differ in their seed, position or sequence index."""
    found: list[int] = []
    while len(found) < count:
        places = range(len(found), min(len(found) + MAX_ROWS, count))
        sequences = [sequence(way, **({"seed": 77} | {axis: place})) for place in places]
        found += ids(sampler(target).sample(LOGITS.expand(len(sequences), -1).contiguous(), sequences))
    return found


def chi_square_of(observed: dict[Any, int], expected: dict[Any, float]) -> tuple[float, float]:
    """Returns :func:`chi_square` of the cells that expect at least 5, with the others taken together."""
    assert set(observed) <= set(expected), "what has no probability was drawn"
    cells = [(observed.get(key, 0), due) for key, due in expected.items() if due >= 5]
    rare = [(observed.get(key, 0), due) for key, due in expected.items() if due < 5]
    if sum(due for _, due in rare) >= 1:
        cells.append((sum(seen for seen, _ in rare), sum(due for _, due in rare)))
    return chi_square(*zip(*cells, strict=True), least=1)


@pytest.mark.parametrize(
    ("way", "axis", "target"),
    [
        pytest.param(
            way, axis, target, marks=() if target == "cpp" or way in ("mask", "everything") else pytest.mark.slow
        )
        for way, axis in [*zip(WAYS, ["seed", "index"] * 4, strict=True), ("everything", "seed")]
        for target in ("torch", "cpp")
    ],
)
def test_frequencies_are_the_exact_probabilities(target: str, way: str, axis: str) -> None:
    probabilities = exact(WAYS[way])
    assert len(probabilities) > 2
    found = Counter(drawn(target, WAYS[way], axis, NUM_DRAWS))
    statistic, limit = chi_square_of(found, {token: share * NUM_DRAWS for token, share in probabilities.items()})
    assert statistic < limit


@pytest.mark.parametrize("target", ["torch", "cpp"])
@pytest.mark.parametrize("axis", ["seed", "index", "shift"])
def test_neighbouring_draws_are_independent(target: str, axis: str) -> None:
    """Counts pairs of neighbours, each draw in one pair."""
    way = {"temperature": 1.0, "top_k": 4}
    shares, count = exact(way), 2000 if axis == "shift" else NUM_DRAWS
    found = drawn(target, way, axis, count)
    pairs = Counter(zip(found[::2], found[1::2], strict=True))
    expected = {(a, b): shares[a] * shares[b] * count / 2 for a in shares for b in shares}
    statistic, limit = chi_square_of(pairs, expected)
    assert statistic < limit


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.slow)])
def test_draws_are_the_same_on_every_target(count: int) -> None:
    """Number for number, no two tokens here being as close as rounding; so what holds of one holds of all."""
    first = {name: drawn("torch", way, "seed", count) for name, way in WAYS.items()}
    assert {name: drawn("cpp", way, "seed", count) for name, way in WAYS.items()} == first
    sequences = [sequence(way, seed=seed) for way in WAYS.values() for seed in range(count)]
    found = drawn_on_slots(sequences)
    assert {name: found[place * count : (place + 1) * count] for place, name in enumerate(WAYS)} == first
