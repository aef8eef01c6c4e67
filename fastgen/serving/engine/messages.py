"""What a server and its engine's process say to each other, as MessagePack over a socket of this machine.

A request has a number that the server gives it; it is used once in the life of an engine's process.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams

# --- to the engine


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Queue a request. Where it is a stream, its tokens are told step by step, else when it has ended."""

    number: int
    prompt_ids: list[int]
    # The fields that differ from the defaults of ``SamplingParams``; see :func:`pack_sampling`.
    sampling: dict[str, Any]
    is_stream: bool


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """End a request, for nobody waits for it any more. Nothing more is told of it."""

    number: int


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Answer with a :class:`Reply` of the same number; ``what`` is a key of ``engine_process.ANSWERS``."""

    number: int
    what: str


class Check(msgspec.Struct, tag="check", array_like=True):
    """Answer with a :class:`Reply` of the same number: why this would be refused, or nil; nothing is queued."""

    number: int
    prompt_ids: list[int]
    sampling: dict[str, Any]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End the process."""


ToEngine = Submit | Cancel | Ask | Check | Stop

# --- to the server


class EngineFacts(msgspec.Struct, array_like=True, kw_only=True):
    """What an engine is, once it is loaded."""

    # Where the model's files are.
    directory: str
    architecture: str
    recipe: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    block_size: int
    num_blocks: int
    # The memory ledger, for people.
    ledger: str
    load_s: float


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded and takes requests."""

    facts: EngineFacts


class LoadFailed(msgspec.Struct, tag="load failed", array_like=True):
    """The model cannot be loaded with these arguments. The process ends."""

    error: str


class End(msgspec.Struct, array_like=True):
    """Why and how a completion ended."""

    reason: FinishReason
    error: str | None
    score: float | None
    metrics: RequestMetrics
    # Since its first token was made, if there is one.
    first_token_ago_s: float | None


class Progress(msgspec.Struct, array_like=True):
    """What a completion has got since it was last told of."""

    number: int
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    end: End | None
    # Told with the first that there is of completion 0.
    prompt_logprobs: list[dict[int, float] | None] | None = None


class Refused(msgspec.Struct, array_like=True):
    """A request that was not queued, and why."""

    number: int
    error: str
    # Whether that is no fault of the request's.
    is_failure: bool = False


class Status(msgspec.Struct, array_like=True):
    """The engine's load, told several times a second, for a sign of life too."""

    # Sequences with a slot.
    num_running: int
    num_waiting: int
    num_steps: int


class Report(msgspec.Struct, tag="report", array_like=True):
    """What has happened since the last one."""

    # Of streams that have one completion and nothing else to tell: number and token id, number and token id, …
    tokens: list[int]
    progress: list[Progress]
    # Requests that are not streams whose first token came.
    started: list[int]
    refused: list[Refused]
    status: Status | None


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The answer to an :class:`Ask` or a :class:`Check`: MessagePack of what was asked for, or why there is none."""

    number: int
    body: msgspec.Raw
    error: str | None


ToServer = Ready | LoadFailed | Report | Reply

to_engine = msgspec.msgpack.Decoder(ToEngine)
to_server = msgspec.msgpack.Decoder(ToServer)
encoder = msgspec.msgpack.Encoder()

_READABLE = int(zmq.POLLIN)


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is a message to be received. Costs less than to try, and to be told by an exception."""
    return bool(socket.getsockopt(zmq.EVENTS) & _READABLE)  # type: ignore[operator]  # of this option it is a number


_DEFAULTS = vars(SamplingParams())


def pack_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of ``sampling`` that are not the defaults; the seed as what it is taken as, which has 64 bits."""
    fields = {name: value for name, value in vars(sampling).items() if value != _DEFAULTS[name]}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % 2**64
    return fields


def unpack_sampling(fields: dict[str, Any]) -> SamplingParams:
    """What :func:`pack_sampling` was given."""
    response_format = fields.get("response_format")
    if response_format is not None:
        fields = fields | {"response_format": ResponseFormat(**response_format)}
    return SamplingParams(**fields)
