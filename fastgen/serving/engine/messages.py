"""The messages to and from an engine's process, as MessagePack.

A local socket connects the process with the one that started it. Further sockets connect it with servers; it opens one
for each :class:`Open`. A server gives each request a number that no other server of this engine uses, and uses it only
once.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary, ref

import msgspec
import zmq

from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams

# --- to the engine


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Queues a request. The tokens of a stream are reported step by step; otherwise the answer is reported when it has
    ended.
    """

    number: int
    prompt_ids: list[int]
    # See :class:`SamplingPacker` and :class:`RequestEncoder`.
    sampling: msgspec.Raw
    is_stream: bool


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Ends a request whose result is no longer needed. Nothing more is reported for it."""

    number: int


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Asks for a :class:`Reply` with the same number; ``what`` is a key of ``engine.process.ANSWERS``,
    or ``engine.process.RECORDING``."""

    number: int
    what: str


class RecordingReply(msgspec.Struct, array_like=True):
    """The engine's flight recording as JSON Lines, and the ids that the last requests have in it, by the numbers of
    their :class:`Submit`. The two differ, since a request whose format is compiled first is submitted later.
    """

    recording: bytes
    request_ids: dict[int, int]


class Check(msgspec.Struct, tag="check", array_like=True):
    """Asks for a :class:`Reply` with the same number: why this request would be refused, or nil. Nothing is queued."""

    number: int
    prompt_ids: list[int]
    sampling: msgspec.Raw


class Open(msgspec.Struct, tag="open", array_like=True):
    """Lets ``server`` in: asks for a :class:`Reply` with the same number and the ``RemoteAddress`` at which the engine
    waits for it. ``host`` is an address of this machine.
    """

    number: int
    server: str
    host: str


class Close(msgspec.Struct, tag="close", array_like=True):
    """Closes the connection with ``server``, and ends its requests."""

    server: str


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Ends the process."""


# Servers send these. The rest comes from the process that started this one.
FromServer = Submit | Cancel | Ask | Check
ToEngine = FromServer | Open | Close | Stop

# --- to the server


class EngineFacts(msgspec.Struct, array_like=True, kw_only=True):
    """The properties of a loaded engine."""

    # The directory of the model's files.
    directory: str
    architecture: str
    recipe: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    block_size: int
    num_blocks: int
    # The memory ledger as text.
    ledger: str
    load_s: float
    # The class of the tokenizer that was loaded; empty without one.
    tokenizer_class: str = ""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded and accepts requests."""

    facts: EngineFacts


class LoadFailed(msgspec.Struct, tag="load failed", array_like=True):
    """The model cannot be loaded with these arguments. The process ends."""

    error: str


class End(msgspec.Struct, array_like=True):
    """The end of a completion: the reason, and its figures."""

    reason: FinishReason
    error: str | None
    score: float | None
    metrics: RequestMetrics
    # Seconds since its first token was generated, if there is one.
    first_token_ago_s: float | None


class Progress(msgspec.Struct, array_like=True):
    """The progress of a completion since its last report."""

    number: int
    index: int
    token_ids: list[int]
    # As :func:`~fastgen.serving.engine.packed_logprobs.pack` returns them.
    logprobs: list[bytes] | None
    end: End | None
    # Comes with the first progress of completion 0, packed too.
    prompt_logprobs: list[bytes] | None = None


class Refused(msgspec.Struct, array_like=True):
    """A request that was not queued, and why."""

    number: int
    error: str
    # Whether the engine failed, and the request is not at fault.
    is_failure: bool = False


class Status(msgspec.Struct, array_like=True):
    """The engine's load. It is reported several times a second, also as a sign of life, to the process that started
    the engine.
    """

    # Sequences with a slot.
    num_running: int
    num_waiting: int
    num_steps: int
    # Requests that have not ended, with those whose format is being compiled.
    num_open: int = 0
    # Completions that have ended by themselves.
    num_answered: int = 0


class Report(msgspec.Struct, tag="report", array_like=True):
    """Everything that has happened since the last report."""

    # Tokens of streams with one completion and nothing but tokens to report: number, token id, number, token id, …
    tokens: list[int]
    progress: list[Progress]
    # Requests without streaming whose first token was generated.
    started: list[int]
    refused: list[Refused]
    status: Status | None


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The answer to the message with this number: its value as MessagePack, or why there is none."""

    number: int
    body: msgspec.Raw
    error: str | None


ToServer = Ready | LoadFailed | Report | Reply

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_server = msgspec.msgpack.Decoder(FromServer)
to_server = msgspec.msgpack.Decoder(ToServer)
encoder = msgspec.msgpack.Encoder()

_READABLE = int(zmq.POLLIN)


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Returns whether a message can be received. This is cheaper than trying and catching an exception."""
    return bool(socket.getsockopt(zmq.EVENTS) & _READABLE)  # type: ignore[operator]  # this option is a number


# What stands for the sampling parameters of the last request of a connection.
_SAME = msgspec.Raw(encoder.encode(None))


class RequestEncoder:
    """Encodes the messages to an engine by one connection. Sampling parameters that the last request had too are not
    sent again: with a long format, a call of many prompts would take seconds.

    The connection must lose no message, and :class:`RequestDecoder` must read them at its other end.
    """

    def __init__(self) -> None:
        self._last: msgspec.Raw | None = None

    def encode(self, message: ToEngine) -> bytes:
        if isinstance(message, Submit | Check):
            if message.sampling is self._last:
                message = msgspec.structs.replace(message, sampling=_SAME)
            else:
                self._last = message.sampling
        return encoder.encode(message)


class RequestDecoder:
    """Reads the messages of one connection, by ``decoder``. The requests of a call have one object ``sampling``."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]):
        self._decoder = decoder
        self._last = _SAME

    def decode(self, encoded: bytes) -> Any:
        """Returns the message. Raises ``msgspec.DecodeError``."""
        message = self._decoder.decode(encoded)
        if isinstance(message, Submit | Check):
            if len(message.sampling) == len(_SAME) and bytes(message.sampling) == bytes(_SAME):
                message.sampling = self._last
            else:
                self._last = message.sampling
        return message


_DEFAULTS = vars(SamplingParams())


class SamplingPacker:
    """Packs the sampling parameters of requests. The prompts of one call share theirs, which are packed once: a long
    format, or many biases, take milliseconds.
    """

    def __init__(self) -> None:
        self._last, self._packed = SamplingParams(), msgspec.Raw(encoder.encode({}))

    def pack(self, sampling: SamplingParams) -> msgspec.Raw:
        """Returns the fields of ``sampling`` that differ from the defaults. The seed is reduced to its effective
        64 bits.
        """
        if sampling is not self._last:
            fields = {name: value for name, value in vars(sampling).items() if value != _DEFAULTS[name]}
            if sampling.seed is not None:
                fields["seed"] = sampling.seed % 2**64
            self._last, self._packed = sampling, msgspec.Raw(encoder.encode(fields))
        return self._packed


class SamplingUnpacker:
    """Unpacks what :class:`SamplingPacker` has packed. Equal parameters are one object as long as a request has them,
    so that they are checked once, and a long format is in memory once.
    """

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[bytes, SamplingParams] = WeakValueDictionary()
        # The last ones, packed and unpacked: the requests of a call, which have one object, need no long key.
        self._last = msgspec.Raw(), ref(SamplingParams())

    def unpack(self, packed: msgspec.Raw) -> SamplingParams:
        """Returns the sampling parameters. Raises ``InvalidArgumentError`` if they are not valid."""
        last, found = self._last
        if packed is last and (sampling := found()) is not None:
            return sampling
        key = bytes(packed)
        if (sampling := self._shared.get(key)) is None:
            fields: dict[str, Any] = msgspec.msgpack.decode(key)
            if (response_format := fields.get("response_format")) is not None:
                fields["response_format"] = ResponseFormat(**response_format)
            self._shared[key] = sampling = SamplingParams(**fields)
        self._last = packed, ref(sampling)
        return sampling
