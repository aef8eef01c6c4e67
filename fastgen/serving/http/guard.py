"""Checks every HTTP request before the application sees it: a request id, the API key, the size of the body, and a line
in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.serving.api_keys import bearer
from fastgen.serving.http.errors import CLIENT_LEFT, error_response
from fastgen.serving.monitoring.prometheus import Refusal, ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import RefusedError, RequestTimeoutError, TooLargeError, UnauthorizedError

# Paths that need no key, as does everything below :data:`OPEN_FOLDER`: the health checks, the page, which asks for the
# key itself, and paths that accept another token too.
OPEN_PATHS = ("/", "/health", "/ready", "/ping", "/version", "/terminate")
OPEN_FOLDER = "/page/"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
_log = logging.getLogger("fastgen.serving.requests")


class Guard:
    """An ASGI application that wraps another one.

    It puts the request's id in ``request.state.request_id`` and in the header ``x-request-id`` of the answer. The
    application receives the body in one piece; ``request.state.arrived_s`` is when it was complete, by
    ``time.monotonic``. ``metrics`` counts the answers.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics):
        self._app, self._options, self._metrics = app, options, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, method = time.monotonic(), scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the connection knows the real method and leaves out the body
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        status, body, error_body = 0, b"", b""

        async def named_send(message: Message) -> None:
            nonlocal status, error_body
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif status >= 400:
                error_body = message.get("body", b"")
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            found = await self._body(headers, receive)
            if found is None:
                return
            body = found
            scope["state"]["arrived_s"] = time.monotonic()
            await self._app(scope, _whole(body, receive), named_send)
        except RefusedError as error:
            response = error_response(error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            self._metrics.refused(_REASONS[type(error)])
            await response(scope, receive, named_send)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_request(route, method, status or CLIENT_LEFT)
            if self._options.log_requests:
                reason = _reason(error_body)
                self._note(scope, method, request_id, status, time.monotonic() - began_s, body, reason)

    def _check_key(self, path: str, headers: Headers) -> None:
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            self._options.api_keys.check(bearer(headers.get("authorization")))

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Returns the whole body of the request, or ``None`` if the client disconnected before it was complete."""
        limits = self._options.connections
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            return b""
        if length is not None and length.isdecimal() and int(length) > limits.max_body_bytes:
            raise _too_large(limits.max_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > limits.max_body_bytes:
                        raise _too_large(limits.max_body_bytes)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestTimeoutError(f"the body did not come within {limits.body_timeout_s:g} s") from None

    def _note(
        self,
        scope: Scope,
        method: str,
        request_id: str,
        status: int,
        took_s: float,
        body: bytes,
        reason: str | None,
    ) -> None:
        facts = {
            "request_id": request_id,
            "client": scope["client"][0] if scope.get("client") else None,
            "method": method,
            "path": scope["path"],
            "status": status or None,
            "took_s": round(took_s, 6),
        }
        if reason is not None:
            facts["error"] = reason
        if self._options.log_prompts:
            facts["body"] = body.decode("utf-8", "replace")
        path = (
            facts["path"] if facts["path"].isprintable() else repr(facts["path"])
        )  # it could forge other lines of the log
        _log.info("%s %s %s", method, path, status or "left", extra={"facts": facts})


_REASONS: dict[type[RefusedError], Refusal] = {
    UnauthorizedError: "api_key",
    TooLargeError: "body_size",
    RequestTimeoutError: "body_time",
}


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the body of a request may have {limit} bytes")


def _reason(error_body: bytes) -> str | None:
    """Returns the message of an error in OpenAI's format, or ``None`` if the body is none."""
    try:
        return str(json.loads(error_body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return None


def _request_id(headers: Headers) -> str:
    """Returns the client's request id if it is safe in a header and a log, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _whole(body: bytes, receive: Receive) -> Receive:
    """Returns a ``receive`` that gives ``body`` at once, then whatever the given one gives."""
    is_given = False

    async def receive_whole() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_whole
