"""The ASGI application: its paths and their handlers."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from fastgen.serving.http.errors import add_error_handlers
from fastgen.serving.http.generate import generate_routes
from fastgen.serving.http.openai.chat import chat_routes
from fastgen.serving.http.openai.completions import completion_routes
from fastgen.serving.http.openai.models import model_routes
from fastgen.serving.http.openai.responses.routes import responses_routes
from fastgen.serving.http.openai.unserved import unserved_routes
from fastgen.serving.http.page import live_routes, page_routes
from fastgen.serving.http.recording import recording_routes
from fastgen.serving.http.sagemaker import sagemaker_routes
from fastgen.serving.monitoring.prometheus import CONTENT_TYPE
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service
from fastgen.serving.tools.formats import tool_format_named
from fastgen.version import __version__


def create_app(service: Service, options: ServeOptions) -> FastAPI:
    """Returns the whole HTTP application for ``service``, which may still be starting."""
    app = FastAPI(title="fastgen", docs_url=None, redoc_url=None, redirect_slashes=False)
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        """The server is alive, whatever the state of its engine."""
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """200 if requests are accepted, else 503, with the state as text."""
        return Response(service.state, 200 if service.state == "ready" else 503, media_type="text/plain")

    @app.get("/-/healthz", include_in_schema=False)
    async def healthz() -> Response:
        """The same as ``/ready``, at the path that KubeRay probes before it sends clients to the head of a cluster."""
        return await ready()

    @app.get("/metrics")
    async def metrics() -> Response:
        """All counters, for Prometheus."""
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE)

    app.include_router(generate_routes(service))
    tool_format = None if options.tool_format is None else tool_format_named(options.tool_format)
    app.include_router(model_routes(service, __version__))
    app.include_router(completion_routes(service))
    app.include_router(chat_routes(service, tool_format))
    app.include_router(responses_routes(service, tool_format))
    app.include_router(unserved_routes())
    app.include_router(sagemaker_routes(service))
    app.include_router(recording_routes(service))
    app.include_router(page_routes())
    app.include_router(live_routes(service))
    return app


async def prepare(app: FastAPI) -> None:
    """Builds the checks of all bodies, and the description of the paths.

    FastAPI builds them when they are first needed: at the first request of each path, and at the first one for a path
    that does not exist. That takes up to a second, in which streams would wait. It is done on another thread, while the
    model is loaded.
    """
    await asyncio.to_thread(app.openapi)
