"""The messages of ``fastgen.proto``, and their conversion to and from Python objects.

The classes are built at import from ``fastgen.protoset``, the compiled form of the same file. Unlike generated Python
code, it works with any version of protobuf. After a change of ``fastgen.proto``, run in this directory::

    python -m grpc_tools.protoc -I . --descriptor_set_out=fastgen.protoset fastgen.proto
"""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import FinishReason, GenerationChunk, GenerationOutput, Logprobs, RequestMetrics
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.admission.json_limits import check_json_sizes, parse_json
from fastgen.serving.engine.packed_logprobs import PIECE_POSITIONS

PACKAGE = "fastgen.v1"
SERVICE = f"{PACKAGE}.Generation"
PROTOSET = Path(__file__).with_name("fastgen.protoset")

pool = (
    descriptor_pool.DescriptorPool()
)  # a pool of its own, because a program may have loaded another version of the same file
for _file in descriptor_pb2.FileDescriptorSet.FromString(PROTOSET.read_bytes()).file:
    pool.AddSerializedFile(_file.SerializeToString())


def pool_with(*modules: Any) -> Any:
    """Returns a descriptor pool with this package's files and those of the generated ``modules``."""
    for module in modules:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return pool


def message_class(name: str) -> Any:
    """Returns the class of the message with this full name."""
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


GenerateRequest = message_class(f"{PACKAGE}.GenerateRequest")
GenerateResponse = message_class(f"{PACKAGE}.GenerateResponse")
GenerateChunk = message_class(f"{PACKAGE}.GenerateChunk")
Completion = message_class(f"{PACKAGE}.Completion")
LogprobsMessage = message_class(f"{PACKAGE}.Logprobs")
ChatRequest = message_class(f"{PACKAGE}.ChatRequest")
CheckRequest = message_class(f"{PACKAGE}.CheckRequest")
CheckResponse = message_class(f"{PACKAGE}.CheckResponse")
ModelInfoRequest = message_class(f"{PACKAGE}.ModelInfoRequest")
ModelInfoResponse = message_class(f"{PACKAGE}.ModelInfoResponse")
TerminateRequest = message_class(f"{PACKAGE}.TerminateRequest")
TerminateResponse = message_class(f"{PACKAGE}.TerminateResponse")

_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_EARLY_STOPPING = (False, True, "never")  # in the order of the enumeration
# The kind of a field whose length stands before it, as messages have.
_BYTES = 2


def refuse_unknown_fields(message: Message) -> None:
    """Raises ``InvalidArgumentError`` if ``message`` has fields, at any depth, that this version does not know."""
    for unknown in UnknownFieldSet(message):
        raise InvalidArgumentError(
            f"field {unknown.field_number} of {message.DESCRIPTOR.name} is not known to this server; it may be newer"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            refuse_unknown_fields(inner)


def sampling_fields(message: Any) -> dict[str, Any]:
    """Returns the fields set in a ``SamplingParams`` message, as arguments of ``fastgen.SamplingParams``."""
    return {field.name: _READERS.get(field.name, _same)(value) for field, value in message.ListFields()}


def set_sampling(message: Any, fields: Mapping[str, Any]) -> None:
    """Copies ``fields``, in the form of ``fastgen.SamplingParams``, into a ``SamplingParams`` message."""
    for name, value in fields.items():
        try:
            _set(message, name, value)
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(f"{name} cannot be sent by gRPC: {error}") from None


def _set(message: Any, name: str, value: Any) -> None:
    if value is None:
        return
    match name:
        case "logit_bias":
            message.logit_bias.update(value)
        case "stop" | "stop_token_ids":
            getattr(message, name).extend(value)
        case "seed":
            message.seed = value % 2**64
        case "early_stopping":
            message.early_stopping = _EARLY_STOPPING.index(value)
        case "response_format":
            if value.kind == "json_object":
                message.response_format.json_object.SetInParent()
            else:
                setattr(message.response_format, value.kind, value.text)
        case _:
            setattr(message, name, value)


def _same(value: Any) -> Any:
    return value


def _early_stopping(value: int) -> bool | str:
    if value not in range(len(_EARLY_STOPPING)):
        raise InvalidArgumentError(f"early_stopping must be one of EarlyStopping's values, not {value}")
    return _EARLY_STOPPING[value]


def _response_format(message: Any) -> ResponseFormat:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError("response_format: one of its kinds must be set")
    return ResponseFormat(kind, "" if kind == "json_object" else getattr(message, kind))


_READERS: dict[str, Any] = {
    "logit_bias": dict,
    "stop": tuple,
    "stop_token_ids": tuple,
    "early_stopping": _early_stopping,
    "response_format": _response_format,
}


def conversation(request: Any) -> list[dict[str, Any]]:
    """Returns the messages of a ``ChatRequest`` in the form that ``LLM.chat`` takes. Raises ``InvalidArgumentError`` or
    ``TooLargeError``.
    """
    check_json_sizes(message.more.encode() for message in request.messages)
    messages = []
    for index, message in enumerate(request.messages):
        try:
            more = parse_json(message.more.encode()) if message.more else {}
        except json.JSONDecodeError:
            more = None
        if not isinstance(more, dict):
            raise InvalidArgumentError(f"message {index}: more must be a JSON object")
        messages.append({**more, "role": message.role, "content": message.content})
    return messages


def set_conversation(request: Any, messages: list[dict[str, Any]]) -> None:
    """Copies ``messages``, whose contents are text, into a ``ChatRequest``."""
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise InvalidArgumentError(
                f"message {index} must be {{'role': …, 'content': …}} with texts, not {message!r:.80}"
            )
        more = {name: value for name, value in message.items() if name not in ("role", "content")}
        request.messages.add(role=message["role"], content=message["content"], more=json.dumps(more) if more else "")


def encoding_output(output: GenerationOutput) -> Generator[None, None, bytes]:
    """Encodes ``output`` and its other completions as a ``GenerateResponse``, and yields after each piece."""
    return (yield from _joined((yield from _output_pieces(output))))


def encoding_last_chunk(chunk: bytes, output: GenerationOutput) -> Generator[None, None, bytes]:
    """Encodes a ``GenerateChunk`` that has ``output`` as its response beside what ``chunk`` has, and yields after each
    piece.
    """
    pieces = yield from _output_pieces(output)
    return (yield from _joined([chunk, *_nested(GenerateChunk, "response", pieces)]))


def _output_pieces(output: GenerationOutput) -> Generator[None, None, list[bytes]]:
    """Returns the encoded ``GenerateResponse`` in pieces: protobuf itself encodes a message in one go."""
    head = GenerateResponse(request_id=output.request_id, prompt_token_ids=output.prompt_token_ids)
    pieces = [head.SerializeToString()]
    if output.prompt_logprobs is not None:
        packed = yield from _logprobs_pieces(output.prompt_logprobs)
        pieces += _nested(GenerateResponse, "prompt_logprobs", packed)
    for completion in output.completions:
        pieces += _nested(GenerateResponse, "completions", (yield from _completion_pieces(completion)))
        yield
    return pieces


def _completion_pieces(completion: GenerationOutput) -> Generator[None, None, list[bytes]]:
    head = Completion(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=pack_finish_reason(completion.finish_reason),
        error=completion.error,
        score=completion.score,
        metrics={name: value for name, value in vars(completion.metrics).items() if value is not None},
    )
    pieces = [head.SerializeToString()]
    if completion.logprobs is not None:
        pieces += _nested(Completion, "logprobs", (yield from _logprobs_pieces(completion.logprobs)))
    return pieces


def unpack_output(response: Any) -> GenerationOutput:
    """Returns the output that :func:`encoding_output` encoded."""
    prompt_token_ids = list(response.prompt_token_ids)
    prompt_logprobs = _unpack_logprobs(response.prompt_logprobs) if response.HasField("prompt_logprobs") else None
    others: tuple[GenerationOutput, ...] = ()
    for packed in reversed(response.completions):
        metrics = packed.metrics
        completion = GenerationOutput(
            request_id=response.request_id,
            index=packed.index,
            text=packed.text,
            token_ids=list(packed.token_ids),
            finish_reason=_finish_reason(packed.finish_reason),
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            logprobs=cast("list[Logprobs]", _unpack_logprobs(packed.logprobs)) if packed.HasField("logprobs") else None,
            error=packed.error if packed.HasField("error") else None,
            score=packed.score if packed.HasField("score") else None,
            metrics=RequestMetrics(
                queue_s=metrics.queue_s,
                ttft_s=metrics.ttft_s if metrics.HasField("ttft_s") else None,
                gaps_s=list(metrics.gaps_s),
                cached_tokens=metrics.cached_tokens,
                accepted_drafts=metrics.accepted_drafts,
                preemptions=metrics.preemptions,
            ),
            others=others if packed.index == 0 else (),
        )
        others = (completion, *others)
    return others[0]


def unpack_chunk(chunk: Any) -> GenerationChunk:
    """Returns the piece of a completion in a ``GenerateChunk``."""
    return GenerationChunk(
        index=chunk.index,
        text=chunk.text,
        token_ids=list(chunk.token_ids),
        finish_reason=_finish_reason(chunk.finish_reason) if chunk.finish_reason else None,
    )


def pack_finish_reason(reason: FinishReason) -> int:
    return 1 + _FINISH_REASONS.index(reason)


def _finish_reason(value: int) -> FinishReason:
    return _FINISH_REASONS[value - 1]


def _logprobs_pieces(entries: Iterable[Logprobs | None]) -> Generator[None, None, list[bytes]]:
    """Returns an encoded message ``Logprobs`` in pieces."""
    pieces, iterator = [], iter(entries)
    while batch := [*islice(iterator, PIECE_POSITIONS)]:
        message = LogprobsMessage()
        for entry in batch:
            position = message.positions.add()
            if entry is not None:
                position.token_ids.extend(entry)
                position.logprobs.extend(entry.values())
        pieces.append(message.SerializeToString())
        yield
    return pieces


def _nested(kind: Any, field: str, pieces: list[bytes]) -> list[bytes]:
    """Returns the pieces of a message as the pieces of ``field`` in a message of ``kind``."""
    number: int = kind.DESCRIPTOR.fields_by_name[field].number
    return [_varint(number << 3 | _BYTES), _varint(sum(map(len, pieces))), *pieces]


def _joined(pieces: Iterable[bytes]) -> Generator[None, None, bytes]:
    """Joins pieces one by one. All at once would take 0.05 s for the largest answers."""
    joined = io.BytesIO()
    for piece in pieces:
        joined.write(piece)
        yield
    return joined.getvalue()


def _varint(number: int) -> bytes:
    """Returns ``number`` as protobuf writes it: seven bits in each byte, the lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _unpack_logprobs(message: Any) -> list[Logprobs | None]:
    return [
        dict(zip(position.token_ids, position.logprobs, strict=True)) if position.token_ids else None
        for position in message.positions
    ]
