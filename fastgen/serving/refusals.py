"""Why a server does not do what it is asked, whichever way it is asked; HTTP and gRPC have their words for each."""

from __future__ import annotations

from fastgen.errors import FastgenError


class RefusedError(FastgenError):
    """Base class. The message says what is wrong and what to do."""


class BadRequestError(RefusedError):
    """The request is malformed or cannot be honoured; ``param`` is the field it is about, if one is known, and ``code``
    a word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class UnknownModelError(RefusedError):
    """A model that is not served here."""

    param = "model"


class UnauthorizedError(RefusedError):
    """No API key, or one that is not known."""


class TooLargeError(RefusedError):
    """The request has more bytes or tokens than this server takes."""


class OverloadedError(RefusedError):
    """The server has as much to do as it takes. ``predicted_ttft_s`` is when the first token would have come."""

    def __init__(self, message: str, *, retry_after_s: float, predicted_ttft_s: float | None = None):
        super().__init__(message)
        self.retry_after_s, self.predicted_ttft_s = retry_after_s, predicted_ttft_s


class UnavailableError(RefusedError):
    """The server is starting, starting its engine again, or ending."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDiedError(RefusedError):
    """The engine's process ended while the request was in it; what it had generated is lost."""


class RequestTimeoutError(RefusedError):
    """The request itself took too long to come."""
