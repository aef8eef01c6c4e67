"""Routes whose JSON is parsed so that other requests wait as little as possible."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fastgen.serving.admission.json_limits import QUICK_BYTES, parse_json, parsing_json
from fastgen.serving.admission.turns import Turns
from fastgen.serving.http.errors import NOT_JSON, is_json
from fastgen.serving.refusals import BadRequestError, RefusedError, forget_frames

# Keys in ``scope["state"]``: of a body that is already parsed, and of the :class:`Turns` that large bodies take.
PARSED, TURNS = "parsed_json", "turns"


class JsonRequest(Request):
    """A request that parses its body by :func:`parse_json`."""

    async def json(self) -> Any:
        """Returns the parsed body. Raises ``json.JSONDecodeError``, or ``BadRequestError`` if its type is not JSON's.

        FastAPI checks the type too, but its older versions take a body without one.
        """
        if not is_json(self.headers.get("content-type")):
            raise BadRequestError(NOT_JSON)
        state = self.scope.setdefault("state", {})
        if PARSED not in state:
            body = await self.body()
            if len(body) <= QUICK_BYTES:
                state[PARSED] = parse_json(body)
            else:
                state[PARSED] = await self._turns.run(parsing_json(body))
                await self.turn()  # to be validated
        return state[PARSED]

    async def turn(self) -> None:
        """Waits for the request's next turn to do work that takes long."""
        await self._turns.wait()

    @property
    def _turns(self) -> Turns:
        state = self.scope["state"]
        if TURNS not in state:  # without a Guard before the application
            state[TURNS] = Turns(1)
        turns: Turns = state[TURNS]
        return turns


class JsonRoute(APIRoute):
    """A route that gets a :class:`JsonRequest`."""

    request_class: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            try:
                return await handle(self.request_class(request.scope, request.receive))
            except (HTTPException, RequestValidationError) as error:
                forget_frames(error)  # FastAPI's handler holds the body, and the error
                if isinstance(error.__cause__, RefusedError):  # of the body, which FastAPI gives an error of its own
                    raise error.__cause__ from None
                raise

        return handle_json
