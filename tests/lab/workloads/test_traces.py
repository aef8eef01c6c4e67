"""Traces of each format, of small files made for these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.errors import FastgenError, InvalidArgumentError, TraceError
from fastgen.lab.workloads.registry import make_workload
from fastgen.lab.workloads.request import PlannedRequest

DATA = Path(__file__).parents[1] / "data"


def encode(text: str) -> list[int]:
    """Returns a token for each word: its length."""
    return [len(word) for word in text.split()]


def requests(spec: str, *, seed: int = 0, vocab_size: int = 1000) -> list[PlannedRequest]:
    return make_workload(spec, encode=encode).requests(vocab_size=vocab_size, seed=seed)


def lengths(found: list[PlannedRequest]) -> list[tuple[int, int]]:
    return [(len(request.prompt_ids), request.num_new_tokens) for request in found]


def test_mooncake_has_times_lengths_and_sessions_without_requests_that_failed() -> None:
    found = requests(f"trace:{DATA}/mooncake.jsonl")
    assert lengths(found) == [(1200, 52), (1100, 26), (40, 8), (30, 8), (600, 4)]
    assert [request.due_s for request in found] == pytest.approx([0.0, 0.5, 0.6, None, 0.8])
    assert [request.session for request in found] == [None, None, "a", "a", None]
    assert [request.continues for request in found] == [False, False, False, True, False]
    assert [request.think_s for request in found] == [0, 0, 0, 0.25, 0]


def test_equal_hash_ids_have_equal_tokens() -> None:
    first, second, *_, last = requests(f"trace:{DATA}/mooncake.jsonl")
    assert first.prompt_ids[:1024] == second.prompt_ids[:1024]
    assert first.prompt_ids[1024:1100] != second.prompt_ids[1024:]
    assert first.prompt_ids[:512] != first.prompt_ids[512:1024]
    assert first.prompt_ids[:512] != last.prompt_ids[:512]
    assert max(first.prompt_ids) < 1000


def test_a_hash_id_may_be_half_a_character(tmp_path: Path) -> None:
    """JSON can name what UTF-8 cannot."""
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"input_length": 3, "output_length": 1, "hash_ids": ["\ud800"]}', encoding="ascii")
    assert lengths(requests(f"trace:{path}")) == [(3, 1)]


def test_tokens_follow_from_the_seed_alone() -> None:
    spec = f"trace:{DATA}/mooncake.jsonl"
    assert requests(spec, seed=1) == requests(spec, seed=1)
    assert requests(spec, seed=1) != requests(spec, seed=2)


def test_a_prefix_is_the_same_however_many_requests_are_taken() -> None:
    all_of_it = requests(f"trace:{DATA}/mooncake.jsonl")
    assert requests(f"trace:{DATA}/mooncake.jsonl,n=2") == all_of_it[:2]


def test_speed_shortens_times_and_pauses() -> None:
    found = requests(f"trace:{DATA}/mooncake.jsonl,speed=2")
    assert [request.due_s for request in found] == pytest.approx([0.0, 0.25, 0.3, None, 0.4])
    assert found[3].think_s == 0.125


def test_texts_of_mooncake_are_encoded_and_messages_hold_the_whole_conversation_unless_they_are_deltas() -> None:
    found = requests(f"trace:{DATA}/mooncake_texts.jsonl")
    assert list(found[0].prompt_ids) == [3, 3, 5]
    assert [len(request.prompt_ids) for request in found] == [3, 3, 7, 3, 2]
    assert [request.continues for request in found] == [False, False, False, False, True]


def test_a_text_may_contain_other_separators_of_lines(tmp_path: Path) -> None:
    """JSON escapes neither of these; both end a line for Python's ``splitlines``."""
    path = tmp_path / "a.jsonl"
    row = '{"text_input": "one two\u2028three \x85four", "output_length": 1}\n'
    path.write_text(2 * row, encoding="utf-8", newline="")
    assert [request.prompt_ids for request in requests(f"trace:{path}")] == [[3, 3, 5, 4]] * 2


def test_burstgpt_and_azure_have_times_and_lengths() -> None:
    burst = requests(f"trace:{DATA}/burstgpt.csv")
    assert lengths(burst) == [(40, 18), (41, 27)]
    assert [request.due_s for request in burst] == [0.0, 113.5]
    azure = requests(f"trace:{DATA}/azure.csv")
    assert lengths(azure) == [(374, 44), (396, 109), (200, 5)]
    assert [request.due_s for request in azure] == pytest.approx([0.0, 4.314579, 60.0])


def test_azure_times_may_have_a_zone(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = ["2024-05-10 00:00:01.009930+00:00,10,1", "2024-05-10 02:00:02+02:00,10,1", "2024-05-10T00:00:03Z,10,1"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert [request.due_s for request in requests(f"trace:{path}")] == pytest.approx([0.0, 0.99007, 1.99007])


def test_rows_come_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n9,3,1\n4,2,1\n")
    assert [(request.due_s, len(request.prompt_ids)) for request in requests(f"trace:{path}")] == [(0.0, 2), (5.0, 3)]


def test_sharegpt_is_single_requests_or_sessions() -> None:
    assert lengths(requests(f"trace:{DATA}/sharegpt.json")) == [(4, 5), (2, 1)]
    found = requests(f"trace:{DATA}/sharegpt.json,turns=true")
    assert lengths(found) == [(4, 5), (1, 6), (2, 1)]
    assert [request.continues for request in found] == [False, True, False]
    assert found[0].session == found[1].session != found[2].session
    assert [request.due_s for request in found] == [None, None, None]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 3, "output_length": 1}\n{"timestamp": ', ":2: no JSON"),
        ("a.jsonl", '{"input_length": 3, "output_length": 1}\n[]', ":2: expected a JSON object"),
        ("a.jsonl", '{"input_length": 2.5, "output_length": 1}', ":1: input_length: expected an integer"),
        ("a.jsonl", '\n{"input_length": 3}', ":2: output_length: expected a number, not None"),
        ("a.jsonl", '{"timestamp": "soon", "input_length": 3, "output_length": 1}', ":1: timestamp: expected a number"),
        ("a.jsonl", '{"timestamp": NaN, "input_length": 3, "output_length": 1}', ":1: timestamp: expected a number"),
        ("a.jsonl", f'{{"timestamp": {10**400}, "input_length": 3, "output_length": 1}}', ":1: timestamp: expected a"),
        ("a.jsonl", '{"input_length": 1e99, "output_length": 1}', ":1: input_length: expected an integer from 0 to"),
        ("a.jsonl", '{"input_length": 3, "output_length": 1, "hash_ids": [0.5]}', ":1: hash_ids: expected a list"),
        ("a.jsonl", '{"messages": [{"role": "user"}], "output_length": 1}', ":1: messages: expected objects"),
        ("a.jsonl", '{"text_input": 7, "output_length": 1}', ":1: text_input: expected text"),
        ("a.jsonl", '{"input_length": 3, "output_length": 1, "session_id": []}', ":1: session_id: expected text"),
        ("b.csv", "Timestamp,Request tokens\n", ":1: the header has no column 'Response tokens'"),
        ("b.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n1,2\n", ":3: 2 columns, but the header has 3"),
        ("b.csv", "Timestamp,Request tokens,Response tokens\n1,-2,3\n", ":2: Request tokens: expected an integer"),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nlater,2,3\n", ":2: TIMESTAMP: expected a time"),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:15:46,2,3\n", ":2: TIMESTAMP: "),
        ("d.json", '[\n {"conversations": [\n', ":3: no JSON"),
        ("d.json", '[{"conversations": 3}]', "entry 0: expected an object"),
        ("d.json", '[{"conversations": [{"from": "human"}]}]', "entry 0: expected messages"),
        ("e.txt", "hello", ":1: this is none of the formats mooncake, sharegpt, burstgpt, azure"),
        ("e.txt", "", ":1: this is none of the formats"),
        ("d.json", '[{"conversations": [{"from": {}, "value": "a"}]}]', "entry 0: expected a text in 'from', not {}"),
        ("d.json", "[]", "the trace has no request that can be sent"),
    ],
)
def test_an_unreadable_trace_names_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        requests(f"trace:{path}")
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_trace_with_texts_needs_a_tokenizer() -> None:
    for name in ("sharegpt.json", "mooncake_texts.jsonl"):
        with pytest.raises(TraceError, match="a tokenizer is needed"):
            make_workload(f"trace:{DATA}/{name}").requests(vocab_size=10, seed=0)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.csv: the trace cannot be read: No such file"):
        requests(f"trace:{tmp_path}/nothing.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not a text in UTF-8"):
        requests(f"trace:{tmp_path}/bytes")


@pytest.mark.parametrize("spec", ["trace", "trace:a.csv,speed=0", "trace:a.csv,n=0", "trace:a.csv,format=csv"])
def test_parameters_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(InvalidArgumentError, match="workload="):
        make_workload(spec)


def test_errors_of_traces_are_errors_of_fastgen() -> None:
    assert issubclass(TraceError, FastgenError)
