"""The account of a request's time, for hand-made recordings with known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.flight.recording import (
    Admission,
    Arrival,
    EngineFacts,
    Entry,
    Event,
    Finish,
    Header,
    Recording,
    Step,
)
from fastgen.runtime.flight.step_times import measured_steps
from fastgen.runtime.flight.time_account import OtherPrompts, Share, Span
from fastgen.runtime.flight.why import Preemption, Why, why
from fastgen.runtime.flight.why_text import as_text, seconds
from fastgen.runtime.step_cost.cost import StepCost

ENGINE = EngineFacts(
    token_budget=100,
    max_num_seqs=2,
    block_size=16,
    num_blocks=65,
    windows=(None,),
    max_chunk=100,
    policy="splitfuse",
    policy_parameters={},
    aging_s=30.0,
    prefix_caching=False,
)


def recording(*events: Event, first_step: int = 0) -> Recording:
    header = Header(
        fastgen="0", model="m", started="2026-01-01T00:00:00", clock_s=0.0, first_step=first_step, engine=ENGINE
    )
    return Recording(header, events)


def arrival(clock_s: float, request: int, prompt_tokens: int, **fields: Any) -> Arrival:
    return Arrival(clock_s=clock_s, request=request, prompt_tokens=prompt_tokens, max_new_tokens=9, **fields)


def step(number: int, began_s: float, ended_s: float, *entries: tuple[Any, ...], **fields: Any) -> Step:
    """Returns a step without scheduling, building and updating. An entry is ``(sequence, start, num_tokens,
    num_sampled)``.
    """
    given: dict[str, Any] = {
        "scheduled_s": began_s,
        "build_s": 0.0,
        "ran_s": ended_s,
        "size": 128,
        "num_padding": 0,
        "num_decodes": 0,
        "running": len(entries),
        "waiting": 0,
        "blocks_free": 10,
    }
    made = tuple(Entry(name, start, count, 0, sampled) for name, start, count, sampled in entries)
    return Step(step=number, began_s=began_s, ended_s=ended_s, entries=made, **{**given, **fields})


def finish(clock_s: float, sequence: str, num_tokens: int, reason: Any = "length") -> Finish:
    return Finish(clock_s=clock_s, sequence=sequence, reason=reason, num_tokens=num_tokens, step=None)


def slot(sequence: str, number: int, start: int = 0, cached_tokens: int = 0) -> Admission:
    return Admission(sequence, number, start, cached_tokens)


def shares(span: Span | None) -> dict[str, float]:
    assert span is not None
    return {share.cause: pytest.approx(share.seconds) for share in span.shares}


def test_a_lone_request_has_all_time_but_that_between_steps() -> None:
    facts = why(
        recording(
            arrival(10.0, 0, 50),
            step(0, 11.0, 13.0, ("0.0", 0, 50, 1), admitted=(slot("0.0", 0),)),
            step(1, 14.0, 15.0, ("0.0", 50, 1, 1), num_decodes=1),
            step(2, 15.0, 18.0, ("0.0", 51, 1, 1), num_decodes=1),
            finish(18.0, "0.0", 3),
        ),
        "0",
    )
    assert (facts.sequence, facts.completions, facts.prompt_tokens, facts.new_tokens, facts.steps) == (
        "0.0",
        1,
        50,
        3,
        3,
    )
    assert (facts.queue_s, facts.ttft_s, facts.total_s, facts.ahead) == (1.0, 3.0, 8.0, 0)
    assert shares(facts.first_token) == {"queued_step": 1.0, "own": 2.0}
    assert shares(facts.other_tokens) == {"own": 4.0, "between_steps": 1.0}
    assert facts.tokens_per_s == pytest.approx(2 / 5)
    assert facts.median_gap_s == 2.5
    assert facts.worst_gap is not None
    assert (facts.worst_gap.after, facts.worst_gap.span.seconds, facts.worst_gap.step.step) == (2, 3.0, 2)
    assert as_text(facts).splitlines() == [
        "Request 0: a prompt of 50 tokens, 3 new tokens in 3 steps and 8.00 s; it reached its length.",
        "First token after 3.00 s: 67 % computing its own tokens, 33 % queued until a step was scheduled.",
        "Then 2 tokens, 0.4 a second: 80 % computing its own tokens, 20 % with no step running.",
        "Gaps between tokens: median 2.50 s, worst 3.00 s after token 2: 100 % computing its own tokens.",
        "The longest step of that gap was step 2, 3.00 s for 1 decode "
        "(schedule 0 µs, build 0 µs, forward and sample 3.00 s, update 0 µs).",
    ]


def test_steps_are_shared_by_tokens_with_prompts_and_decodes() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            arrival(0.0, 1, 600),
            arrival(0.0, 2, 40),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            step(
                1,
                1.0,
                11.0,
                *(("0.0", 10, 1, 1), ("1.0", 0, 79, 0), ("2.0", 0, 20, 0)),
                num_decodes=1,
                admitted=(slot("1.0", 1), slot("2.0", 2, cached_tokens=0)),
            ),
            step(2, 11.0, 21.0, ("1.0", 79, 80, 0)),
            step(3, 21.0, 31.0, ("2.0", 20, 20, 1), ("1.0", 159, 80, 0)),
        ),
        "2",
    )
    assert facts.ttft_s == 31.0
    # a second in the queue; of the next step 20, 79 and 1 hundredths; passed over; then 20 and 80 hundredths
    assert shares(facts.first_token) == {
        "queued_policy": 1.0,
        "own": 2.0 + 2.0,
        "other_prompts": 7.9 + 8.0,
        "other_decodes": 0.1,
        "passed_over": 10.0,
    }
    assert facts.first_token.others == OtherPrompts(num_requests=1, longest_request=1, longest_tokens=600)
    assert (facts.finish_reason, facts.total_s) == (None, 31.0)
    assert "still going on where the recording ends" in as_text(facts)
    assert "51 % sharing steps with the 600-token prompt of request 1" in as_text(facts)
    assert as_text(facts).splitlines()[1] == (
        "First token after 31.00 s: 51 % sharing steps with the 600-token prompt of request 1, "
        "32 % running while others had all the step's tokens, 13 % computing its own tokens, "
        "3 % held back by the scheduling policy, 1 % sharing steps with decodes of others. "
        "2 sequences waited when it came."
    )


def test_a_request_that_comes_during_a_step_waits_for_the_next_one() -> None:
    """The step that runs had been scheduled before it came, so it could not admit the request."""
    facts = why(
        recording(
            arrival(0.0, 0, 50),
            step(0, 0.0, 2.0, ("0.0", 0, 50, 1), admitted=(slot("0.0", 0),)),
            arrival(1.0, 1, 50),
            step(1, 2.0, 3.0, ("1.0", 0, 50, 1), admitted=(slot("1.0", 1),)),
        ),
        "1",
    )
    assert shares(facts.first_token) == {"queued_step": 1.0, "own": 1.0}


WAITS: dict[str, tuple[dict[str, Any], str]] = {
    "queued_slots": ({"running": 2}, "queued for a slot"),
    "queued_blocks": ({"running": 1, "blocks_free": 0}, "queued for KV cache blocks"),
    "queued_tokens": ({"running": 1, "size": 100}, "queued behind prompts before it"),
    "queued_policy": ({"running": 1, "size": 128}, "held back by the scheduling policy"),
}


@pytest.mark.parametrize("cause", WAITS)
def test_causes_of_waiting_in_the_queue(cause: str) -> None:
    fields, words = WAITS[cause]
    facts = why(
        recording(
            arrival(0.0, 0, 100),
            arrival(1.0, 1, 10, n=2),
            arrival(2.0, 2, 10),
            step(0, 2.0, 6.0, ("0.0", 0, 100, 1), admitted=(slot("0.0", 0),), **fields),
            step(1, 6.0, 7.0, ("2.0", 0, 10, 1), admitted=(slot("2.0", 1),)),
        ),
        "2.0",
    )
    assert shares(facts.first_token) == {cause: 4.0, "own": 1.0}
    assert facts.ahead == 4 - 1, "request 0 and both sequences of request 1 had no slot yet"
    assert f"80 % {words}, 20 % computing its own tokens. 3 sequences waited when it came." in as_text(facts)


FOR_ANY = {"kv_reservation": "context", "max_model_len": 97}
BOUNDARIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a block is left": ({}, {"blocks_free": 1}, "queued_policy"),
    "a block is left for two groups": ({"windows": (None, 8)}, {"blocks_free": 1}, "queued_blocks"),
    "a prompt is not yet read": ({}, {"entries": (Entry("0.0", 0, 100, 0, 0),)}, "queued_tokens"),
    "one of two prompts is not yet read": (
        {},
        {"entries": (Entry("0.0", 0, 60, 0, 1), Entry("2.0", 0, 40, 0, 0))},
        "queued_tokens",
    ),
    # 40 tokens and 9 new ones, of which the last is never computed, are three blocks of 16.
    "blocks for the request are left": ({"kv_reservation": "request"}, {"blocks_free": 3}, "queued_policy"),
    "too few for the request are": ({"kv_reservation": "request"}, {"blocks_free": 2}, "queued_blocks"),
    "a length that any may have counts for none": (
        {"kv_reservation": "request", "max_model_len": 97},
        {"blocks_free": 3},
        "queued_policy",
    ),
    "blocks for any are left": (FOR_ANY, {"blocks_free": 6}, "queued_policy"),
    "too few for any are": (FOR_ANY, {"blocks_free": 5}, "queued_blocks"),
    "nothing is reserved": ({"max_model_len": 97}, {"blocks_free": 2}, "queued_policy"),
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_where_one_cause_of_waiting_ends_and_the_next_begins(case: str) -> None:
    engine, fields, cause = BOUNDARIES[case]
    some = recording(
        arrival(0.0, 0, 100),
        arrival(0.0, 1, 40),
        replace(step(0, 0.0, 4.0, ("0.0", 0, 100, 1), running=1, admitted=(slot("0.0", 0),)), **fields),
        step(1, 4.0, 5.0, ("1.0", 0, 40, 1), admitted=(slot("1.0", 1),)),
    )
    header = replace(some.header, engine=replace(ENGINE, **engine))
    assert shares(why(Recording(header, some.events), "1").first_token) == {cause: 4.0, "own": 1.0}


def test_those_that_wait_when_a_request_comes_are_counted() -> None:
    facts = why(
        recording(
            *(arrival(0.0, request, 10) for request in range(4)),
            arrival(0.0, 4, 10, n=2),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), ("1.0", 0, 10, 1), admitted=(slot("0.0", 0), slot("1.0", 1))),
            finish(1.0, "2.0", 0, "cancelled"),
            step(1, 1.0, 2.0, ("0.0", 10, 1, 1), num_decodes=1, preempted=("1.0",)),
            arrival(2.0, 5, 10),
            arrival(2.0, 6, 10),
        ),
        "5",
    )
    assert facts.ahead == len({"1.0", "3.0", "4.0", "4.1"})


def test_the_prompts_of_several_others_are_counted_and_the_longest_of_the_first_is_named() -> None:
    facts = why(
        recording(
            *(arrival(0.0, request, 40) for request in range(3)),
            step(
                0,
                0.0,
                1.0,
                *((f"{request}.0", 0, 40, 1) for request in range(3)),
                admitted=tuple(slot(f"{request}.0", request) for request in range(3)),
            ),
        ),
        "0",
    )
    assert facts.first_token.others == OtherPrompts(num_requests=2, longest_request=1, longest_tokens=40)
    assert "67 % sharing steps with 2 prompts, the longest the 40-token prompt of request 1" in as_text(facts)


def test_the_longest_step_of_a_gap_is_found_in_a_recording_without_its_beginning() -> None:
    facts = why(
        recording(
            step(9, 9.0, 10.0),
            arrival(10.0, 4, 10),
            step(10, 10.0, 11.0, ("4.0", 0, 10, 1), admitted=(slot("4.0", 0),)),
            step(11, 11.0, 14.0),
            step(12, 14.0, 15.0, ("4.0", 10, 1, 1), num_decodes=1),
            step(13, 15.0, 20.0),
            first_step=9,
        ),
        "4",
    )
    assert facts.worst_gap is not None
    assert (facts.worst_gap.after, facts.worst_gap.span.seconds, facts.worst_gap.step.step) == (1, 4.0, 11)


@pytest.mark.parametrize(("came_s", "is_explained"), [(8.9, False), (9.0, True)])
def test_a_request_is_explained_if_it_came_with_the_first_step_that_is_left(came_s: float, is_explained: bool) -> None:
    some = recording(
        arrival(came_s, 4, 10), step(9, 9.0, 10.0, ("4.0", 0, 10, 1), admitted=(slot("4.0", 0),)), first_step=9
    )
    if is_explained:
        assert why(some, "4").ttft_s == 1.0
    else:
        with pytest.raises(InvalidArgumentError, match="request 4 came before step 9"):
            why(some, "4")


def test_tokens_that_came_at_one_moment_have_no_rate() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            step(1, 1.0, 1.0, ("0.0", 10, 1, 1), num_decodes=1),
        ),
        "0",
    )
    assert (facts.new_tokens, facts.tokens_per_s, facts.median_gap_s) == (2, None, 0.0)
    assert "a second" not in as_text(facts)


def test_a_preemption_that_nothing_followed_lasted_to_the_end() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            step(1, 1.0, 2.0, preempted=("0.0",)),
            finish(7.0, "0.0", 1, "cancelled"),
        ),
        "0",
    )
    assert facts.preemptions == (Preemption(step=1, waited_s=6.0, lost_tokens=10),)


@pytest.mark.parametrize(("count", "named"), [(5, "1, 2, 3, 4, 5"), (7, "1, 2, 3, 4, 5 and 2 more")])
def test_the_steps_of_a_few_preemptions_are_named(count: int, named: str) -> None:
    again = [
        step(number, number, number + 1.0, ("0.0", 0, 10, 1), preempted=("0.0",), admitted=(slot("0.0", 0),))
        for number in range(1, count + 1)
    ]
    first = step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),))
    text = as_text(why(recording(arrival(0.0, 0, 10), first, *again), "0"))
    assert f"{count} preemptions (step {named}): {10 * count} tokens to compute again, 0 µs until blocks were" in text


def test_a_step_takes_from_the_end_of_the_one_before_it() -> None:
    """One that is launched ahead begins before that."""
    found = measured_steps(
        recording(
            arrival(0.0, 0, 10),
            step(0, 1.0, 3.0, ("0.0", 0, 10, 1)),
            step(1, 2.0, 4.0, ("0.0", 10, 1, 1), num_decodes=1),
            replace(step(2, 5.0, 6.0, ("0.0", 11, 1, 0), num_decodes=1), ran_s=None, ended_s=None),
            step(3, 7.0, 9.0, ("0.0", 11, 1, 1), num_decodes=1),
        )
    )
    assert [(each.step, measured.seconds) for each, measured in found] == [(0, 2.0), (1, 1.0), (3, 2.0)]


@pytest.mark.parametrize(("num_steps", "is_known"), [(49, False), (50, True)])
def test_a_recording_of_fifty_steps_says_what_was_expected(num_steps: int, is_known: bool) -> None:
    steps = [
        step(number, number, number + 0.5, ("0.0", 10 + number, 1, 1), num_decodes=1) for number in range(num_steps)
    ]
    facts = why(recording(arrival(0.0, 0, 10), *steps), "0")
    assert facts.steps_s == pytest.approx(num_steps / 2)
    assert (facts.expected_s is not None) == is_known
    assert ("are expected of such steps" in as_text(facts)) == is_known


def test_a_preemption_is_time_waited_and_time_to_compute_again() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            arrival(0.0, 1, 30),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), ("1.0", 0, 30, 1), admitted=(slot("0.0", 0), slot("1.0", 1))),
            step(1, 1.0, 2.0, ("0.0", 10, 1, 1), ("1.0", 30, 1, 1), num_decodes=2),
            step(2, 2.0, 5.0, ("0.0", 11, 1, 1), num_decodes=1, preempted=("1.0",)),
            step(3, 5.0, 6.0, ("0.0", 12, 1, 1), num_decodes=1),
            finish(6.0, "0.0", 4),
            step(4, 6.0, 14.0, ("1.0", 0, 32, 1), admitted=(slot("1.0", 1),)),
            finish(14.0, "1.0", 3),
        ),
        "1",
    )
    assert facts.preemptions == (Preemption(step=2, waited_s=4.0, lost_tokens=31),)
    assert facts.worst_gap is not None
    assert facts.worst_gap.preempted
    assert (facts.worst_gap.after, facts.worst_gap.span.seconds, facts.worst_gap.step.step) == (2, 12.0, 4)
    assert shares(facts.worst_gap.span) == {"preempted": 4.0, "recomputing": 8.0 * 31 / 32, "own": 8.0 / 32}
    text = as_text(facts)
    assert "1 preemption (step 2): 31 tokens to compute again, 4.00 s until blocks were free." in text
    assert "meanwhile it was preempted" in text


def test_wrong_drafts_are_its_own_computing_and_nothing_is_computed_again() -> None:
    drafted = [Entry("0.0", 10, 5, 4, 2), Entry("0.0", 12, 3, 2, 3), Entry("0.0", 0, 16, 0, 1)]
    steps = [replace(step(number, number, number + 1.0), entries=(drafted[number - 1],)) for number in (1, 2, 3)]
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            *steps[:2],
            replace(steps[2], preempted=("0.0",), admitted=(slot("0.0", 0),)),
        ),
        "0",
    )
    assert facts.new_tokens == 1 + 2 + 3 + 1
    assert facts.preemptions == (Preemption(step=3, waited_s=0.0, lost_tokens=15),)
    assert shares(facts.other_tokens) == {"own": 2.0 + 1 / 16, "recomputing": 15 / 16}


def test_waiting_behind_a_preempted_sequence_is_waiting_for_blocks() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            step(1, 1.0, 2.0, preempted=("0.0",), size=1),
            arrival(2.0, 1, 5),
            step(2, 2.0, 3.0),
            step(3, 3.0, 4.0, ("0.0", 0, 11, 1), ("1.0", 0, 11, 1), admitted=(slot("0.0", 0), slot("1.0", 1))),
        ),
        "1",
    )
    assert shares(facts.first_token) == {"queued_blocks": 1.0, "own": 0.5, "other_prompts": 0.5}


def test_a_cached_prompt_and_a_request_that_never_got_a_token() -> None:
    events = (
        arrival(0.0, 0, 50, n=2),
        step(0, 0.0, 2.0, ("0.0", 48, 2, 0), admitted=(slot("0.0", 0, 48, 48),), size=2),
        finish(4.0, "0.0", 0, "timeout"),
        finish(4.0, "0.1", 0, "cancelled"),
    )
    first, second = why(recording(*events), "0.0"), why(recording(*events), "0.1")
    assert (first.cached_tokens, first.queue_s, first.ttft_s, first.finish_reason) == (48, 0.0, None, "timeout")
    assert shares(first.first_token) == {"own": 2.0, "between_steps": 2.0}
    assert as_text(first).splitlines() == [
        "Request 0, completion 0 of 2: a prompt of 50 tokens (48 of them found in the prefix cache), 0 new tokens in "
        "1 step and 4.00 s; its time was up.",
        "No token came in 4.00 s: 50 % computing its own tokens, 50 % with no step running.",
    ]
    assert (second.queue_s, second.steps) == (None, 0)
    assert shares(second.first_token) == {"queued_tokens": 2.0, "queued_step": 2.0}


def test_several_tokens_of_one_step_come_without_a_gap() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            step(1, 1.0, 2.0, ("0.0", 10, 4, 3)),
            step(2, 2.0, 4.0, ("0.0", 13, 1, 1), num_decodes=1),
        ),
        "0",
    )
    assert (facts.new_tokens, facts.steps, facts.median_gap_s) == (5, 3, 0.5)
    assert facts.worst_gap is not None
    assert (facts.worst_gap.after, facts.worst_gap.span.seconds) == (4, 2.0)


def test_only_the_step_that_admits_a_request_is_scheduled_in_its_waiting_time() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 1.0, 3.0, ("0.0", 0, 10, 1), scheduled_s=1.5, admitted=(slot("0.0", 0),)),
            step(1, 3.0, 4.0, ("0.0", 10, 1, 1), scheduled_s=3.25, num_decodes=1),
        ),
        "0",
    )
    assert facts.queue_s == 1.5
    assert shares(facts.first_token) == {"queued_step": 1.5, "own": 1.5}
    assert shares(facts.other_tokens) == {"own": 1.0}


def test_a_failed_step_counts_as_nothing_computed() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 1.0, 1.0, ("0.0", 0, 10, 0), admitted=(slot("0.0", 0),), ran_s=None),
            step(1, 3.0, 4.0, ("0.0", 0, 10, 1)),
        ),
        "0",
    )
    assert facts.queue_s == 1.0
    assert shares(facts.first_token) == {"queued_step": 1.0, "between_steps": 2.0, "own": 1.0}


def test_sequences_outside_the_recording_are_refused() -> None:
    empty = recording()
    with pytest.raises(InvalidArgumentError, match=r"holds no request, but no sequence '0\.0'"):
        why(empty, "0")
    some = recording(arrival(0.0, 4, 10, n=2), arrival(0.0, 6, 10), step(9, 1.0, 2.0), first_step=9)
    for name in ("3", "4.2", "4.x", "x", "4.0.0", ""):
        with pytest.raises(InvalidArgumentError, match=r"holds requests 4 to 6, but no sequence"):
            why(some, name)
    with pytest.raises(InvalidArgumentError, match="request 6 came before step 9, where this recording begins"):
        why(some, "6")


@pytest.mark.parametrize(
    "lengths", [[1.0], [1.0, 1.0, 1.0], [0.5, 99.5], [0.4, 0.4, 0.2, 99.0], [1e-9, 1.0], [3.0] * 7]
)
def test_percentages_sum_to_100_and_none_is_off_by_one(lengths: list[float]) -> None:
    causes = ["own", "recomputing", "other_prompts", "other_decodes", "passed_over", "preempted", "between_steps"]
    parts = tuple(Share(cause, length) for cause, length in zip(causes, lengths, strict=False))  # type: ignore[arg-type]
    found = Span(seconds=sum(lengths), shares=parts, others=None).percentages
    assert sum(found.values()) == 100
    for cause, length in parts:
        assert abs(found[cause] - 100 * length / sum(lengths)) < 1


def test_no_time_has_no_percentages() -> None:
    assert Span(seconds=0.0, shares=(), others=None).percentages == {}
    facts = why(recording(arrival(0.0, 0, 1), finish(0.0, "0.0", 0, "cancelled")), "0")
    assert isinstance(facts, Why)
    assert "No token came in 0 µs: no time passed." in as_text(facts)


def test_the_longest_step_of_a_gap_is_told_with_its_tokens_and_phases() -> None:
    decoded = [(f"{request}.0", 10, 1, 1) for request in range(2)]
    prompts = [("2.0", 0, 1500, 0), ("3.0", 0, 1, 1)]
    facts = why(
        recording(
            *(arrival(0.0, request, 1500) for request in range(4)),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            replace(
                step(1, 2.0, 9.0, *decoded, *prompts, num_decodes=2, scheduled_s=2.5, build_s=0.25, ran_s=8.0),
                preempted=("0.0",),
            ),
        ),
        "0",
        StepCost(tokens=((0, 6.5),)),
    )
    gaps, longest, expected, *_ = as_text(facts).splitlines()[3:]
    assert gaps.startswith("Gaps between tokens: median 7.00 s, worst 7.00 s after token 1: ")
    assert longest == (
        "The longest step of that gap was step 1, 7.00 s for 2 decodes and 1,501 prompt tokens, where 6.50 s are "
        "expected (schedule 500 ms, build 250 ms, forward and sample 5.25 s, update 1.00 s); meanwhile it was "
        "preempted."
    )
    assert expected == "Its 2 steps took 8.00 s in all; 13.00 s are expected of such steps."


def test_a_failed_step_in_a_gap_is_told_so() -> None:
    facts = why(
        recording(
            arrival(0.0, 0, 10),
            step(0, 0.0, 1.0, ("0.0", 0, 10, 1), admitted=(slot("0.0", 0),)),
            replace(
                step(1, 2.0, 2.0, ("0.0", 10, 1, 0), num_decodes=1, scheduled_s=2.5, ran_s=None),
                ended_s=None,
            ),
            step(2, 2.5, 2.75, ("0.0", 10, 1, 1), num_decodes=1),
        ),
        "0",
    )
    assert "step 1, 500 ms for 1 decode (schedule 500 ms, then it failed)." in as_text(facts)


def test_the_work_of_a_step_is_that_of_its_tokens_and_a_batch_that_differs_is_built() -> None:
    drafted = replace(step(6, 6.0, 7.0), entries=(Entry("1.0", 21, 4, 3, 2), Entry("2.0", 5, 7, 0, 0)))
    decodes = [("0.0", 10, 1, 1), ("1.0", 20, 1, 1)]
    later = [("0.0", 11, 1, 1), ("1.0", 21, 1, 1)]
    found = measured_steps(
        recording(
            *(arrival(0.0, request, 10) for request in range(3)),
            step(0, 0.0, 1.0, *decodes, num_decodes=2),
            step(1, 1.0, 2.0, *later, num_decodes=2),
            step(2, 2.0, 3.0, later[1], num_decodes=1),
            step(3, 3.0, 4.0, later[0], num_decodes=1),
            step(4, 4.0, 5.0, ("2.0", 0, 5, 1)),
            step(5, 5.0, 6.0, ("2.0", 5, 1, 1), num_decodes=1),
            drafted,
        )
    )
    assert [tuple(measured.work) for _, measured in found] == [
        # tokens, tokens that are read, those that tokens of chunks read, rows of logits, chunks, whether it is built
        (2, 11 + 21, 0, 2, 0, 1),
        (2, 12 + 22, 0, 2, 0, 0),
        (1, 22, 0, 1, 0, 1),
        (1, 12, 0, 1, 0, 1),
        (5, 5, 1 + 2 + 3 + 4 + 5, 1, 1, 1),
        (1, 6, 0, 1, 0, 1),
        (11, 25 + 12, (22 + 23 + 24 + 25) + (6 + 7 + 8 + 9 + 10 + 11 + 12), 4, 2, 1),
    ]


def test_durations_have_suitable_units_and_digits() -> None:
    texts = [seconds(length) for length in (0.0, 4e-6, 0.9994e-3, 0.9996e-3, 0.0123456, 0.9994, 0.9996, 1.844, 4000.0)]
    assert texts == ["0 µs", "4 µs", "999 µs", "1 ms", "12.3 ms", "999 ms", "1.00 s", "1.84 s", "4,000.00 s"]
    assert seconds(0.9995) == "1.00 s"
