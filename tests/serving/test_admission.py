"""Admission: which requests are admitted, and what refused ones are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.metrics import Histogram, Metrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.admission.admission import Admission
from fastgen.serving.admission.request_limits import MAX_MORE_ANSWERS, MAX_N, MAX_OPEN_LOGPROBS, max_logprob_bytes
from fastgen.serving.options import Limits
from fastgen.serving.refusals import OverloadedError, TooLargeError, UnavailableError
from tests.serving import fake_engine

ANSWER = SamplingParams(max_new_tokens=10)


def engine(step_s: dict[int, float], *, looked_up: int = 0, hits: int = 0) -> Metrics:
    """Returns the metrics of an engine that has run a hundred steps of each size. Its prefix cache held ``hits`` of the
    tokens that were ``looked_up``.
    """
    steps = {size: Histogram(bounds=(1.0,), counts=(100, 0), sum=100 * each_s) for size, each_s in step_s.items()}
    none = Histogram(bounds=(1.0,), counts=(0, 0), sum=0.0)
    totals = ("requests", "prompt_tokens", "generation_tokens", "computed_tokens", "padding_tokens", "preemptions")
    totals += ("itl_target_missed",)
    gauges = ("requests_running", "requests_waiting", "sequences_running", "sequences_waiting")
    fields: dict[str, Any] = {f"{name}_total": 0 for name in totals}
    caches = {"lookup_tokens": looked_up, "hit_tokens": hits, "evictions": 0}
    fields |= {f"prefix_cache_{name}_total": value for name, value in caches.items()} | dict.fromkeys(gauges, 0)
    fields |= dict.fromkeys(("kv_blocks", "kv_blocks_held", "kv_blocks_cached"), 0)
    plans = {f"rank_plan{name}_total": 0 for name in ("s", "_bytes", "_seconds")}
    fields |= {"ranks": 1} | plans
    fields |= dict.fromkeys(("queue_seconds", "ttft_seconds", "gap_seconds", "request_seconds"), none)
    return Metrics(**fields, sequences_finished_total={}, step_seconds=steps)


FACTS = msgspec.structs.replace(fake_engine.FACTS, vocab_size=100, max_model_len=8192, num_blocks=10_000)


class Door:
    """An admission with its own clock and a list of refusal reasons."""

    def __init__(self, *, memory_bytes: int = 1 << 40, **limits: Any):
        self.now_s = 0.0
        self.reasons: list[str] = []
        self.admission = Admission(
            Limits(**limits),
            self.reasons.append,
            max_logprob_bytes=max_logprob_bytes(memory_bytes),
            clock=lambda: self.now_s,
        )
        self.admission.begin(FACTS)

    def refusal(self, num_prompt_tokens: int, sampling: SamplingParams = ANSWER) -> OverloadedError:
        with pytest.raises(OverloadedError) as raised:
            self.admission.admit(num_prompt_tokens, sampling)
        return raised.value


def test_so_many_requests_may_wait_for_their_first_token() -> None:
    door = Door(max_queued_requests=2)
    first, second = door.admission.admit(10, ANSWER), door.admission.admit(10, ANSWER)
    refusal = door.refusal(10)
    assert "at most 2" in str(refusal)
    assert (refusal.retry_after_s, refusal.predicted_ttft_s) == (1.0, None), "nothing was measured yet"
    first.started()
    first.started()
    third = door.admission.admit(10, ANSWER)
    door.refusal(10)
    second.ended()
    second.ended()
    third.ended()
    third.started()
    for _ in range(2):
        door.admission.admit(10, ANSWER)
    door.refusal(10)
    assert door.reasons == ["queued_requests"] * 3


def test_so_many_prompt_tokens_may_wait_but_one_prompt_is_always_let_in() -> None:
    door = Door(max_queued_tokens=100)
    long = door.admission.admit(500, ANSWER)
    assert "500 prompt tokens" in str(door.refusal(1))
    long.started()
    door.admission.admit(60, ANSWER)
    door.admission.admit(40, ANSWER)
    door.refusal(1)
    assert door.reasons == ["queued_tokens"] * 2


def test_a_prompt_may_have_so_many_tokens() -> None:
    door = Door(max_prompt_tokens=100)
    door.admission.admit(100, ANSWER)
    with pytest.raises(TooLargeError, match="101 tokens"):
        door.admission.admit(101, ANSWER)
    assert door.reasons == ["prompt_tokens"]


def test_so_many_log_probabilities_may_be_held_at_once() -> None:
    door = Door()
    large = SamplingParams(n=4, max_new_tokens=MAX_OPEN_LOGPROBS // 16, logprobs=3)
    held = door.admission.admit(1, large)
    held.started()
    door.admission.admit(1, ANSWER)
    refusal = door.refusal(1, replace(ANSWER, logprobs=0))
    assert f"may hold {MAX_OPEN_LOGPROBS} log-probabilities in " in str(refusal)
    assert f" and this one 10 in 12800; this server takes at most {MAX_OPEN_LOGPROBS} in " in str(refusal)
    held.ended()
    door.refusal(1, replace(ANSWER, logprobs=0))  # its client has not taken them yet
    door.admission.begin(FACTS)
    door.refusal(1, replace(ANSWER, logprobs=0))
    held.let_go()
    held.let_go()
    few = door.admission.admit(1, replace(ANSWER, logprobs=0))
    door.refusal(1, large)
    few.let_go()
    door.admission.admit(1, large)
    assert door.reasons == ["logprobs"] * 4


def test_log_probabilities_take_a_16th_part_of_the_memory_at_most() -> None:
    """Each takes 280 bytes, and each token that has any 1000 more."""
    door = Door(memory_bytes=16 * 1_000_000)
    many, few = SamplingParams(max_new_tokens=20, logprobs=99), SamplingParams(max_new_tokens=312, logprobs=0)
    first = door.admission.admit(1, many)  # 580,000 bytes
    refusal = door.refusal(1, many)
    assert "may hold 2000 log-probabilities in 580000 bytes and this one 2000 in 580000; " in str(refusal)
    assert "this server takes at most 8388608 in 1000000 bytes at once" in str(refusal)
    door.admission.admit(1, few)  # 399,360 bytes
    door.refusal(1, replace(ANSWER, max_new_tokens=17, logprobs=0))
    door.admission.admit(1, ANSWER)
    first.let_go()
    door.admission.admit(1, many)
    assert door.reasons == ["logprobs"] * 2


def test_so_many_answers_may_be_open_beyond_the_first_of_each_request() -> None:
    door = Door()
    many = replace(ANSWER, n=MAX_N)
    held = [door.admission.admit(1, many) for _ in range(MAX_MORE_ANSWERS // (MAX_N - 1))]
    for one in held:
        one.started()
    refusal = door.refusal(1, many)
    assert f"{len(held) * (MAX_N - 1)} answers beyond their first and this one {MAX_N - 1};" in str(refusal)
    door.admission.admit(1, ANSWER)
    held[0].ended()
    held[0].ended()
    door.admission.admit(1, replace(ANSWER, beam_width=MAX_N))
    door.refusal(1, many)
    door.admission.begin(FACTS)
    for _ in held:
        door.admission.admit(1, many)
    assert door.reasons == ["answers"] * 2


def test_what_would_come_too_late_is_refused_and_told_when_it_would_have_come() -> None:
    door = Door(ttft_slo_s=1.0)
    door.admission.observe(engine({1: 0.01, 512: 0.1}))
    door.admission.admit(4096, ANSWER)  # eight steps of 0.1 s
    refusal = door.refusal(2048)  # four more
    assert refusal.predicted_ttft_s == pytest.approx(1.2, rel=0.03)
    assert refusal.retry_after_s == 1.0
    door.admission.admit(512, ANSWER)
    door.now_s += 0.4
    later = door.admission.predict(2048)
    assert later is not None
    assert later.ttft_s == pytest.approx(0.9, abs=0.03), "half of the first prompt is computed by now"
    assert door.reasons == ["ttft_slo"]


def test_a_client_is_told_to_wait_until_its_request_could_be_admitted() -> None:
    door = Door(ttft_slo_s=1.0)
    door.admission.observe(engine({1: 0.01, 512: 0.5}))
    refusal = door.refusal(10 * 512)
    assert refusal.predicted_ttft_s == pytest.approx(5.0, rel=0.03)
    assert refusal.retry_after_s == pytest.approx(4.0, rel=0.04)


def test_the_more_urgent_is_not_refused_for_what_stands_behind_it() -> None:
    door = Door(ttft_slo_s=1.0)
    door.admission.observe(engine({1: 0.01, 512: 0.1}))
    door.admission.admit(4608, ANSWER)
    door.refusal(1024)
    door.admission.admit(1024, SamplingParams(max_new_tokens=10, priority=-1))


def test_prompts_are_expected_in_the_prefix_cache_as_much_as_those_of_late() -> None:
    door = Door()
    steps = {1: 0.01, 512: 0.1}

    def predicted_s() -> float:
        found = door.admission.predict(10 * 512)
        assert found is not None
        return found.ttft_s

    door.admission.observe(engine(steps))
    assert predicted_s() == pytest.approx(1.0, rel=0.03)
    door.admission.observe(engine(steps, looked_up=10_000, hits=8_000))
    assert predicted_s() == pytest.approx(0.2, rel=0.03), "a fifth is computed"
    door.admission.observe(engine(steps, looked_up=20_000, hits=8_000))
    assert predicted_s() == pytest.approx(1.0, rel=0.03), "none of the next 10,000 tokens was found"


def test_nobody_is_refused_for_times_that_are_not_known_or_known_no_more() -> None:
    door = Door(ttft_slo_s=0.001)
    door.admission.admit(4096, ANSWER).ended()
    metrics = engine({1: 0.01, 512: 0.1})
    door.admission.observe(metrics)
    door.refusal(4096)
    door.now_s += 100.0
    door.admission.observe(metrics)  # no steps since
    door.admission.admit(4096, ANSWER)


def test_what_makes_gaps_too_long_is_refused_unless_nobody_has_any() -> None:
    door = Door(itl_target_ms=25)
    door.admission.observe(engine({1: 0.010, 2: 0.020, 4: 0.030}))
    admitted = [door.admission.admit(1, ANSWER), door.admission.admit(1, ANSWER)]
    assert "30.0 ms" in str(refusal := door.refusal(1))
    assert refusal.retry_after_s == 1.0
    for each in admitted:
        each.ended()
    door.admission.admit(1, SamplingParams(max_new_tokens=10, n=4))
    assert door.reasons == ["itl_target"]


def test_a_client_whose_request_makes_gaps_too_long_waits_for_the_prompts_before_it() -> None:
    door = Door(itl_target_ms=25)
    door.admission.observe(engine({1: 0.010, 2: 0.020, 4: 0.030, 512: 0.5}))
    for _ in range(2):
        door.admission.admit(6 * 512, ANSWER)
    refusal = door.refusal(1)
    assert refusal.retry_after_s == refusal.predicted_ttft_s
    assert refusal.retry_after_s == pytest.approx(6.0, rel=0.1)


def test_a_new_engine_has_nothing_in_it() -> None:
    door = Door(max_queued_requests=1)
    old = door.admission.admit(10, ANSWER)
    door.admission.begin(FACTS)
    door.admission.admit(10, ANSWER)
    old.ended()
    door.refusal(10)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_queued_requests": 0}, "max_queued_requests=0: expected an integer of at least 1"),
        ({"ttft_slo_s": -1.0}, "ttft_slo_s=-1.0: expected a number above 0"),
        ({"itl_target_ms": float("nan")}, "itl_target=nan: expected a number above 0"),
    ],
)
def test_limits_that_admit_no_request_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Limits(**limits)


def test_the_limits_count_the_requests_in_all_replicas() -> None:
    door = Door(max_queued_requests=3)
    door.admission.end()
    for replica in ("a", "b"):
        door.admission.begin(FACTS, replica)
    admitted = [door.admission.admit(10, ANSWER) for _ in range(3)]
    assert "3 requests wait" in str(door.refusal(10))
    admitted[0].routed("b")
    admitted[0].routed("a")
    admitted[0].started()
    admitted[1].ended()
    for _ in range(2):
        door.admission.admit(10, ANSWER)
    door.refusal(10)
    for replica in ("a", "b"):
        door.admission.end(replica)
    with pytest.raises(UnavailableError, match="no engine is ready"):
        door.admission.admit(10, ANSWER)


def test_a_request_waits_as_long_as_at_the_replica_that_it_goes_to() -> None:
    door = Door(ttft_slo_s=1.0)
    door.admission.end()
    for replica in ("a", "b"):
        door.admission.begin(FACTS, replica)
        door.admission.observe(engine({1: 0.01, 512: 0.1}), replica)
    first = door.admission.admit(4096, ANSWER)  # eight steps of 0.1 s, at one of the two
    second = door.admission.admit(4096, ANSWER)  # at the other
    first.routed("a")
    second.routed("a")
    prediction = door.admission.predict(512)
    assert prediction is not None
    assert prediction.ttft_s == pytest.approx(0.1), "b has nothing to do"
    second.routed("b")
    refusal = door.refusal(2048)
    assert refusal.predicted_ttft_s is not None
    assert 1.2 <= refusal.predicted_ttft_s < 1.25  # twelve steps, of which four have a decode more
    first.ended()
    door.admission.admit(2048, ANSWER)


def test_all_open_requests_may_hold_as_much_together_as_the_page_says() -> None:
    """16,384 answers beyond the first of each, and 8,388,608 log-probabilities."""
    door = Door()
    for _ in range(64):
        door.admission.admit(1, replace(ANSWER, n=257)).started()
    assert door.refusal(1, replace(ANSWER, n=2)).retry_after_s == 1.0
    large = SamplingParams(max_new_tokens=1 << 20, logprobs=3)
    for _ in range(2):
        door.admission.admit(1, large).started()
    assert door.refusal(1, replace(ANSWER, logprobs=0)).retry_after_s == 1.0
    door.admission.admit(1, ANSWER)
    assert door.reasons == ["answers", "logprobs"]


def test_a_client_of_a_full_queue_is_told_when_the_next_place_becomes_free() -> None:
    door = Door(max_queued_requests=2)
    door.admission.observe(engine({1: 0.01, 512: 1.0}))
    first = door.admission.admit(4 * 512, ANSWER)
    door.admission.admit(4 * 512, ANSWER)
    told = door.refusal(10)
    assert told.predicted_ttft_s == pytest.approx(8.0, abs=1.0)
    assert 2 * told.retry_after_s == told.predicted_ttft_s
    first.ended()
    door.admission.admit(10, ANSWER)
    door.now_s = 0.05
    assert door.refusal(10).predicted_ttft_s == told.predicted_ttft_s, "one prediction serves many refusals"
    door.now_s = 0.15
    assert door.refusal(10).predicted_ttft_s == pytest.approx(4.0, abs=1.0)


def test_a_client_of_a_full_queue_waits_a_second_at_least() -> None:
    door = Door(max_queued_requests=1)
    door.admission.observe(engine({1: 0.001, 512: 0.01}))
    door.admission.admit(10, ANSWER)
    told = door.refusal(10)
    assert told.predicted_ttft_s is not None
    assert told.predicted_ttft_s < 0.1
    assert told.retry_after_s == 1.0


def test_a_prompt_waits_until_the_cache_has_room_for_it() -> None:
    door = Door()
    door.admission.begin(msgspec.structs.replace(FACTS, num_blocks=64))
    door.admission.observe(engine({1: 0.01, 512: 0.1}))
    door.admission.admit(512, SamplingParams(max_new_tokens=100))
    fits, waits = (door.admission.predict(num_tokens) for num_tokens in (512, 513))
    assert fits is not None
    assert fits.ttft_s < 0.3, "64 blocks of 16 tokens hold both prompts"
    assert waits is not None
    assert waits.ttft_s > 1.0, "the 100 tokens of the other answer come first"


def test_a_few_lookups_say_less_of_the_prefix_cache_than_many() -> None:
    door = Door()
    door.admission.observe(engine({1: 0.01, 512: 0.1}, looked_up=5_000, hits=5_000))
    found = door.admission.predict(10 * 512)
    assert found is not None
    assert found.ttft_s == pytest.approx(0.5, rel=0.03)


def test_nothing_is_predicted_after_a_minute_without_a_step() -> None:
    door = Door()
    metrics = engine({1: 0.01, 512: 0.1})
    door.admission.observe(metrics)
    for now_s, is_known in ((60.0, True), (60.5, False)):
        door.now_s = now_s
        door.admission.observe(metrics)
        assert (door.admission.predict(512) is not None) == is_known


def test_what_is_no_more_than_a_limit_of_time_is_admitted() -> None:
    door = Door(ttft_slo_s=1.0)
    door.admission.observe(engine({1: 0.01, 512: 0.5}))
    door.admission.admit(1024, ANSWER)  # two steps of 0.5 s
    door = Door(itl_target_ms=31.25)
    door.admission.observe(engine({1: 0.015625, 2: 0.03125}))
    for _ in range(2):  # steps of two take 31.25 ms
        door.admission.admit(1, ANSWER)


def test_one_prediction_serves_the_refusals_of_a_tenth_of_a_second() -> None:
    door = Door(max_queued_requests=1)
    door.admission.observe(engine({1: 0.01, 512: 1.0}))
    door.admission.admit(4 * 512, ANSWER)
    told_s = door.refusal(10).predicted_ttft_s
    door.now_s = 0.1
    assert door.refusal(10).predicted_ttft_s == told_s
    door.now_s = 0.11
    assert door.refusal(10).predicted_ttft_s != told_s


def test_a_few_lookups_move_what_is_expected_of_the_prefix_cache_by_their_share_of_ten_thousand() -> None:
    door = Door()
    # First half of the tokens are found, then none of 1000, then half of 1000.
    for looked_up, hits, expected_share in ((10_000, 5_000, 0.5), (11_000, 5_000, 0.55), (12_000, 5_500, 0.545)):
        door.admission.observe(engine({1: 0.01, 512: 0.1}, looked_up=looked_up, hits=hits))
        found = door.admission.predict(1000 * 512)
        assert found is not None
        assert found.ttft_s == pytest.approx(100 * expected_share)


def test_a_request_goes_to_the_engine_with_fewer_open_requests_where_no_prompts_wait() -> None:
    door = Door()
    door.admission.end()
    for replica, step_s in (("a", 0.1), ("b", 0.2)):
        door.admission.begin(FACTS, replica)
        door.admission.observe(engine({1: step_s, 512: step_s}), replica)
    admitted = [door.admission.admit(1, ANSWER)]
    admitted[0].routed("a")
    admitted[0].started()

    def expected_s() -> float:
        found = door.admission.predict(1)
        assert found is not None
        return found.ttft_s

    assert expected_s() == pytest.approx(0.2), "at b"
    for _ in range(2):
        admitted.append(door.admission.admit(1, ANSWER))
        admitted[-1].routed("b")
        admitted[-1].started()
    assert expected_s() == pytest.approx(0.1), "at a"


def test_a_request_that_has_ended_or_goes_to_an_unknown_engine_stays_where_it_was() -> None:
    door = Door(max_queued_requests=2)
    door.admission.begin(FACTS, "b")
    ended, waiting = door.admission.admit(10, ANSWER), door.admission.admit(10, ANSWER)
    ended.ended()
    for replica in ("b", ""):
        ended.routed(replica)
    waiting.routed("never heard of")
    door.admission.admit(10, ANSWER)
    assert "2 requests wait" in str(door.refusal(10))
    waiting.ended()
    door.admission.admit(10, ANSWER)
    door.refusal(10)
