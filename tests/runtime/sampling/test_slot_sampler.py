"""Sampling by kernels on a device: each slot's tokens are those that torch chooses, whichever sequence held the slot
before, and whatever became of steps in between.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.backend import MAX_LOGPROBS
from fastgen.compile.backends.choose import backend_of
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.ops.sampling.triton import SamplingKernel
from fastgen.runtime.requests.request import Request, Sequence
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampler import Sampler
from fastgen.runtime.sampling.slot_sampler import SlotSampler, slot_sampler
from fastgen.runtime.step.input_batch import InputBatch
from tests.runtime.scripted_matcher import ScriptedMatcher

VOCAB, EOS, NUM_SLOTS = 60, 7, 4
CPU = torch.device("cpu")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
WAYS: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
    {"temperature": 1.0, "top_k": 9, "frequency_penalty": 0.5, "min_new_tokens": 4, "stop_token_ids": [3]},
    {"logit_bias": {5: 2.0, 3: 1.0}, "min_new_tokens": 6, "presence_penalty": 1.0},
    {"temperature": 1.4, "min_p": 0.05, "logprobs": 3},
    {"logprobs": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logprobs": MAX_LOGPROBS},
    {"logprobs": MAX_LOGPROBS + 9},
    {"temperature": 0.7, "min_new_tokens": 3},
    {"response_format": ResponseFormat("json_object")},
    {"response_format": ResponseFormat("json_object"), "temperature": 0.9, "top_k": 20, "logit_bias": {5: 2.0}},
]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    return KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path_factory.mktemp("kernels")))


class Bench:
    """A sampler of interpreted kernels, and the part of the model runner that serves it."""

    def __init__(self, loader: KernelLoader) -> None:
        sizes = dict.fromkeys(("token_budget", "max_num_seqs", "max_rows"), NUM_SLOTS)
        self.inputs = InputBatch(num_groups=1, max_blocks=1, block_size=4, device=CPU, **sizes)
        backend = backend_of(loader, max_rows=NUM_SLOTS, max_num_seqs=NUM_SLOTS)
        slots = slot_sampler(backend, VOCAB, self.inputs)
        assert slots is not None
        self.slots, self.sampler = slots, Sampler([EOS], slots=slots)
        backend.build()

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        self.launch(logits, sequences)
        return self.sampler.sample(logits, sequences)

    def launch(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Launches one more row than there are sequences."""
        self.sampler.prepare(sequences)
        self.sampler.constrain(sequences)
        slots, positions = self.inputs.sampled_rows(NUM_SLOTS)
        slots.fill_(-1)
        slots[: len(sequences)] = torch.tensor([each.slot for each in sequences])
        positions[: len(sequences)] = torch.tensor([each.num_tokens for each in sequences])
        padded = torch.full((NUM_SLOTS, VOCAB), torch.nan)
        padded[: len(logits)] = logits
        self.slots.launch(padded)


@pytest.fixture(scope="module")
def bench(loader: KernelLoader) -> Bench:
    return Bench(loader)


def sequence(slot: int, draw: random.Random, **fields: object) -> Sequence:
    sampling = SamplingParams(**{"seed": draw.getrandbits(64), **fields})  # type: ignore[arg-type]
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
    made = Request(0, prompt, sampling, arrival_s=0.0).sequences[0]
    made.slot = slot
    if sampling.response_format is not None:
        made.matcher = ScriptedMatcher(draw.sample(range(VOCAB), 25), VOCAB)  # type: ignore[assignment]
    return made


def logits_of(seed: int, num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_as_torch_samples_over_a_random_history(bench: Bench, seed: int) -> None:
    draw = random.Random(seed)
    running = [sequence(slot, draw) for slot in range(NUM_SLOTS)]
    num_lost = num_moved = 0
    for step in range(30):
        for slot in range(NUM_SLOTS):
            if draw.random() < 0.1:  # ends
                running[slot] = sequence(slot, draw, **draw.choice(WAYS))
            elif draw.random() < 0.05:  # is preempted, comes back elsewhere
                other = draw.randrange(NUM_SLOTS)
                running[slot], running[other] = running[other], running[slot]
                for moved in (slot, other):
                    running[moved].slot = moved
                    running[moved].num_preemptions += 1
                num_moved += 1
        batch = [each for each in running if draw.random() < 0.8]
        logits = logits_of(1000 * seed + step, len(batch))
        if step % 9 == 4:  # the step fails after its tokens were chosen, and is made again
            bench.launch(logits, batch)
            num_lost += 1
        found = bench.sample(logits, batch)
        expected = Sampler([EOS]).sample(logits, batch)
        assert [token._replace(logprobs=None) for token in found] == [
            token._replace(logprobs=None) for token in expected
        ]
        for ours, theirs in zip(found, expected, strict=True):
            assert list(ours.logprobs or ()) == list(theirs.logprobs or ())
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        for each, token in zip(batch, found, strict=True):
            each.token_ids.append(token.token_id)
            assert bench.inputs.sampled_ids[each.slot] == token.token_id
    assert num_moved
    assert num_lost


def test_rows_that_cannot_be_sampled_disturb_no_other(bench: Bench) -> None:
    draw = random.Random("errors")
    broken, forbidden, good = (
        sequence(slot, draw, **fields) for slot, fields in enumerate([{}, WAYS[1], {"temperature": 1.0}])
    )
    logits = logits_of(5, 3)
    logits[0, 9] = torch.nan
    logits[1] = -torch.inf
    found = bench.sample(logits, [broken, forbidden, good])
    assert "NaN" in str(found[0].error)
    assert "no token can be chosen" in str(found[1].error)
    assert found[2:] == Sampler().sample(logits[2:], [good])
    assert bench.inputs.sampled_ids[:2].tolist() == [0, 0]


def test_a_slot_is_written_once_for_its_sequence(loader: KernelLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(SamplingKernel, "write", lambda self, slot, sampling: written.append(slot))
    bench, draw = Bench(loader), random.Random(1)
    batch = [sequence(0, draw), sequence(1, draw, temperature=0.7), sequence(3, draw, **PENALTIES)]
    for step in range(3):
        for each in batch:
            bench.sampler.prepare([each])
            bench.slots.chosen([each])
            each.token_ids.append(step)
    assert written == [0, 1, 3]
    for index, slot in enumerate((0, 1, 3)):
        bench.sampler.prepare([sequence(slot, draw)])
        assert written[3:] == [1, 3][:index], "greedy after greedy writes nothing"


def test_sequences_may_draft_once_the_state_of_their_slot_no_longer_changes() -> None:
    draw = random.Random(2)
    # Formats are the drafter's to refuse.
    may_draft = [True, False, False, False, True, False, True, True, False, True, True]
    assert [SlotSampler.can_draft(sequence(0, draw, **way)) for way in WAYS] == may_draft
    late = sequence(0, draw, temperature=0.7, min_new_tokens=3)
    may = []
    for token_id in range(5):
        may.append(SlotSampler.can_draft(late))
        late.token_ids.append(token_id)
    assert may == [False, False, False, True, True]


def test_only_the_triton_target_samples_by_slots() -> None:
    ones = ("token_budget", "max_num_seqs", "max_rows", "num_groups", "max_blocks", "block_size")
    inputs = InputBatch(device=CPU, **dict.fromkeys(ones, 1))
    assert slot_sampler(REFERENCE, VOCAB, inputs) is None
