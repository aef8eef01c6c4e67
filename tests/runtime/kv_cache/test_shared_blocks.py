"""Memory and work of several completions and of beams: the prompt once, and blocks as far as the answers differ."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError
from fastgen.runtime.engine import Engine
from fastgen.runtime.kv_cache.block_tables import held_entries
from fastgen.runtime.kv_cache.capacity import Capacity
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.request import SequenceStatus
from fastgen.runtime.requests.sampling_params import SamplingParams
from tests.runtime.remembering_device import VOCAB_SIZE, Device, alone, build_engine

BLOCK_SIZE = 4
PROMPT = random.Random(1).choices(range(1, VOCAB_SIZE), k=402)


def engine(*, num_blocks: int = 1000, prefix_caching: bool = False, **sizes: int) -> Engine:
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
    return build_engine(kv, **{"token_budget": 64, "max_num_seqs": 8, **sizes})


def num_held(engine: Engine) -> int:
    return len({entry.block_id for seq in engine.scheduler.running for entry in held_entries(seq)})


def run(engine: Engine, prompt: list[int], **fields: Any) -> int:
    """The most blocks that were held after a step, the answers being right."""
    sampling = SamplingParams(**fields)
    generation = engine.submit(prompt, sampling)
    most = 0
    while not generation.finished:
        engine.step()
        engine.check_integrity()
        most = max(most, num_held(engine))
    given = [(each.token_ids, each.score) for each in generation.output().completions]
    assert given == alone(prompt, sampling)
    return most


def num_computed(engine: Engine) -> int:
    return cast(Device, engine.runner).num_computed


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("n", [2, 8])
def test_completions_share_the_prompt(n: int, prefix_caching: bool) -> None:
    one, many = (engine(prefix_caching=prefix_caching) for _ in range(2))
    fields = {"max_new_tokens": 7, "ignore_eos": True}
    assert run(one, PROMPT, **fields) == 102  # of 402 + 6 tokens
    # 100 full blocks of the prompt, and for each completion 2 of its own.
    assert run(many, PROMPT, n=n, **fields) <= 100 + 2 * n
    # Each but the first computes the prompt's last token again, for logits of its own.
    assert num_computed(one) == 402 + 6
    assert num_computed(many) == 402 + 6 + (n - 1) * 7


@pytest.mark.parametrize("slots", [1, 3])
def test_with_fewer_slots_than_completions_they_take_turns(slots: int) -> None:
    """A sequence that gets a slot finds the prompt's blocks with another one, or in the prefix cache if none is
    left."""
    few = engine(max_num_seqs=slots, prefix_caching=True)
    assert run(few, PROMPT, n=9, max_new_tokens=7, ignore_eos=True) <= 101 + 2 * slots
    assert num_computed(few) <= 402 + 6 + 8 * (BLOCK_SIZE + 6)


def test_the_prompt_is_not_computed_again_where_only_prompt_log_probabilities_need_it() -> None:
    bench = engine(prefix_caching=True)
    run(bench, PROMPT, n=4, max_new_tokens=3, ignore_eos=True)
    before = num_computed(bench)
    generation = bench.submit(PROMPT, SamplingParams(n=4, max_new_tokens=3, ignore_eos=True, prompt_logprobs=0))
    while not generation.finished:
        bench.step()
        bench.check_integrity()
    assert num_computed(bench) - before == 402 + 2 + 3 * 3


def test_one_of_several_completions_ends_and_the_others_keep_the_prompt() -> None:
    bench = engine()
    generation = bench.submit(PROMPT[:21], SamplingParams(n=4, max_new_tokens=9, ignore_eos=True))
    while generation.request.sequences[3].status is not SequenceStatus.RUNNING:
        bench.step()
    bench.answers._finish(generation.completions[0], "cancelled")
    bench.check_integrity()
    while not generation.finished:
        bench.step()
        bench.check_integrity()
    expected = [answer for answer, _ in alone(PROMPT[:21], generation.request.sampling)]
    assert [each.token_ids for each in generation.completions][1:] == expected[1:]


@pytest.mark.parametrize("num_prompt", [1, 4, 402])
def test_beams_hold_one_block_for_each_different_content(num_prompt: int) -> None:
    """After every step, exactly: two beams share a block if, and only if, what they computed is the same up to it."""
    bench = engine()
    prompt = PROMPT[:num_prompt]
    sampling = SamplingParams(beam_width=6, max_new_tokens=30, stop_token_ids=(), ignore_eos=True)
    generation = bench.submit(prompt, sampling)
    most, copies = 0, 0
    while not generation.finished:
        bench.step()
        bench.check_integrity()
        contents = {
            (start, tuple(seq.token_ids[: min(start + BLOCK_SIZE, seq.num_computed_tokens)]))
            for seq in bench.scheduler.running
            for start in range(0, seq.num_computed_tokens, BLOCK_SIZE)
        }
        assert num_held(bench) == len(contents)
        most = max(most, len(contents))
        copies += len(bench.scheduler.running) > 1
    assert copies > 20
    unshared = 6 * -(-(num_prompt + 29) // BLOCK_SIZE)
    assert most < unshared - 5 * (num_prompt // BLOCK_SIZE)
    assert num_computed(bench) == num_prompt + 29 * 6


# What cannot be served


def test_more_beams_than_slots_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="beam_width=9 beams run at once, but at most max_num_seqs=8"):
        engine().check([1], SamplingParams(beam_width=9))


def test_more_beams_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="of 12 in the vocabulary 1 end a beam"):
        engine(max_num_seqs=20).check([1], SamplingParams(beam_width=12))
    engine(max_num_seqs=20).check([1], SamplingParams(beam_width=11))


def test_beams_that_never_fit_are_refused_with_the_arithmetic() -> None:
    """A prompt of 10 tokens fills 2 blocks of 4; with 9 of 10 new tokens 5 are needed, so 3 of each beam's own."""
    message = (
        r"need 2 blocks that they share \+ 4 \* \(3 of each alone \+ 1 for copies\) = 18 blocks, the KV cache has 17"
    )
    sampling = SamplingParams(beam_width=4, max_new_tokens=10)
    with pytest.raises(RequestTooLargeError, match=message) as caught:
        engine(num_blocks=18).check(PROMPT[:10], sampling)
    assert caught.value.room == 7  # 16 tokens in 4 blocks
    run(engine(num_blocks=19), PROMPT[:10], beam_width=4, max_new_tokens=10)


def test_the_room_for_beams_of_a_long_answer_is_found_in_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must not keep the engine from its steps, as a look at each length of a million tokens would."""
    looks: list[int] = []
    needed = Capacity.blocks_needed
    monkeypatch.setattr(Capacity, "blocks_needed", lambda self, num: looks.append(num) or needed(self, num))
    forks = engine(num_blocks=1000).scheduler.forks
    with pytest.raises(RequestTooLargeError, match="beam_width=4 beams") as caught:
        forks.check_fits(10, 900_000, 4)
    assert len(looks) < 50
    assert caught.value.room == 1000 - 9  # 2 blocks that they share, and of each beam 248 of its own and one for copies
