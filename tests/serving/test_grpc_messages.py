"""The gRPC protocol as it is shipped: compiled from its source, complete, and without loss."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf import descriptor_pb2, message_factory
from grpc_tools import protoc

from fastgen import GenerationOutput, SamplingParams
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import FinishReason, GenerationChunk, RequestMetrics
from fastgen.serving.admission.turns import at_once
from fastgen.serving.grpc import messages
from fastgen.serving.http.records import OutputRecord
from fastgen.serving.refusals import TooLargeError


def test_the_shipped_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    source = messages.PROTOSET.with_name("fastgen.proto")
    compiled = tmp_path / "compiled"
    assert protoc.main(["protoc", f"-I{source.parent}", f"--descriptor_set_out={compiled}", source.name]) == 0
    shipped, fresh = (
        descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()) for file in (messages.PROTOSET, compiled)
    )
    assert shipped == fresh


def test_every_sampling_field_has_its_place() -> None:
    message = messages.pool.FindMessageTypeByName(f"{messages.PACKAGE}.SamplingParams")
    assert [field.name for field in message.fields] == [field.name for field in dataclasses.fields(SamplingParams)]
    assert all(field.has_presence or field.is_repeated for field in message.fields)


SAMPLINGS = {
    "defaults": SamplingParams(),
    "all drawn": SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        repetition_penalty=1.25,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias={3: -100.0, 9: 4.5},
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.125,
        seed=2**64 - 1,
        n=3,
        stop=("x", "é\n"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=2,
        timeout_s=1.5,
        priority=-4,
    ),
    "beams": SamplingParams(beam_width=4, length_penalty=-0.5, early_stopping="never"),
    "early": SamplingParams(beam_width=4, early_stopping=True),
    "any object": SamplingParams(response_format={"type": "json_object"}),
    "schema": SamplingParams(response_format={"type": "json_schema", "schema": {"type": "integer"}}),
    "pattern": SamplingParams(response_format={"type": "regex", "pattern": "[a-z]+"}),
    "grammar": SamplingParams(response_format={"type": "grammar", "grammar": 'start: "x"'}),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_arrives_as_it_was_sent(name: str) -> None:
    request = messages.GenerateRequest()
    messages.set_sampling(request.sampling, vars(SAMPLINGS[name]))
    arrived = messages.GenerateRequest.FromString(request.SerializeToString())
    assert SamplingParams(**messages.sampling_fields(arrived.sampling)) == SAMPLINGS[name]


def test_what_is_not_set_stays_the_servers_to_choose() -> None:
    request = messages.GenerateRequest()
    messages.set_sampling(request.sampling, {"temperature": 0.0})
    assert messages.sampling_fields(request.sampling) == {"temperature": 0.0}


def test_any_integer_is_a_seed() -> None:
    request = messages.GenerateRequest()
    messages.set_sampling(request.sampling, {"seed": -1})
    assert messages.sampling_fields(request.sampling) == {"seed": 2**64 - 1}


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="priority cannot be sent by gRPC"):
        messages.set_sampling(messages.GenerateRequest().sampling, {"priority": 2**70})


def test_fields_of_a_newer_protocol_are_refused_at_any_depth() -> None:
    field_31 = b"\xf8\x01\x05"
    with pytest.raises(InvalidArgumentError, match="field 31 of GenerateRequest is not known"):
        messages.refuse_unknown_fields(messages.GenerateRequest.FromString(field_31))
    inner = b"\x1a" + bytes([len(field_31)]) + field_31
    with pytest.raises(InvalidArgumentError, match="field 31 of SamplingParams is not known"):
        messages.refuse_unknown_fields(messages.GenerateRequest.FromString(inner))


def test_a_conversation_arrives_as_it_was_sent() -> None:
    messages_sent: list[dict[str, Any]] = [
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "n": 1.5}], "name": None},
    ]
    request = messages.ChatRequest()
    messages.set_conversation(request, messages_sent)
    assert request.messages[0].more == ""
    assert messages.conversation(messages.ChatRequest.FromString(request.SerializeToString())) == messages_sent


def test_what_a_message_holds_beside_its_text_cannot_replace_it() -> None:
    request = messages.ChatRequest()
    request.messages.add(role="user", content="a", more='{"role": "system", "content": "b", "name": "c"}')
    assert messages.conversation(request) == [{"role": "user", "content": "a", "name": "c"}]


def some_output(**given: Any) -> GenerationOutput:
    fields: dict[str, Any] = {
        "request_id": 5,
        "text": "é",
        "token_ids": [4, 5],
        "finish_reason": "length",
        "prompt_token_ids": [1, 2],
        "metrics": RequestMetrics(
            queue_s=0.25, ttft_s=0.5, gaps_s=[0.1], cached_tokens=1, accepted_drafts=2, preemptions=3
        ),
    }
    return GenerationOutput(**fields | given)


OUTPUTS = {
    "plain": some_output(),
    "nothing came": some_output(
        text="", token_ids=[], finish_reason="timeout", metrics=RequestMetrics(queue_s=1.0, ttft_s=None), logprobs=[]
    ),
    "failed": some_output(finish_reason="error", error="NaN"),
    "logprobs": some_output(
        logprobs=[{9: -0.5, 3: -0.25}, {5: -math.inf, 1: 0.0}], prompt_logprobs=[None, {2: -1.5}], score=-0.125
    ),
    "several": some_output(
        score=-1.0,
        prompt_logprobs=[None, {2: -1.5}],
        others=tuple(some_output(index=index, text=str(index), prompt_logprobs=[None, {2: -1.5}]) for index in (1, 2)),
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_arrives_as_it_was_sent(name: str) -> None:
    import msgspec

    output = OUTPUTS[name]
    by_grpc = messages.unpack_output(messages.GenerateResponse.FromString(at_once(messages.encoding_output(output))))
    by_json = msgspec.json.decode(msgspec.json.encode(OutputRecord.of(output)), type=OutputRecord).output()
    for arrived in (by_grpc, by_json):
        assert arrived == output
        assert [list(entry) for entry in arrived.logprobs or ()] == [list(entry) for entry in output.logprobs or ()]


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_last_chunk_has_the_whole_output_beside_its_own(name: str) -> None:
    chunk = messages.GenerateChunk(index=1, text="é", token_ids=[7], finish_reason=2)
    last = messages.GenerateChunk.FromString(
        at_once(messages.encoding_last_chunk(chunk.SerializeToString(), OUTPUTS[name]))
    )
    assert messages.unpack_output(last.response) == OUTPUTS[name]
    last.ClearField("response")
    assert last == chunk


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 128, 5000])
def test_an_output_of_many_positions_arrives_as_it_was_sent(number: int) -> None:
    logprobs = [{position: -0.5, 100_000 + position: -1.5} for position in range(number)]
    output = some_output(logprobs=logprobs, prompt_logprobs=[None, *logprobs])
    encoded = at_once(messages.encoding_output(output))
    assert messages.unpack_output(messages.GenerateResponse.FromString(encoded)) == output


def test_an_output_of_many_positions_is_encoded_in_small_pieces() -> None:
    logprobs = [dict.fromkeys(range(129), -0.5)] * 5000
    pieces = at_once(messages._output_pieces(some_output(logprobs=logprobs, prompt_logprobs=logprobs)))
    assert sum(map(len, pieces)) > 10_000_000
    assert max(map(len, pieces)) < 100_000


def test_what_messages_hold_beside_their_text_is_bounded_for_all_of_them() -> None:
    request = messages.pool.FindMessageTypeByName(f"{messages.PACKAGE}.ChatRequest")
    chat = message_factory.GetMessageClass(request)()
    lists = json.dumps({"x": [[]] * 30_000})
    for _ in range(5):
        chat.messages.add(role="user", content="a", more=lists)
    assert len(messages.conversation(chat)) == 5
    chat.messages.add(role="user", content="a", more=lists)
    with pytest.raises(TooLargeError, match="lists, objects, texts, names and fractions"):
        messages.conversation(chat)


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "user"},
        {"content": "a"},
        {"role": "user", "content": None},
        {"role": 1, "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
    ids=str,
)
def test_a_message_of_a_conversation_has_two_texts(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^message 1 must be"):
        messages.set_conversation(messages.ChatRequest(), [{"role": "user", "content": "a"}, wrong])


@pytest.mark.parametrize("more", ["[]", "{", '"a"', "7", "null"])
def test_what_a_message_holds_beside_its_text_is_an_object(more: str) -> None:
    request = messages.ChatRequest()
    request.messages.add(role="user", content="a")
    request.messages.add(role="user", content="a", more=more)
    with pytest.raises(InvalidArgumentError, match=r"^message 1: more must be a JSON object"):
        messages.conversation(request)


def test_values_that_are_none_of_the_protocols_are_refused() -> None:
    request = messages.GenerateRequest()
    for value, expected in enumerate((False, True, "never")):
        request.sampling.early_stopping = value
        assert messages.sampling_fields(request.sampling) == {"early_stopping": expected}
    for value in (3, 99, -1):
        request.sampling.early_stopping = value
        with pytest.raises(InvalidArgumentError, match=f"early_stopping must be one of .*, not {value}"):
            messages.sampling_fields(request.sampling)
    request = messages.GenerateRequest()
    request.sampling.response_format.SetInParent()
    with pytest.raises(InvalidArgumentError, match="response_format: one of its kinds must be set"):
        messages.sampling_fields(request.sampling)


def test_fields_of_a_newer_protocol_are_refused_in_each_of_several_messages() -> None:
    field_31 = b"\xf8\x01\x05"
    request = messages.ChatRequest()
    request.messages.add(role="user", content="a")
    request.messages.add().MergeFromString(field_31)
    with pytest.raises(InvalidArgumentError, match=r"field 31 of .*Message is not known"):
        messages.refuse_unknown_fields(request)
    request = messages.ChatRequest()
    request.messages.add(role="user", content="a", more="{}")
    request.sampling.logit_bias.update({3: 1.0})
    request.sampling.stop.append("a")
    messages.refuse_unknown_fields(request)


def test_each_reason_has_a_number_of_its_own() -> None:
    reasons = get_args(FinishReason)
    numbers = [messages.pack_finish_reason(reason) for reason in reasons]
    assert numbers == list(range(1, len(reasons) + 1)), "0 is none"
    for number, reason in zip(numbers, reasons, strict=True):
        chunk = messages.GenerateChunk(index=2, text="a", token_ids=[5], finish_reason=number)
        assert messages.unpack_chunk(chunk) == GenerationChunk(index=2, text="a", token_ids=[5], finish_reason=reason)
    assert messages.unpack_chunk(messages.GenerateChunk(text="a")) == GenerationChunk(index=0, text="a", token_ids=[])


def test_each_completion_is_a_piece_of_its_own() -> None:
    output = some_output()
    output = replace(output, others=tuple(replace(output, index=index) for index in range(1, 5)))
    assert len([*messages._output_pieces(output)]) == 5
