"""The served model and its tokenizer: ``/v1/models``, ``/version``, ``/tokenize``, ``/detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http.errors import ERRORS
from fastgen.serving.http.json_answers import encode_json
from fastgen.serving.http.openai.answers import Detokenized, Model, Models, Tokenized, Version
from fastgen.serving.http.openai.conversations import encode_chat
from fastgen.serving.http.openai.decoding import decoding
from fastgen.serving.http.openai.json_texts import ConversationRoute
from fastgen.serving.http.openai.requests import DetokenizeRequest, TokenizeRequest
from fastgen.serving.http.openai.run import check_ids, check_model, now
from fastgen.serving.http.openai.tools import for_template
from fastgen.serving.http.openai.vllm import VllmChatFields
from fastgen.serving.http.streaming import unless_gone
from fastgen.serving.isolated.texts import encode_text
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service


def model_routes(service: Service, version: str) -> APIRouter:
    """Returns the routes, for ``service``."""
    router = APIRouter(route_class=ConversationRoute, tags=["models"])
    created = now()

    def model() -> Model:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "fastgen",
            "max_model_len": service.facts.max_model_len,
        }

    @router.get("/v1/models", responses=ERRORS)
    async def list_models() -> Models:
        """The model that is served, in a list of one."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}", responses=ERRORS)
    async def retrieve_model(name: str) -> Model:
        """The model that is served, by its name."""
        check_model(service, name)
        return model()

    @router.get("/version")
    async def get_version() -> Version:
        """The version of fastgen."""
        return {"version": version}

    @router.post("/tokenize", responses=ERRORS)
    async def tokenize(request: Request, body: TokenizeRequest) -> Tokenized:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        async with unless_gone(request):
            tokens = await token_ids(body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.max_model_len}

    async def token_ids(body: TokenizeRequest) -> list[int]:
        check_model(service, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError("give prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            return await encode_chat(
                service, body.messages, for_template(body.tools), body, add_special_tokens=bool(body.add_special_tokens)
            )
        for name in ("tools", *VllmChatFields.model_fields):
            if getattr(body, name) is not None:
                raise BadRequestError(f"{name} goes with messages only", param=name)
        assert body.prompt is not None
        try:
            return await encode_text(
                service.codec, body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        except InvalidArgumentError as error:
            raise BadRequestError(str(error), param="prompt") from error

    @router.post("/detokenize", response_model=Detokenized, responses=ERRORS)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids. Special tokens have no text."""
        check_model(service, body.model)
        check_ids(service, body.tokens, "tokens")
        try:
            with service.making_text(len(body.tokens)):
                async with unless_gone(request):
                    text = await service.turns.run(decoding(service.codec, body.tokens))
        except InvalidArgumentError as error:
            raise BadRequestError(str(error), param="tokens") from error
        return Response(encode_json({"prompt": text}), media_type="application/json")

    return router
