"""The sampler over sequences: each row by its own parameters, beside any others, with errors and log-probabilities; by
torch, and by the kernel."""

import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from fastgen.compile.backends.choose import backend_of
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host import device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.sampling.reference import gumbel_noise
from fastgen.errors import GenerationError
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling import sampler
from fastgen.runtime.sampling.sampler import Sampler, launch_prompt_logprobs
from tests.runtime.scripted_matcher import ScriptedMatcher

VOCAB = 60
EOS = 7


@cache
def cpp_backend():
    loader = KernelLoader(CppBuilder(cpp_arch(device.current("cpu"))))
    load_thread_pool(loader)
    return backend_of(loader, max_rows=32)


def cpp_kernel(vocab_size):
    backend = cpp_backend()
    kernel = backend.row_sampling(vocab_size, max_rows=32)
    backend.build()
    return kernel


@pytest.fixture(params=["torch", "cpp"])
def new_sampler(request):
    """Makes samplers, of one kind and then of the other."""

    def make(eos_token_ids=(EOS,), vocab_size=VOCAB):
        return Sampler(eos_token_ids, None if request.param == "torch" else cpp_kernel(vocab_size))

    return make


@pytest.fixture
def token(new_sampler):
    def sample(logits, *sequences):
        found = new_sampler().sample(logits, sequences)
        assert all(item.error is None for item in found)
        return [item.token_id for item in found]

    return sample


def sequence(prompt, generated=(), index=0, **fields):
    """Sequence ``index`` of a request for ``prompt`` that has ``generated`` so far."""
    sampling = SamplingParams(**{"n": index + 1, "seed": 0, **fields})
    made = Request(0, prompt, sampling, arrival_s=0.0).sequences[index]
    made.token_ids.extend(generated)
    return made


def logits_of(seed, num_rows=1, scale=3.0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def random_sequence(draw):
    generated = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 12))]
    fields = {
        "temperature": draw.choice([0.0, 0.0, 0.7, 1.5]),
        "top_k": draw.choice([0, 5, 10**25]),
        "top_p": draw.choice([1.0, 0.8]),
        "min_p": draw.choice([0.0, 0.1]),
        "repetition_penalty": draw.choice([1.0, 1.3]),
        "presence_penalty": draw.choice([0.0, 1.0]),
        "frequency_penalty": draw.choice([0.0, -0.5]),
        "logit_bias": draw.choice([{}, {3: 5.0, 4: -100.0}]),
        "min_new_tokens": draw.choice([0, 6]),
        "stop_token_ids": draw.choice([[], [9, 10]]),
        "ignore_eos": draw.random() < 0.3,
        "seed": draw.choice([0, -5, 2**70 + 3, draw.getrandbits(64)]),
        "logprobs": draw.choice([None, 0, 1, 4]),
    }
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
    made = sequence(prompt, generated, index=draw.choice([0, 0, 2]), **fields)
    return allowing(made, draw.sample(range(VOCAB), draw.randint(1, VOCAB))) if draw.random() < 0.3 else made


def allowing(made, token_ids):
    """``made`` with a response format that allows so much."""
    sampling = replace(made.request.sampling, ignore_eos=False, response_format=ResponseFormat("json_object"))
    copy = Request(0, made.request.prompt_ids, sampling, arrival_s=0.0).sequences[made.index]
    copy.token_ids[:] = made.token_ids
    copy.matcher = ScriptedMatcher(token_ids, VOCAB)
    return copy


def token_by_definition(row, made):
    """The token of one sequence, one number at a time where that is possible."""
    sampling, generated = made.request.sampling, made.token_ids[made.num_prompt_tokens :]
    scores = row.clone()
    for token_id in range(VOCAB):
        if token_id in made.token_ids:
            positive = scores[token_id] > 0
            scores[token_id] *= 1 / sampling.repetition_penalty if positive else sampling.repetition_penalty
        if token_id in generated:
            scores[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(token_id)
        scores[token_id] += sampling.logit_bias.get(token_id, 0.0)
        ends = token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos)
        if made.matcher is not None:
            is_forbidden = not made.matcher.mask()[token_id // 32] >> token_id % 32 & 1
        else:
            is_forbidden = ends and len(generated) < sampling.min_new_tokens
        if is_forbidden:
            scores[token_id] = -torch.inf
    if sampling.temperature == 0:
        return scores.argmax().item()
    scores /= sampling.temperature
    if 0 < sampling.top_k < VOCAB:
        scores[scores < scores.sort().values[-sampling.top_k]] = -torch.inf
    if sampling.top_p < 1:
        order = scores.argsort(descending=True)
        before = scores.softmax(0)[order].cumsum(0).roll(1)
        before[0] = 0
        scores[order[before >= sampling.top_p]] = -torch.inf
    probabilities = scores.softmax(0)
    scores[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    seed = (sampling.seed + 2**63) % 2**64 - 2**63
    draw = [torch.tensor([value]) for value in (seed, len(made.token_ids), made.index)]
    return (scores + gumbel_noise(*draw, VOCAB)[0]).argmax().item()


@pytest.mark.parametrize("seed", range(12))
def test_each_row_gets_its_token_whatever_the_batch(new_sampler, seed):
    draw = random.Random(seed)
    sequences = [random_sequence(draw) for _ in range(24)]
    logits = logits_of(seed, len(sequences))
    sampler = new_sampler()
    together = sampler.sample(logits, sequences)
    assert [item.token_id for item in together] == [
        token_by_definition(row, made) for row, made in zip(logits, sequences, strict=True)
    ]
    order = draw.sample(range(24), 24)
    assert sampler.sample(logits[order], [sequences[row] for row in order]) == [together[row] for row in order]
    alone = [sampler.sample(logits[row : row + 1], [sequences[row]])[0] for row in range(24)]
    assert alone == together


def test_logits_are_left_as_they_are(token):
    logits = logits_of(0, 2)
    before = logits.clone()
    token(logits, sequence([1], [2], repetition_penalty=2.0, min_new_tokens=5), sequence([1], temperature=1.0, top_k=3))
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens(new_sampler):
    assert new_sampler().sample(torch.empty(0, VOCAB), []) == []


def test_the_draw_depends_on_seed_position_and_sequence_index_alone(token):
    logits = torch.zeros(1, VOCAB)

    def run(**changes):
        """Twelve tokens in a row, each appended to its sequence."""
        made = sequence([1, 2, 3], temperature=1.0, **changes)
        for _ in range(12):
            made.token_ids.extend(token(logits, made))
        return made.token_ids[3:]

    first = run(seed=1)
    assert run(seed=1) == first
    assert run(seed=1, logit_bias={0: 0.0}) == first
    assert run(seed=1 + 2**64) == first
    assert run(seed=1 - 2**64) == first
    others = [run(seed=2), run(seed=-1), run(seed=1 + 2**32), run(seed=1, index=1), run(seed=1, index=2)]
    for other in others:
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    # The same place in the sequence draws alike, be its tokens prompt or generated.
    assert token(logits, sequence([1, 2, 3, 4], temperature=1.0)) == token(
        logits, sequence([5], [6, 7, 8], temperature=1.0)
    )


def test_ending_tokens_are_forbidden_until_min_new_tokens(token):
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9, 11]] = torch.tensor([5.0, 4.0, 3.0])
    fields = {"min_new_tokens": 2, "stop_token_ids": [9]}
    for temperature in (0.0, 1e-4):
        assert token(logits, sequence([1, EOS], temperature=temperature, **fields)) == [11]
        assert token(logits, sequence([1], [2], temperature=temperature, **fields)) == [11]
        assert token(logits, sequence([1], [2, 3], temperature=temperature, **fields)) == [EOS]
        assert token(logits, sequence([1], temperature=temperature, ignore_eos=True, **fields)) == [EOS]
    logits[0, EOS] = 0.0
    assert token(logits, sequence([1], ignore_eos=True, **fields)) == [11]


def test_an_end_of_text_id_beyond_the_head_is_never_sampled_anyway(new_sampler):
    found = new_sampler([EOS, VOCAB + 3]).sample(logits_of(0), [sequence([1], min_new_tokens=3)])
    assert found[0].error is None


def test_penalties_count_generated_tokens_and_repetition_the_prompt_too(token):
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 21, 22]] = torch.tensor([3.0, 2.9, 2.0])
    assert token(logits, sequence([20], presence_penalty=2.0, frequency_penalty=2.0)) == [20]
    assert token(logits, sequence([1], [20], presence_penalty=0.2)) == [21]
    assert token(logits, sequence([1], [20, 20, 21], frequency_penalty=0.08)) == [20]
    assert token(logits, sequence([1], [20, 20, 20, 21], frequency_penalty=0.08)) == [21]
    assert token(logits, sequence([20, 21], repetition_penalty=1.6)) == [22]
    assert token(logits, sequence([1], logit_bias={22: 1.5})) == [22]


@pytest.mark.parametrize(
    "extremes",
    [
        {"temperature": 1e300},
        {"temperature": 5e-324},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"top_p": 5e-324, "temperature": 1.0},
    ],
)
def test_the_most_extreme_parameters_are_served(token, extremes):
    token(logits_of(1), sequence([1], [2, 3, 4], **extremes))
    hollow = logits_of(2)
    hollow[0, ::2] = -torch.inf
    assert token(hollow, sequence([1, 2, 3, 4], **extremes))[0] % 2 == 1


@pytest.mark.parametrize("adjusting", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 1.0}}])
def test_a_row_that_cannot_be_sampled_gets_an_error_and_the_others_their_tokens(new_sampler, adjusting):
    logits = logits_of(4, 5)
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    sequences = [sequence([1, 5], [5], logprobs=2, **adjusting) for _ in range(5)]
    found = new_sampler().sample(logits, sequences)
    assert [item.error is None for item in found] == [True, False, False, False, True]
    assert "NaN" in found[1].error
    assert "inf" in found[2].error
    assert "no token can be chosen" in found[3].error
    assert [item.logprobs is None for item in found] == [False, True, True, True, False]
    assert found[0] == new_sampler().sample(logits[:1], sequences[:1])[0]


def test_min_new_tokens_may_leave_nothing_to_choose(token, new_sampler):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, EOS] = 1.0
    assert token(logits, sequence([1])) == [EOS]
    assert "min_new_tokens" in new_sampler().sample(logits, [sequence([1], min_new_tokens=1)])[0].error


def test_a_format_that_allows_nothing_fails_its_row_and_says_so(new_sampler):
    logits = logits_of(5, 3)
    nothing, one = allowing(sequence([1]), []), allowing(sequence([1], temperature=1.0), [41])
    found = new_sampler().sample(logits, [nothing, one, sequence([2])])
    assert "response_format allows none" in found[0].error
    assert found[1].token_id == 41
    assert found[2] == new_sampler().sample(logits[2:], [sequence([2])])[0]
    logits[0, 3] = torch.nan
    assert "NaN" in new_sampler().sample(logits, [nothing, one, one])[0].error
    nothing.matcher.error = "it is too large"
    logits[0, 3] = 0.0
    assert new_sampler().sample(logits[:1], [nothing])[0].error == "response_format cannot be followed: it is too large"


def test_logprobs_are_the_models_own_with_so_many_alternatives(new_sampler):
    logits = logits_of(6, 4)
    reference = logits.double().log_softmax(-1)
    bias = {3: 100.0}
    sequences = [
        sequence([1], logprobs=count, logit_bias=bias, temperature=temperature)
        for count, temperature in ((0, 0.0), (3, 0.0), (VOCAB, 1.0), (None, 1.0))
    ]
    found = new_sampler().sample(logits, sequences)
    assert [item.token_id for item in found] == [3] * 4
    assert [None if item.logprobs is None else len(item.logprobs) for item in found] == [1, 4, VOCAB, None]
    for row in range(3):
        for token_id, value in found[row].logprobs.items():
            assert value == pytest.approx(reference[row, token_id].item(), abs=1e-5)
    likeliest = [token_id for token_id in reference[1].argsort(descending=True).tolist() if token_id != 3]
    assert list(found[1].logprobs) == [3, *likeliest[:3]]


def test_the_likeliest_token_is_not_its_own_alternative(new_sampler):
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    found = new_sampler(vocab_size=4).sample(logits, [sequence([1], logprobs=2)])[0]
    assert list(found.logprobs) == [1, 2, 3]


def test_prompt_logprobs_are_those_of_the_given_tokens():
    logits = logits_of(8, 6)
    ids = [0, 5, 59, 5, 30, 1]
    reference = logits.double().log_softmax(-1)
    entries = launch_prompt_logprobs(logits, ids, 2)()
    for row, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
        alternatives = [other for other in reference[row].argsort(descending=True).tolist() if other != token_id][:2]
        assert list(entry) == [token_id, *alternatives]
        assert list(entry.values()) == pytest.approx(reference[row, [token_id, *alternatives]].tolist(), abs=1e-5)
    assert launch_prompt_logprobs(logits, ids, 0)() == [
        {token_id: entry[token_id]} for token_id, entry in zip(ids, entries, strict=True)
    ]
    assert launch_prompt_logprobs(torch.empty(0, VOCAB), [], 3)() == []
    logits[4, 2] = torch.nan
    with pytest.raises(GenerationError, match="NaN"):
        launch_prompt_logprobs(logits, ids, 2)()
    with pytest.raises(GenerationError, match="every logit is -inf"):
        launch_prompt_logprobs(torch.full((1, VOCAB), -torch.inf), [3], 0)()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_single(new_sampler, dtype):
    logits = logits_of(9, 8).to(dtype)
    draw = random.Random(9)
    sequences = [random_sequence(draw) for _ in range(8)]
    assert new_sampler().sample(logits, sequences) == new_sampler().sample(logits.float(), sequences)


def test_what_is_kept_between_steps_changes_nothing():
    """The kernel's tokens are torch's, step after step, whether a sequence was there before, paused, or is new."""
    draw = random.Random(10)
    vocab_size = 300
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    sequences = [
        sequence([draw.randrange(vocab_size) for _ in range(1 + 40 * index)], index=index, **fields)
        for index, fields in enumerate(
            [
                {"temperature": 0.8, "top_p": 0.9, **penalties},
                {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.5, "min_new_tokens": 9, "stop_token_ids": [3]},
                {"logit_bias": {5: 2.0, 3: 1.0}, "min_new_tokens": 30, "presence_penalty": 1.0},
                {},
            ]
        )
    ]
    kept = Sampler([EOS], cpp_kernel(vocab_size))
    for step in range(160):
        logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(step)) * 2
        there = [row for row in range(4) if draw.random() < 0.9] or [0]
        batch = [sequences[row] for row in there]
        found = kept.sample(logits[there], batch)
        assert found == Sampler([EOS]).sample(logits[there], batch)
        assert found == Sampler([EOS], cpp_kernel(vocab_size)).sample(logits[there], batch)
        for made, item in zip(batch, found, strict=True):
            made.token_ids.append(item.token_id)
    assert len(set(sequences[0].token_ids)) > 65


def test_tokens_that_the_head_does_not_reach_are_left_out(new_sampler):
    fields = {"repetition_penalty": 1.5, "logit_bias": {VOCAB: 3.0, VOCAB + 9: 3.0}, "min_new_tokens": 2}
    made = sequence([1, VOCAB + 1], [2, VOCAB + 2], **fields)
    found = new_sampler([VOCAB + 3]).sample(logits_of(11), [made])
    reachable = sequence([1], [2], **{**fields, "logit_bias": {}})
    assert found == Sampler([EOS]).sample(logits_of(11), [reachable])


def test_the_reference_has_no_kernel_that_samples():
    assert REFERENCE.row_sampling(VOCAB, max_rows=4) is None


def test_on_a_device_a_step_without_rows_is_waited_for_too(monkeypatch):
    """Or the host would write the inputs of a step that has not begun."""
    waited = []

    class Copies:
        def __init__(self, tensors):
            self.tensors = tensors

        def wait(self):
            waited.append(len(self.tensors))
            return self.tensors

    monkeypatch.setattr(sampler, "HostCopies", Copies)
    slots = SimpleNamespace(chosen=lambda sequences: torch.empty(0, dtype=torch.int32))
    tokens = Sampler(slots=slots).launch(torch.empty(0, VOCAB), [])
    assert not waited
    assert tokens() == []
    assert waited == [1]
