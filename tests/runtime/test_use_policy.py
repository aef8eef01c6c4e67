"""A policy that is replaced between requests: decisions and recordings are those of the new one."""

from __future__ import annotations

import random

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.replay import first_difference, num_replayed
from fastgen.runtime.kv_cache.kv_cache_manager import KVCacheManager
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies import POLICIES, DynamicBatching, choose_policy, policy_name
from fastgen.runtime.scheduling.policies.orca import Orca
from tests.runtime.histories import History
from tests.runtime.remembering_device import alone, build_engine


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_each_recording_replays_under_its_policy(prefix_caching: bool) -> None:
    history = History(random.Random(1), 61, 16, 4, prefix_caching=prefix_caching)
    numbers = []
    for name in [*POLICIES, *POLICIES]:
        history.engine.use_policy(choose_policy(name))
        for _ in range(12):
            prompt = [7, 8, 9, 10] * history.rng.randint(1, 8)
            history.engine.submit(prompt, history.sampling(max_new_tokens=9, ignore_eos=True))
        history.finish()
        recording = history.engine.recorder.recording("m")
        assert recording.header.engine.policy == name
        assert policy_name(history.engine.scheduler.policy) == name
        assert len(recording.arrivals) == 12, "the recording began with the policy"
        assert num_replayed(recording) == len(recording.steps) > 0
        assert first_difference(recording) is None
        numbers += [step.step for step in recording.steps]
    assert numbers == sorted(numbers), "steps are numbered on"


def test_a_policy_that_cannot_work_is_refused_and_changes_nothing() -> None:
    history = History(random.Random(1), 61, 16, 4)
    before = history.engine.recorder
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        history.engine.use_policy(DynamicBatching(batch_size=5, max_delay_s=0.1))
    assert history.engine.recorder is before
    assert policy_name(history.engine.scheduler.policy) == "splitfuse"


def test_a_policy_is_not_replaced_while_a_request_is_open() -> None:
    history = History(random.Random(1), 61, 16, 4)
    history.engine.submit([1, 2], history.sampling(max_new_tokens=3))
    with pytest.raises(AssertionError, match="between requests"):
        history.engine.use_policy(Orca())
    history.finish()


def test_a_policy_is_replaced_where_a_cancelled_step_is_still_in_flight() -> None:
    kv = KVCacheManager(40, 4, (None,), max_chunk=16)
    engine = build_engine(kv, token_budget=16, max_num_seqs=4, runs_ahead=True)
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    cancelled = engine.submit([3, 4, 5], sampling)
    engine.step()
    engine.cancel(cancelled)
    engine.use_policy(Orca())
    generation = engine.submit([3, 4, 5], sampling)
    while engine.has_work:
        engine.step()
    assert [(generation.output().token_ids, generation.output().score)] == alone([3, 4, 5], sampling)
    recording = engine.recorder.recording("m")
    assert list(recording.arrivals) == [generation.request.request_id]
    assert first_difference(recording) is None
