"""OpenAI's endpoints in this process, over answers that a test has chosen or an engine of this process gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
from fastapi import FastAPI

from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.requests.outputs import FinishReason, RequestMetrics
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.answers import Answers
from fastgen.serving.compat.sagemaker import sagemaker_routes
from fastgen.serving.engine.messages import End, Progress
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.http.errors import add_error_handlers
from fastgen.serving.http.openai.chat import chat_routes
from fastgen.serving.http.openai.completions import completion_routes
from fastgen.serving.http.openai.models import model_routes
from fastgen.serving.service import Running
from fastgen.serving.tools.formats import ToolFormat

MODEL = "scripted"


def scripted_codec(template: str = "", special_tokens: tuple[str, ...] = ()) -> TextCodec:
    """tiny-llama's tokenizer, with another chat template and further special tokens."""
    codec = TextCodec.from_checkpoint(Path(locate("tiny-llama")), {})
    codec.tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    codec.tokenizer.chat_template = template or codec.tokenizer.chat_template
    return TextCodec(
        codec.tokenizer, eos_token_ids=codec.eos_token_ids, default_sampling=SamplingParams(temperature=0.0)
    )


class _Piecemeal(EngineRequest):
    """Tells of one token at a time."""

    async def news(self) -> list[Progress]:
        if not self._news:
            return await super().news()
        return [self._news.pop(0)]


class ScriptedService:
    """What of a ``Service`` the endpoints use. ``answer`` gives the tokens, and why they end, of each request, and none
    for one that waits for ever; all requests are kept in ``asked``."""

    model_name = MODEL

    def __init__(
        self,
        codec: TextCodec,
        answer: Callable[[list[int], SamplingParams], tuple[list[int], FinishReason]],
        *,
        max_model_len: int = 4096,
    ):
        self.codec, self._answer = codec, answer
        self.facts = SimpleNamespace(max_model_len=max_model_len, vocab_size=len(codec.tokenizer))
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self._cancelled: set[EngineRequest] = set()
        self.engine: Any = SimpleNamespace(finish=lambda request: None, cancel=self._cancelled.add)

    @property
    def num_cancelled(self) -> int:
        return len(self._cancelled)

    async def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        is_stream: bool,
        arrived_s: float | None = None,
        spelled: Any = None,
    ) -> Running:
        self.asked.append((prompt_ids, sampling))
        request = _Piecemeal(len(self.asked), len(prompt_ids), sampling, 0.0)
        token_ids, reason = self._answer(prompt_ids, sampling)
        for token_id in token_ids[:-1]:
            request.add(Progress(request.number, 0, [token_id], None, None))
        if token_ids:
            end = End(reason, None, None, RequestMetrics(queue_s=0.0, ttft_s=0.1), 0.1)
            request.add(Progress(request.number, 0, token_ids[-1:], None, end))
        return Running(self, request, Answers(prompt_ids, sampling, self.codec, spelled))  # type: ignore[arg-type]


def application(service: Any, tool_format: ToolFormat | None = None) -> FastAPI:
    """OpenAI's endpoints and SageMaker's over ``service``."""
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(model_routes(service, "0"))
    app.include_router(completion_routes(service))
    app.include_router(chat_routes(service, tool_format))
    app.include_router(sagemaker_routes(service))
    return app


@asynccontextmanager
async def openai_client(service: Any, tool_format: ToolFormat | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of OpenAI's own, of an application over ``service``."""
    transport = httpx2.ASGITransport(app=application(service, tool_format))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://scripted/v1", api_key="none", max_retries=0, http_client=http)
