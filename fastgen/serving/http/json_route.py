"""Routes whose JSON is parsed so that other requests wait as little as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from fastgen.serving.admission.json_limits import FREE_BYTES, parse_json

# The key in ``scope["state"]`` of a body that is already parsed.
PARSED = "parsed_json"


class JsonRequest(Request):
    """A request that parses its body by :func:`parse_json`."""

    async def json(self) -> Any:
        """Returns the parsed body. Raises ``json.JSONDecodeError``."""
        state = self.scope.setdefault("state", {})
        if PARSED not in state:
            body = await self.body()
            state[PARSED] = parse_json(body)
            if len(body) > FREE_BYTES:
                await asyncio.sleep(0)  # others have their turn before the body is validated
        return state[PARSED]


class JsonRoute(APIRoute):
    """A route that gets a :class:`JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
