"""Sends a client's requests to a server by HTTP, to ``/generate``, which has all features of ``LLM``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import urlencode

import httpx2
import msgspec

from fastgen.errors import FastgenError, GenerationError, InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationChunk, GenerationOutput
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.api_keys import sendable_key
from fastgen.serving.clients.addresses import split_url, trusting
from fastgen.serving.clients.requests import ClientRequest
from fastgen.serving.http.records import NUMBERS_HEADER, REPLICAS_HEADER, ChunkRecord, OutputRecord
from fastgen.serving.refusals import (
    EngineDiedError,
    ForbiddenError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
)

_CONNECT_TIMEOUT_S = 10.0
_output = msgspec.json.Decoder(OutputRecord)
_chunk = msgspec.json.Decoder(ChunkRecord)


class HttpTransport:
    """Talks to the server at ``address``, such as ``http://127.0.0.1:8000``, with ``api_key`` if there is one.
    ``certificate`` is a file with a certificate to trust.
    """

    def __init__(self, address: str, api_key: str | None, certificate: str | None = None):
        self._address = address if "://" in address else f"http://{address}"
        split_url(self._address)
        headers = {} if api_key is None else {"authorization": f"Bearer {sendable_key(api_key, 'api_key')}"}
        self._http = httpx2.AsyncClient(
            base_url=self._address,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),  # the request's own timeout limits the answer
            limits=httpx2.Limits(max_connections=None),
            verify=trusting(certificate),
            trust_env=False,  # no proxy between processes of this machine
        )

    async def generate(self, request: ClientRequest) -> GenerationOutput:
        async with self._sent("/generate", _body(request)) as response:
            return _output.decode(await response.aread()).output()

    async def stream(self, request: ClientRequest) -> AsyncIterator[GenerationChunk | GenerationOutput]:
        async with self._sent("/generate", _body(request) | {"stream": True}) as response:
            is_error = False
            async for line in response.aiter_lines():
                if line.startswith("event: error"):
                    is_error = True
                elif line.startswith("data: ") and is_error:
                    _fail(500, json.loads(line.removeprefix("data: ")), {})
                elif line.startswith("data: "):
                    record = _chunk.decode(line.removeprefix("data: "))
                    yield record.chunk()
                    if record.output is not None:
                        yield record.output.output()
                        return
        raise GenerationError("the server ended the stream before the answer was whole")

    async def check(self, requests: Sequence[ClientRequest]) -> list[str | None]:
        async with self._sent("/check", {"requests": [_body(request) for request in requests]}) as response:
            errors: list[str | None] = json.loads(await response.aread())["errors"]
            return errors

    async def info(self) -> dict[str, Any]:
        async with self._sent("/info") as response:
            info: dict[str, Any] = json.loads(await response.aread())
            return info

    async def recordings(self, request_id: str) -> list[tuple[bytes, list[str]]]:
        """Returns the flight recording of each engine that answered a prompt of the request ``request_id``, and the
        numbers that its prompts have in it.
        """
        found, left = [], [dict[str, str]()]
        while left:
            query = urlencode({"request": request_id, **left.pop(0)})
            async with self._sent(f"/recording?{query}") as response:
                found.append((await response.aread(), response.headers[NUMBERS_HEADER].split()))
            if len(found) == 1:  # the first answer names the other replicas
                others = response.headers.get(REPLICAS_HEADER, "").split()[1:]
                left = [{"replica": replica} for replica in others]
        return found

    async def terminate(self, token: str | None) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        async with self._sent("/terminate", {}, headers):
            pass

    async def close(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def _sent(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """Yields the response if it is not an error; its body is still to be read. An error while it is read means that
        another program answers at this address.
        """
        method, content = ("GET", None) if body is None else ("POST", _encoded(body))
        kind = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._http.stream(
                method, path, content=content, headers={**kind, **(headers or {})}
            ) as response:
                if response.status_code != 200:
                    _fail(response.status_code, _error_of(await response.aread()), response.headers)
                yield response
        except httpx2.ConnectError as error:
            raise FastgenError(f"no server answers at {self._address}: {error}") from error
        except httpx2.TransportError as error:
            raise FastgenError(f"the connection to {self._address} broke: {error or type(error).__name__}") from error
        except FastgenError:
            raise
        except (ValueError, LookupError, TypeError, httpx2.DecodingError) as error:
            raise FastgenError(
                f"{self._address}{path} does not answer as a server of fastgen does ({type(error).__name__}: {error}); "
                "see whether another program has this address"
            ) from error


def _body(request: ClientRequest) -> dict[str, Any]:
    fields = {name: value for name, value in request.fields.items() if value is not None}
    if isinstance(given := fields.get("response_format"), ResponseFormat):
        fields["response_format"] = given.as_json()
    if request.messages is not None:
        return {"messages": request.messages, **fields}
    return {"prompt": request.prompt, **fields}


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Returns ``body`` as JSON. Raises ``InvalidArgumentError`` for a value that JSON does not have."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"the request cannot be sent as JSON: {error}") from None


def _error_of(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _fail(status: int, body: Any, headers: Mapping[str, str]) -> NoReturn:
    """Raises the Python error for the server's refusal."""
    error = body.get("error") if isinstance(body, dict) else None
    message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (None, None)
    message = message or f"the server answered with status {status}"
    retry_after_s = _seconds(headers.get("retry-after")) or 1.0
    match status:
        case 400 | 422:
            raise InvalidArgumentError(message)
        case 401:
            raise UnauthorizedError(message)
        case 403:
            raise ForbiddenError(message)
        case 404:
            raise UnknownModelError(message)
        case 413:
            raise TooLargeError(message)
        case 429:
            predicted_s = _seconds(headers.get("x-predicted-ttft-s"))
            raise OverloadedError(message, retry_after_s=retry_after_s, predicted_ttft_s=predicted_s)
        case 503:
            raise UnavailableError(message, retry_after_s=retry_after_s)
    if code == "engine_died":
        raise EngineDiedError(message)
    raise GenerationError(message)


def _seconds(text: str | None) -> float | None:
    """Returns the seconds in a header, which may also hold a date, such as that of a proxy."""
    try:
        return float(text or "")
    except ValueError:
        return None
