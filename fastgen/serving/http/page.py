"""The page at ``/``: its static files, which are public, and the data of its live view."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from importlib.resources import files

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastgen.runtime.metrics import Metrics
from fastgen.serving.engine.engine import ReplicaView
from fastgen.serving.http.shared_query import SharedQueries
from fastgen.serving.monitoring.live import LiveView
from fastgen.serving.refusals import RefusedError, UnavailableError
from fastgen.serving.service import Service, State

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Only this server's own files and answers, nothing inline, and not inside a frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers cache it, but check each time whether it has changed
}
# How long the live view waits for an engine that is running a step.
ANSWER_S = 2.0


class LiveReplica(msgspec.Struct):
    """The state of a replica; see :class:`~fastgen.serving.engine.engine.ReplicaView`."""

    id: str
    host: str
    state: str
    num_running: int
    num_waiting: int
    outstanding_tokens: int
    restarts: int
    # Blocks of its KV cache, and those that are held; ``None`` until it has reported them.
    num_blocks: int | None
    num_held_blocks: int | None


class Live(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of the server, and of its engine if that answers."""

    model: str
    state: State
    # How often the engine was restarted.
    restarts: int
    # ``None`` while the model is not loaded.
    has_chat_template: bool | None
    engine: LiveView | None
    # The replicas, if there are any, and the id of the one that ``engine`` describes.
    replicas: list[LiveReplica] = []
    replica: str | None = None


class _File:
    """A file of the page as it is served."""

    def __init__(self, name: str, content: bytes):
        self.content = content
        self.media_type = _MEDIA_TYPES["." + name.rpartition(".")[2]]
        self.headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    def response(self, request: Request) -> Response:
        if self.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers, media_type=self.media_type)


def page_routes() -> APIRouter:
    """Returns the routes ``/`` and ``/page/…`` for the page's files. They need no key."""
    router = APIRouter(include_in_schema=False)
    folder = files("fastgen.serving").joinpath("page")
    pages = {entry.name: _File(entry.name, entry.read_bytes()) for entry in folder.iterdir()}
    index = pages.pop("index.html")

    @router.get("/")
    async def root(request: Request) -> Response:
        return index.response(request)

    @router.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return pages[name].response(request) if name in pages else Response(status_code=404)

    return router


def live_routes(service: Service) -> APIRouter:
    """Returns the route ``/live``: the present state of the server and its engine, as JSON. It follows the needs of the
    page, so it is not part of the documented API.
    """
    router = APIRouter(include_in_schema=False)
    live_views = SharedQueries(partial(_live_view, service))

    @router.get("/live")
    async def live(replica: str | None = None) -> Response:
        views = service.engine.replica_views()
        shown = _shown(views, replica)
        view = await live_views.take(shown)
        body = msgspec.json.encode(_live(service, views, shown, view))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    return router


def _shown(views: list[ReplicaView], wanted: str | None) -> str | None:
    """Returns the id of the replica to show: ``wanted`` if it exists, else the first ready one."""
    ids = [view.id for view in sorted(views, key=lambda view: (view.state != "ready", view.id))]
    return wanted if wanted in ids else next(iter(ids), None)


def _live(service: Service, views: list[ReplicaView], shown: str | None, view: LiveView | None) -> Live:
    return Live(
        model=service.model_name,
        state=service.state,
        restarts=service.engine.num_restarts,
        has_chat_template=_has_chat_template(service),
        engine=view,
        replicas=[_live_replica(each, service.metrics.replicas.get(each.id)) for each in views],
        replica=shown,
    )


def _live_replica(view: ReplicaView, metrics: Metrics | None) -> LiveReplica:
    return LiveReplica(
        view.id,
        view.host,
        view.state,
        view.num_running,
        view.num_waiting,
        view.outstanding_tokens,
        view.num_restarts,
        None if metrics is None else metrics.kv_blocks,
        None if metrics is None else metrics.kv_blocks_held,
    )


def _has_chat_template(service: Service) -> bool | None:
    try:
        return service.codec.has_chat_template
    except UnavailableError:
        return None


async def _live_view(service: Service, replica: str | None) -> LiveView | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await service.engine.ask("live", LiveView, replica=replica)
    except (RefusedError, TimeoutError):
        return None
