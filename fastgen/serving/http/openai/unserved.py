"""Paths of OpenAI and TGI that are not served here: each says what to do instead."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException

_STORED = (
    "nothing is stored here, so there is no response or conversation to retrieve, continue, cancel or delete; keep the "
    "answer, and send the whole conversation as input"
)
_COUNTS = "tokens of a response's input are not counted here; POST /tokenize counts those of a text or of messages"
_EMBEDDINGS = (
    "embeddings are not served here: this server generates text; serve an embedding model by another program, and give "
    "its address to the client that needs embeddings"
)
_TGI_STREAM = (
    "this is a path of TGI; POST /invocations takes the same body, with `stream`: true and the header "
    "`accept: text/event-stream`, and /v1/completions and /v1/chat/completions take OpenAI's"
)


def unserved_routes() -> APIRouter:
    """Returns the routes. They are not part of the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    async def refuse_stored() -> None:
        raise HTTPException(404, _STORED)

    async def refuse_counts() -> None:
        raise HTTPException(404, _COUNTS)

    async def refuse_embeddings() -> None:
        raise HTTPException(404, _EMBEDDINGS)

    async def refuse_tgi_stream() -> None:
        raise HTTPException(404, _TGI_STREAM)

    router.add_api_route("/generate_stream", refuse_tgi_stream, methods=["POST"])
    router.add_api_route("/v1/responses/input_tokens", refuse_counts, methods=["POST"])
    router.add_api_route("/v1/responses/{rest:path}", refuse_stored, methods=["GET", "POST", "DELETE"])
    router.add_api_route("/v1/conversations", refuse_stored, methods=["POST"])
    router.add_api_route("/v1/conversations/{rest:path}", refuse_stored, methods=["GET", "POST", "DELETE"])
    router.add_api_route("/v1/embeddings", refuse_embeddings, methods=["POST"])
    return router
