"""The reasons for which a server refuses a request. HTTP and gRPC each translate them to their own status codes."""

from __future__ import annotations

from typing import Literal

from fastgen.errors import FastgenError

# The reasons for which a request is refused whatever it asks for.
Refusal = Literal[
    "answers",
    "api_key",
    "bodies",
    "body_size",
    "body_time",
    "connections",
    "encoding",
    "head_size",
    "head_time",
    "host",
    "itl_target",
    "logprobs",
    "not_http",
    "pipelined",
    "prompt_tokens",
    "queued_formats",
    "queued_requests",
    "queued_texts",
    "queued_tokens",
    "ttft_slo",
    "unavailable",
]


class RefusedError(FastgenError):
    """Base class. The message says what is wrong and what to do."""


class BadRequestError(RefusedError):
    """The request is malformed or cannot be honoured. ``param`` is the field at fault, if it is known, and ``code`` is
    a machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class UnknownModelError(RefusedError):
    """The requested model is not served here."""

    param = "model"


class UnauthorizedError(RefusedError):
    """There is no API key, or it is not known."""


class ForbiddenError(RefusedError):
    """The request names a host that this server does not answer for, or comes from a page of another site."""


class UnsupportedMediaError(RefusedError):
    """The body is encoded in a way that is not read here."""


class TooLargeError(RefusedError):
    """The request has more bytes or tokens than this server accepts."""


class OverloadedError(RefusedError):
    """The server has reached its limit of work. ``predicted_ttft_s`` is when the first token would have come."""

    def __init__(self, message: str, *, retry_after_s: float, predicted_ttft_s: float | None = None):
        super().__init__(message)
        self.retry_after_s, self.predicted_ttft_s = retry_after_s, predicted_ttft_s


class UnavailableError(RefusedError):
    """The server is starting, restarting its engine, or ending."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDiedError(RefusedError):
    """The engine's process ended while it held the request; the tokens generated so far are lost."""


class RequestTimeoutError(RefusedError):
    """The request itself took too long to arrive."""


def forget_frames(error: BaseException) -> None:
    """Removes the frames that ``error`` passed, and those of the errors behind it. They hold what the request gave, and
    often the error that holds them, so all of it would stay until the garbage is collected. An idle server collects
    none.
    """
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if id(found) not in seen:  # an error may be behind itself
            seen.add(id(found))
            found.__traceback__ = None
            left += [each for each in (found.__cause__, found.__context__) if each is not None]
