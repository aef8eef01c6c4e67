"""Errors in OpenAI's format: a status, and a body with the type, the message, and the field at fault."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from fastgen.errors import FastgenError, GenerationError
from fastgen.serving.admission.json_limits import InvalidJsonError
from fastgen.serving.refusals import (
    BadRequestError,
    EngineDiedError,
    ForbiddenError,
    OverloadedError,
    RefusedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
    UnsupportedMediaError,
    forget_frames,
)

_log = logging.getLogger("fastgen.serving")


class ErrorDetail(TypedDict):
    message: str
    type: str
    # The field at fault.
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


# The status, type and code of each refusal; the first class that matches counts.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (BadRequestError, 400, "invalid_request_error", None),
    (UnauthorizedError, 401, "authentication_error", "invalid_api_key"),
    (ForbiddenError, 403, "permission_error", "forbidden"),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (RequestTimeoutError, 408, "invalid_request_error", "request_timeout"),
    (TooLargeError, 413, "invalid_request_error", "request_too_large"),
    (UnsupportedMediaError, 415, "invalid_request_error", "unsupported_encoding"),
    (OverloadedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (EngineDiedError, 500, "server_error", "engine_died"),
    (GenerationError, 500, "server_error", "generation_failed"),
)
# The error responses of all endpoints, for the OpenAPI document.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is malformed, out of range, or cannot be honoured"),
        (401, "No API key, or one that is not known"),
        (403, "The server does not answer for the host that the request names, or for pages of other sites"),
        (404, "The model is not served here"),
        (408, "The request itself took too long to come"),
        (413, "More than this server takes"),
        (415, "The body is compressed"),
        (429, "The server has as much to do as it takes; Retry-After says when to come again"),
        (500, "The request failed while it ran"),
        (
            503,
            "The server is starting or ending, or the system has no thread for it; Retry-After says when to come again",
        ),
    )
}
NOT_JSON = "the body was not read: send JSON, with 'content-type: application/json'"
_JSON = re.compile(r"application/(?:[^/]+\+)?json")
# The status, in logs and metrics only, of a request whose client disconnected before the answer.
CLIENT_LEFT = 499
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def is_json(content_type: str | None) -> bool:
    """Returns whether a body of this type is read.

    A browser sends this type to another site only if that site allows it, unlike plain text, forms, or no type at all.
    """
    return _JSON.fullmatch((content_type or "").partition(";")[0].strip().lower()) is not None


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Returns the status and the body for an expected failure."""
    for of, status, kind, code in _KINDS:
        if isinstance(error, of):
            return status, _body(
                str(error), kind, param=getattr(error, "param", None), code=getattr(error, "code", None) or code
            )
    return 500, _body(str(error), "server_error")


def failure_body(error: Exception) -> ErrorBody:
    """Returns the body for any failure. The cause of an unexpected one goes to the log and is not sent to clients."""
    if isinstance(error, FastgenError):
        return error_body(error)[1]
    _log.error("a stream failed", exc_info=error)
    return _body("the server failed to answer this request", "server_error")


def error_response(error: Exception) -> JSONResponse:
    """Returns the response for ``error``, whose frames it removes."""
    status, body = error_body(error)
    forget_frames(error)
    headers = {}
    if (retry_after_s := getattr(error, "retry_after_s", None)) is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if (predicted_ttft_s := getattr(error, "predicted_ttft_s", None)) is not None:
        headers["x-predicted-ttft-s"] = f"{predicted_ttft_s:.3f}"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Makes ``app`` answer every error in OpenAI's format."""
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(GenerationError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _unforeseen)


def _body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.__cause__, json.JSONDecodeError):
        return error_response(not_json(error.__cause__))
    if isinstance(error.body, bytes):
        return error_response(BadRequestError(NOT_JSON))
    return error_response(invalid_request(error.errors(), error.body))


async def _http(request: Request, error: Exception) -> JSONResponse:
    """Handles the errors of routing: no such path, no such method."""
    assert isinstance(error, HTTPException)
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 405 and error.headers is not None:
        message = f"{request.url.path} takes {error.headers['Allow']}, not {request.method}"
    if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
        document = request.app.openapi()  # made at the start, and kept by the application
        paths = ", ".join(document["paths"])
        message = f"{request.method} {request.url.path}: there is no such path; this server has {paths}"
    return JSONResponse(_body(message, kind), error.status_code, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    """Handles a client that has disconnected: the status is only for the log."""
    return Response(status_code=CLIENT_LEFT)


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(_body("the server failed to answer this request", "server_error"), 500)


def not_json(error: json.JSONDecodeError) -> BadRequestError:
    """Returns the refusal of a body that cannot be parsed."""
    param = _spelled(error.place) if isinstance(error, InvalidJsonError) else ""
    if param:
        return BadRequestError(f"{param}: {error.msg}", param=param)
    return BadRequestError(f"the body is not JSON: {error.msg}")


def invalid_request(errors: Sequence[Any], body: Any) -> BadRequestError:
    """Returns one refusal for the errors that pydantic found in ``body``.

    If a field may have several types, pydantic reports errors for each of them. The refusal is about the field that
    lies deepest, because its type is the one that was meant.
    """
    found = [(_place(each["loc"], body), each) for each in errors]
    place = max((at for at, _ in found), key=len)
    messages = dict.fromkeys(_said(each) for at, each in found if at == place)
    param = _spelled(place)
    about = f"{param}: " if param else "the body: "
    return BadRequestError(about + ", or ".join(messages), param=param or None)


def _place(location: Sequence[Any], body: Any) -> tuple[Any, ...]:
    """Returns the steps of ``location`` that exist in ``body``, or that name a missing field. The other steps name
    types, not fields.
    """
    place: list[Any] = []
    value: Any = body
    steps = location[1:] if location[:1] == ("body",) else location
    for number, step in enumerate(steps):
        if isinstance(value, list):
            is_there = isinstance(step, int) and step < len(value)
        else:
            is_there = isinstance(value, dict) and step in value
        if is_there:
            value = value[step]
        elif not (isinstance(value, dict) and number == len(steps) - 1):
            continue
        place.append(step)
    return tuple(place)


def _spelled(place: tuple[Any, ...]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")[:200]


def _said(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "this field is not known"
    if error["type"] == "missing":
        return "this field is required"
    message: str = error["msg"]
    return message[:1].lower() + message[1:300]
