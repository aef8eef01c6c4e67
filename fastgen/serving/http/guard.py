"""Checks every HTTP request before the application sees it: its id, the host that it names, the API key and the body.
It writes a line to the log.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.serving.admission.bodies import Bodies
from fastgen.serving.admission.json_limits import FREE_BYTES, QUICK_BYTES, measured
from fastgen.serving.admission.turns import Turns
from fastgen.serving.api_keys import bearer
from fastgen.serving.garbage import COLLECTOR
from fastgen.serving.http.bodies import Body, Receiving
from fastgen.serving.http.errors import CLIENT_LEFT, error_response
from fastgen.serving.http.hosts import Hosts
from fastgen.serving.http.json_route import PARSED, TURNS
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import (
    ForbiddenError,
    OverloadedError,
    Refusal,
    RefusedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedMediaError,
)

# Paths that need no key, as does everything below :data:`OPEN_FOLDER`: the health checks, the page, which asks for the
# key itself, and paths that accept another token too.
OPEN_PATHS = ("/", "/health", "/ready", "/-/healthz", "/ping", "/version", "/terminate")
OPEN_FOLDER = "/page/"
# How many requests the event loop begins to answer in one of its turns; other work waits for the end of the turn. With
# 4, batches of short requests fill slower, and a tenth of their throughput is lost.
_BEGUN_AT_ONCE = 32
# The same for open paths, whose requests wait only for each other, and anybody may send: other requests come first.
_OPEN_BEGUN_AT_ONCE = 8
# The most of the event loop's time for parsing bodies, and for parsing large ones. The rest is for tokens of streams
# and for small requests.
_SHARE, _SHARE_OF_LARGE = 0.25, 0.125
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
_log = logging.getLogger("fastgen.serving.requests")


class Guard:
    """An ASGI application that wraps another one.

    It puts the request's id in ``request.state.request_id`` and in the header ``x-request-id`` of the answer. The
    application receives the body in one piece; ``request.state.arrived_s`` is when it was complete, by
    ``time.monotonic``. ``metrics`` counts the answers. ``address`` is the one that the server listens at.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: ServerMetrics, address: str):
        self._app, self._options, self._metrics = app, options, metrics
        self._hosts, self._bodies = Hosts(options, address), Bodies(options.connections)
        self._receiving = Receiving(options.connections)
        self._beginning, self._beginning_open = Turns(_BEGUN_AT_ONCE), Turns(_OPEN_BEGUN_AT_ONCE)
        # Of parsing bodies that take milliseconds, and of large ones, which are measured before. Threads would take
        # Python's lock and the processor from the event loop.
        self._turns, self._turns_of_large = Turns(1, share=_SHARE), Turns(1, share=_SHARE_OF_LARGE)

    def end(self) -> None:
        """Refuses requests whose bodies are not here yet, because the server ends."""
        self._receiving.end()

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
        status, error_body, holding = 0, b"", ExitStack()

        async def named_send(message: Message) -> None:
            nonlocal status, error_body
            if message["type"] == "http.response.start":
                status = message["status"]
                if status < 400:  # an error holds what it is about until it is sent
                    holding.close()
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif status >= 400:
                error_body = message.get("body", b"")
            await send(message)

        is_open = _is_open(scope["path"])
        await (self._beginning_open if is_open else self._beginning).wait()
        with holding, Body(self._bodies, self._receiving, is_open=is_open) as body:
            try:
                self._hosts.check(headers.get("host"))
                if not is_open:
                    self._options.api_keys.check(bearer(headers.get("authorization")))
                    _check_site(headers, self._options)
                _check_encoding(headers)
                if not await body.read(headers, receive):
                    return
                turns = self._turns if len(body.content) <= FREE_BYTES else self._turns_of_large
                for _ in measured([body.content]):
                    await turns.wait()
                if len(body.content) > QUICK_BYTES:
                    await turns.wait()
                    holding.enter_context(COLLECTOR.large())
                scope["state"][TURNS] = turns
                scope["state"]["arrived_s"] = time.monotonic()
                await self._app(scope, _whole(body.content, receive), named_send)
            except RefusedError as error:
                response = error_response(error)
                response.headers["connection"] = "close"  # the rest of the body is not read
                self._metrics.refused(_REASONS[type(error)])
                await response(scope, receive, named_send)
            finally:
                scope["state"].pop(PARSED, None)  # the connection keeps its scope until its next request
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.http_request(route, method, status or CLIENT_LEFT)
                if self._options.log_requests:
                    reason = _reason(error_body)
                    self._note(scope, method, request_id, status, time.monotonic() - began_s, body.content, reason)

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
    ForbiddenError: "host",
    UnsupportedMediaError: "encoding",
    TooLargeError: "body_size",
    RequestTimeoutError: "body_time",
    OverloadedError: "bodies",
    UnavailableError: "unavailable",
}


def _is_open(path: str) -> bool:
    """Returns whether requests for ``path`` need no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _check_site(headers: Headers, options: ServeOptions) -> None:
    """Raises ``ForbiddenError`` for a request that a browser sends for a page of another site, unless the site is
    allowed or there are API keys, which such a page does not have.

    The page could not read the answer, but its requests would keep the server busy.
    """
    if options.api_keys or headers.get("sec-fetch-site") != "cross-site":
        return
    if not {"*", headers.get("origin")}.intersection(options.allow_origins):
        raise ForbiddenError(
            "a page of another site sent this request, and this server has no keys; --allow-origin SITE lets the pages "
            "of a site call it"
        )


def _check_encoding(headers: Headers) -> None:
    """Raises ``UnsupportedMediaError`` for a compressed body: a small one could become very large. Several fields are
    one list of codings.
    """
    encoding = ", ".join(headers.getlist("content-encoding"))
    if any(coding.strip().lower() not in ("identity", "") for coding in encoding.split(",")):
        raise UnsupportedMediaError(f"content-encoding {encoding[:200]!r} is not read here: send the body as it is")


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
