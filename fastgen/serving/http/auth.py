"""API keys by HTTP: who has none is told so before anything else of the request is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen.serving.http.errors import error_response
from fastgen.serving.keys import ApiKeys, bearer
from fastgen.serving.refusals import UnauthorizedError

OPEN_PATHS = ("/", "/health", "/ready", "/ping", "/terminate")
"""What needs no key: a sign of life, and what checks by itself."""
_OPEN_FOLDERS = ("/page/",)


class KeyMiddleware:
    """Lets requests with a known key through to ``app``, and those to paths that need none."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys):
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            try:
                self._keys.check(bearer(Headers(scope=scope).get("authorization")))
            except UnauthorizedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS)
