"""A server as a target, by HTTP: any OpenAI endpoint for completions or chats, or fastgen's own."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Sequence
from typing import Any

from fastgen.errors import FastgenError
from fastgen.lab.load.events import EventParser, message_of, parse_event
from fastgen.lab.load.formats import Codec, format_of
from fastgen.lab.load.http_connection import HttpPool, Response
from fastgen.lab.load.target import Answer, RequestFailedError
from fastgen.lab.workloads.request import PlannedRequest

# The environment variables that may hold the key of the server, in this order.
KEY_VARIABLES = ("FASTGEN_API_KEY", "OPENAI_API_KEY")
# Tokens of the prompt and of the answer of the request that tries what a server takes.
_TRIAL_TOKENS = (4, 2)


class RefusedError(RequestFailedError):
    """The server answered with another status than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class EndpointTarget:
    """An ``endpoint`` of the server at ``url``, such as ``http://127.0.0.1:8000``.

    ``model`` is the server's name of the model; by default the first that it lists. ``codec`` is the model's
    tokenizer, for a server that takes or gives no token ids. With ``sends_text`` prompts are texts, also for a server
    that takes token ids. ``tls`` holds the certificates to trust, where they are not the system's. The server's key is
    taken from the environment.

    :raises InvalidArgumentError: for an address or an endpoint of another kind, or texts without ``codec``.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str = "/v1/completions",
        model: str | None = None,
        codec: Codec | None = None,
        sends_text: bool = False,
        tls: ssl.SSLContext | None = None,
    ):
        url = url.rstrip("/")
        if endpoint.startswith("/v1/"):
            url = url.removesuffix("/v1")
        self._endpoint, self._model = endpoint, model
        self._format = format_of(endpoint, codec, sends_text=sends_text)
        self._codec = codec
        self._counted_by: str | None = None
        self._pool = HttpPool(url, tls)
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "endpoint",
            "url": self._pool.url,
            "endpoint": self._endpoint,
            "model": self._model,
            **self._format.facts(),
            "tokens_counted_by": self._counted_by,
        }

    async def open(self, requests: Sequence[PlannedRequest]) -> None:
        _raise_file_limit()
        if self._model is None and self._endpoint != "/generate":
            self._model = await self._first_model()
        num_prompt, num_new = _TRIAL_TOKENS
        ids = tuple(requests[0].prompt_ids[:num_prompt])
        tried = await self._try(PlannedRequest(prompt_ids=ids, num_new_tokens=num_new))
        self._counted_by = tried.counted_by or "the usage of the whole answer"
        if not tried.token_ids and self._codec is None and any(request.continues for request in requests):
            raise FastgenError(
                f"{self._pool.url}{self._endpoint} gives no token ids of its answers, and conversations continue with "
                "them: name the model's tokenizer"
            )

    def prepare(self, request: PlannedRequest) -> bytes:
        body = json.dumps(self._format.body(self._model or "", request)).encode()
        return self._pool.request("POST", self._endpoint, self._headers, body)

    async def send(self, prepared: bytes, answer: Answer) -> None:
        events, failure, is_complete = EventParser(), None, False

        def on_body(piece: bytes, at: float) -> None:
            nonlocal failure, is_complete
            for _, data in events.feed(piece):
                if data == b"[DONE]":
                    is_complete = True
                elif failure is None:
                    try:
                        is_complete = self._format.read(parse_event(data), answer, at) or is_complete
                    except RequestFailedError as error:
                        failure = error
                    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                        failure = RequestFailedError(f"an event is not like those of {self._endpoint}: {error!r}")
                answer.ended = at

        response = await self._pool.exchange(prepared, on_body)
        if response.status != 200:
            raise _refusal(response)
        if failure is not None:
            raise failure
        if not is_complete:
            raise RequestFailedError("the server ended the stream before the answer was complete")

    def ids_of(self, answer: Answer) -> list[int]:
        num_tokens = len(answer.token_times)
        if answer.token_ids or self._codec is None:
            return answer.token_ids
        ids = self._codec.encode(answer.text)[:num_tokens]
        return ids + [0] * (num_tokens - len(ids))  # the size of the conversation is part of the workload

    async def close(self) -> None:
        await self._pool.close()

    async def _try(self, request: PlannedRequest) -> Answer:
        """Finds out what the server takes, with requests for a few tokens, and returns an answer. Raises
        ``FastgenError`` if an answer cannot have the length that is asked for."""
        refusal: RefusedError | None = None
        while True:
            answer = Answer()
            try:
                await self.send(self.prepare(request), answer)
                break
            except RefusedError as error:
                simpler = self._format.simpler() if error.status in (400, 422) else None
                refusal = refusal or error
                if simpler is None:
                    raise FastgenError(
                        f"{self._pool.url}{self._endpoint} refuses a request for the load: {refusal}"
                    ) from error
                self._format = simpler
        if len(answer.token_times) != request.num_new_tokens:
            raise FastgenError(
                f"{self._pool.url}{self._endpoint} answered a request for {request.num_new_tokens} tokens with "
                f"{len(answer.token_times)}: answers of a fixed length need a server that takes ignore_eos"
            )
        return answer

    async def get(self, path: str) -> Any:
        """Returns the JSON that the server has at ``path``. Raises ``FastgenError`` if it has none."""
        body = bytearray()
        request = self._pool.request("GET", path, self._headers)
        response = await self._pool.exchange(request, lambda piece, at: body.extend(piece))
        if response.status != 200:
            raise _refusal(response)
        try:
            return json.loads(body)
        except ValueError:
            raise RequestFailedError(f"{self._pool.url}{path} is not JSON: {bytes(body[:80])!r}") from None

    async def _first_model(self) -> str:
        try:
            return str((await self.get("/v1/models"))["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise FastgenError(f"{self._pool.url}/v1/models lists no model; name the one to measure") from None


def _refusal(response: Response) -> RefusedError:
    """Returns the error of a response with another status than 200: the server's own sentence, where it has one."""
    text = response.refusal.decode(errors="replace").strip()
    try:
        found = json.loads(text)
        message = message_of(found["error"] if "error" in found else found["detail"])
    except (ValueError, KeyError, TypeError):
        message = text[:200] or "no reason is given"
    return RefusedError(f"status {response.status}: {message}", response.status)


def _raise_file_limit() -> None:
    """Lets this process open as many connections as the system allows: an open loop past saturation has many."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
